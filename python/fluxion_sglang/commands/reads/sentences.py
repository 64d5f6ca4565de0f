"""Three sentences that explain a picture, and the format of numbers."""

from __future__ import annotations

import math

import numpy as np

from fluxion_sglang.commands.reads.picture import MODEL_PARTS, Picture


def sentences(picture: Picture) -> list[str]:
    """Three sentences that explain the picture."""
    return [_how_much(picture), _which_layers(picture), _errors(picture) if picture.audited else _time(picture)]


def _how_much(picture: Picture) -> str:
    more = f", plus block metadata of {percent(picture.metadata)} of its size" if picture.metadata else ""
    return f"Heads read {percent(picture.mean_share)} of the middle{more}."


def _which_layers(picture: Picture) -> str:
    there = [
        (share, layer)
        for share, layer in zip(picture.layer_share, picture.layers, strict=True)
        if not math.isnan(share)
    ]
    (most, at_most), (least, at_least) = max(there), min(there)
    if percent(most) == percent(least):
        return f"All layers read alike ({percent(most)})." if len(there) > 1 else "The model has one layer."
    return f"Layer {at_most} reads most ({percent(most)}), layer {at_least} least ({percent(least)})."


def _time(picture: Picture) -> str:
    if not picture.parts:
        return "No step was timed: that takes several decode steps of a request in a row, without the option audit."
    whole = sum(picture.parts.values())
    outside = sum(picture.parts.get(part, 0.0) for part in MODEL_PARTS) / whole
    tasks = picture.parts.get("tasks", 0.0) / whole
    return (
        f"A decode step takes {milliseconds(whole)}, {percent(outside)} of it outside attention, so a sparser policy "
        f"could save at most {percent(tasks)}."
    )


def _errors(picture: Picture) -> str:
    errors = picture.errors
    assert errors is not None
    if not np.isfinite(errors).any():
        return "No error is known."
    if float(np.nanmax(errors)) < 1e-4:
        return "No head is off by more than rounding."
    layer, head = np.unravel_index(np.nanargmax(errors), errors.shape)
    return (
        f"The mean error of a head is {np.nanmean(errors):.3f} of its layer's largest output; head {head} of layer "
        f"{layer} has the largest, {errors[layer, head]:.3f}."
    )


def percent(share: float) -> str:
    if math.isnan(share):
        return "-"
    return f"{share:.1%}" if 0 < share < 0.0995 and round(share * 100, 1) % 1 else f"{share:.0%}"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def scale_end(values: np.ndarray) -> float:
    """The end of the colour scale: the next round number above all shares."""
    largest = float(np.nanmax(values)) if np.isfinite(values).any() else 0.0
    return next(end for end in (0.05, 0.1, 0.25, 0.5, 1.0, math.inf) if largest <= end) if largest <= 1 else largest
