"""What was measured of requests while they were read exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Self

import torch

from fluxion_sglang.predictor.features import ANCHOR, COUNT
from fluxion_sglang.predictor.measure import BLOCK_SIZES

FIRST_STEPS: Final = 16
"""So many steps of a request are measured. Of later ones, some in each stretch that is twice as long as the last."""

STRETCHES: Final = 14
"""Of them, at most: up to 262,144 tokens of an answer."""

OF_A_STRETCH: Final = 4
"""Steps of it that are measured, each somewhere in its quarter."""

LAYERS: Final = 4
"""Layers of a step that are measured. The middle is read once for each."""


def layers_measured(step: int, number: int, layers: int) -> frozenset[int]:
    """Those of a step, of so many; none: the step is not measured.

    Predictors err more on steps that are never measured, so which of a long answer's later steps these are, and which
    layers come first, differs from request to request as by chance.

    Args:
        step: from 0, since the request is measured. number: of the request, among those that are measured.
    """
    turn = 0
    if step >= FIRST_STEPS:
        begin = 1 << step.bit_length() - 1
        quarter = begin // OF_A_STRETCH
        turn = step // quarter * quarter  # where its own begins
        if step != turn + _drawn(b"step", number, turn) % quarter or begin >= FIRST_STEPS << STRETCHES:
            return frozenset()
    first = _drawn(b"layer", number) + step * LAYERS if step < FIRST_STEPS else _drawn(b"layer", number, turn)
    return frozenset(place % layers for place in range(first, first + min(LAYERS, layers)))


def _drawn(what: bytes, *numbers: int) -> int:
    """The same of the same, as by chance of others."""
    return int.from_bytes(hashlib.blake2b(b"%s %r" % (what, numbers), digest_size=8).digest(), "little")


SAMPLES: Final = 2048
"""Of a request are kept at most: heads in layers in steps."""

_SAMPLE_BYTES: Final = (COUNT + len(BLOCK_SIZES)) * 4


def most_bytes(layers: int, heads: int) -> tuple[int, int]:
    """Most bytes of what is measured of a request: while it runs, and of what is kept of it."""
    anchor, step = layers * heads * len(ANCHOR) * 4, min(LAYERS, layers) * heads * _SAMPLE_BYTES
    samples = (FIRST_STEPS + STRETCHES * OF_A_STRETCH) * step
    return anchor + samples, anchor + min(samples, SAMPLES * _SAMPLE_BYTES)


class Measured(NamedTuple):
    """One request.

    Attributes:
        anchor: [L, F] float32, what its last prefilled token said in each layer that is planned (`anchor_of`).
        features: [S, 41] float32, of heads in layers in steps. budgets: [S, 5] float32, their least budgets
            (`predictor/measure.py`).
    """

    anchor: torch.Tensor
    features: torch.Tensor
    budgets: torch.Tensor

    @classmethod
    def of(cls, anchor: torch.Tensor, features: torch.Tensor, budgets: torch.Tensor) -> Self:
        """Of the features [..., 41] and budgets [..., 5] at most `SAMPLES`, chosen at random."""
        features, budgets = features.reshape(-1, COUNT), budgets.reshape(-1, len(BLOCK_SIZES))
        if len(features) > SAMPLES:
            chosen = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))[:SAMPLES]
            features, budgets = features[chosen], budgets[chosen]
        return cls(anchor, features, budgets)

    def like(self, other: Self) -> bool:
        """Whether both are answers to one prompt, but for rounding."""
        return torch.allclose(self.anchor, other.anchor, rtol=1e-3, atol=1e-4)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self)


def anchor_of(features: torch.Tensor) -> torch.Tensor:
    """[Hq * 28] of the features [Hq, 41] of a layer: those that are the same at every step of a request."""
    return features[:, list(ANCHOR)].flatten()


def pack(requests: Sequence[Measured]) -> dict[str, torch.Tensor]:
    """As tensors that a file can have; at least one request."""
    return {
        "anchors": torch.stack([request.anchor for request in requests]),
        "features": torch.cat([request.features for request in requests]),
        "budgets": torch.cat([request.budgets for request in requests]),
        "samples": torch.tensor([len(request.features) for request in requests]),
    }


def unpack(tensors: Mapping[str, torch.Tensor]) -> list[Measured]:
    """What `pack` was given.

    Raises:
        KeyError, ValueError, RuntimeError: they are not of `pack`.
    """
    anchors, features, budgets = (tensors[name] for name in ("anchors", "features", "budgets"))
    if anchors.ndim != 3 or features.shape[1:] != (COUNT,) or budgets.shape[1:] != (len(BLOCK_SIZES),):
        shapes = [list(part.shape) for part in (anchors, features, budgets)]
        raise ValueError(f"anchors, features and budgets have the shapes {shapes}")
    samples = tensors["samples"].tolist()
    parts = zip(anchors.unbind(), features.split(samples), budgets.split(samples), strict=True)
    # Copies, so that none keeps the memory of all.
    return [Measured(*(tensor.clone() for tensor in part)) for part in parts]
