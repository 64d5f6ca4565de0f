"""What was measured of requests while they were read exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch

from fluxion_sglang.predictor.features import ANCHOR, COUNT
from fluxion_sglang.predictor.measure import BLOCK_SIZES

MOST_STEPS: Final = 12
"""Steps of a request that are measured at most."""


def is_measured(step: int) -> bool:
    """Whether the step of this number, from 0, is one of them: the first eight, then each twice as far as the last."""
    return step < 8 or (step <= 64 and step.bit_count() == 1)


def step_bytes(layers: int, heads: int) -> int:
    """Of one step of a request."""
    return layers * heads * (COUNT + len(BLOCK_SIZES)) * 4


class Measured(NamedTuple):
    """Decode steps of one request in all layers that are planned.

    Attributes:
        features: [S, L, Hq, 41] float32. budgets: [S, L, Hq, 5] float32, least budgets (`predictor/measure.py`).
    """

    features: torch.Tensor
    budgets: torch.Tensor

    @property
    def anchor(self) -> torch.Tensor:
        """[L, Hq * 28]: what its last prefilled token said, the same at every step."""
        return self.features[0][..., list(ANCHOR)].flatten(1)

    @property
    def nbytes(self) -> int:
        return self.features.nbytes + self.budgets.nbytes


def pack(requests: Sequence[Measured]) -> dict[str, torch.Tensor]:
    """As tensors that a file can have; at least one request."""
    return {
        "features": torch.cat([request.features for request in requests]),
        "budgets": torch.cat([request.budgets for request in requests]),
        "steps": torch.tensor([len(request.features) for request in requests]),
    }


def unpack(tensors: Mapping[str, torch.Tensor]) -> list[Measured]:
    """What `pack` was given.

    Raises:
        KeyError, ValueError, RuntimeError: they are not of `pack`.
    """
    features, budgets = tensors["features"], tensors["budgets"]
    if features.shape[1:] != (*budgets.shape[1:3], COUNT) or budgets.shape[3:] != (len(BLOCK_SIZES),):
        raise ValueError(f"features {list(features.shape)} and budgets {list(budgets.shape)} do not belong together.")
    steps = tensors["steps"].tolist()
    return [Measured(*parts) for parts in zip(features.split(steps), budgets.split(steps), strict=True)]
