"""Draws a picture as a matplotlib figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fluxion_sglang.commands.reads.colours import ERROR, PARTS, SHARE, colour, ink
from fluxion_sglang.commands.reads.picture import Picture
from fluxion_sglang.commands.reads.sentences import milliseconds, percent, scale_end, sentences

_POINTS = 200
"""Most points of a line."""
_CELLS = 24
"""Most columns of the heat map with numbers in its cells."""
_SETTINGS: Any = {"svg.hashsalt": "fluxion", "svg.fonttype": "none", "font.size": 9}


def draw(picture: Picture, path: Path) -> None:
    """Write one file, in the format of its suffix; raises OSError and ValueError."""
    with matplotlib.rc_context(_SETTINGS):
        figure = _figure(picture)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _figure(picture: Picture) -> Figure:
    rows = 1.6 + max(2.2, 0.24 * len(picture.layers))
    figure = Figure(figsize=(11, rows + 3.4), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(rows, 3.2))
    top, bottom = halves
    _heat(picture, top.subplots())
    left, right = bottom.subplots(1, 2, width_ratios=(3, 2))
    # A single reading has no time axis; show the layers instead.
    (_over_time if len(picture.timeline) > 1 else _layers)(picture, left)
    if len(picture.policies) > 1:
        _policies(picture, right)
    else:
        (_layers if picture.audited else _times)(picture, right)
    figure.suptitle(f"{picture.source}: {picture.steps:,} decode steps, {picture.tokens:,} tokens", weight="bold")
    figure.supxlabel("\n".join(sentences(picture)), fontsize=9, x=0.01, ha="left")
    return figure


def _heat(picture: Picture, axis: Any) -> None:
    if picture.errors is not None:
        values, scale, what, columns = picture.errors, ERROR, "Mean error of each query head", "query head"
    else:
        values, scale, what, columns = picture.share, SHARE, "Share of the middle that each group reads", "group"
    end = scale_end(values)
    shades = LinearSegmentedColormap.from_list("fluxion", scale)
    axis.set_facecolor("#808080")  # colour of missing values
    image = axis.imshow(np.ma.masked_invalid(values), cmap=shades, vmin=0, vmax=end, aspect="auto")
    axis.figure.colorbar(image, ax=axis, format=None if picture.audited else PercentFormatter(1, decimals=0), pad=0.01)
    axis.set(title=what, xlabel=columns, ylabel="layer")
    for ticks, set_ticks in ((picture.columns, axis.set_xticks), (picture.layers, axis.set_yticks)):
        places = range(0, len(ticks), max(1, len(ticks) // 32))
        set_ticks(list(places), [str(ticks[i]) for i in places])
    if len(picture.columns) <= _CELLS:
        for (i, j), value in np.ndenumerate(values):
            said = f"{value:.3f}" if picture.audited else percent(float(value))
            axis.text(j, i, said, ha="center", va="center", fontsize=8, color=ink(colour(scale, float(value), end)))


def _over_time(picture: Picture, axis: Any) -> None:
    line = picture.timeline.binned(_POINTS)
    axis.set_title("Share of the middle that is read, over time")
    for i, shares in enumerate(line.shares().T):
        shade = colour(SHARE, i, 1.2 * max(len(picture.layers) - 1, 1))  # leaves out the lightest colours
        axis.plot(line.at, shares, lw=1, color=shade, label=f"layer {picture.layers[i]}")
    axis.plot(line.at, line.total(), color="black", lw=2, label="all")
    axis.set_xlabel("decode step" if picture.audited else "second")
    lines, names = axis.get_legend_handles_labels()
    if len(lines) > 9:  # show the first layer, the last, and all together
        lines, names = [lines[0], *lines[-2:]], [names[0], *names[-2:]]
    axis.legend(lines, names, fontsize=7, ncols=2)
    _percents(axis, line.shares())


def _layers(picture: Picture, axis: Any) -> None:
    axis.set_title("Share of the middle that is read, by layer")
    axis.bar(picture.layers, picture.layer_share, color=SHARE[2])
    axis.set_xlabel("layer")
    axis.xaxis.set_major_locator(MaxNLocator(16, integer=True))
    _percents(axis, picture.layer_share)


def _percents(axis: Any, shares: np.ndarray) -> None:
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.set_ylim(0, scale_end(shares) * 1.03)
    axis.grid(alpha=0.3)


def _times(picture: Picture, axis: Any) -> None:
    whole = sum(picture.parts.values())
    if not whole:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "No step was timed", ha="center", va="center")
        return
    names = picture.part_names
    seconds = [picture.parts.get(part, 0.0) for part in names]
    axis.set_title(f"Where the {milliseconds(whole)} of a decode step go")
    _bars(
        axis,
        list(names.values()),
        [s * 1e3 for s in seconds],
        [PARTS[part] for part in names],
        [f"{milliseconds(s)} ({percent(s / whole)})" for s in seconds],
    )
    axis.set_xlabel("ms")


def _policies(picture: Picture, axis: Any) -> None:
    rows = picture.policies
    axis.set_title("What each policy reads, and its mean error")
    _bars(
        axis,
        [row.policy for row in rows],
        [0.0 if math.isnan(row.share) else row.share for row in rows],
        [SHARE[2]] * len(rows),
        ["no middle" if math.isnan(row.share) else f"{percent(row.share)}, error {row.error:.3f}" for row in rows],
    )
    axis.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.set(xlabel="share of the middle", xticks=np.linspace(0, scale_end(np.array([r.share for r in rows])), 6))


def _bars(
    axis: Any, names: Sequence[str], lengths: Sequence[float], colours: Sequence[str], texts: Sequence[str]
) -> None:
    bars = axis.barh(names, lengths, color=colours)
    axis.bar_label(bars, texts, padding=3, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.45 * max(lengths) or 1.0)  # room for the texts
    axis.spines[["top", "right"]].set_visible(False)
