"""What was learned from measured requests: a predictor, and which requests it knows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple, Self

import torch

from fluxion_sglang.learning.familiar import Familiar
from fluxion_sglang.predictor.artifact import MARGINS, LoadedPredictor, check_values
from fluxion_sglang.predictor.network import HeadPredictor

THRESHOLD: Final = "threshold"
"""Name of the streaming threshold among the tensors."""


class Learned(NamedTuple):
    """What n requests taught.

    Attributes:
        predictor: with margins [layers, Hq, 4] by the model's numbers.
        familiar: which requests it may be asked about.
        longest: tokens of the longest middle that was measured.
    """

    predictor: LoadedPredictor
    familiar: Familiar
    longest: float

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it, by name, for a file."""
        network = {f"network.{name}": value for name, value in self.predictor.network.state_dict().items()}
        familiar = {f"familiar.{name}": value for name, value in vars(self.familiar).items()}
        threshold = torch.tensor(self.predictor.threshold, dtype=torch.float64)
        whole = {**network, **familiar, MARGINS: self.predictor.margins, THRESHOLD: threshold}
        whole["longest"] = torch.tensor(self.longest, dtype=torch.float64)
        return {name: value.contiguous() for name, value in whole.items()}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], tau: float) -> Self:
        """Raises KeyError, ValueError, RuntimeError for what is not of `tensors`."""

        def part(name: str) -> dict[str, torch.Tensor]:
            return {key.removeprefix(name): value for key, value in tensors.items() if key.startswith(name)}

        network = HeadPredictor()
        network.load_state_dict(part("network."))
        network.eval().requires_grad_(False)
        check_values({**network.state_dict(), MARGINS: tensors[MARGINS]}, "What was learned", "begin anew")
        threshold, longest = (float(tensors[name]) for name in (THRESHOLD, "longest"))
        familiar = Familiar(**part("familiar."))
        n, layers, _ = familiar.known.shape
        if familiar.near.shape != (layers, n) or familiar.limits.shape != (layers,):
            raise ValueError("its parts do not belong together")
        if not math.isfinite(threshold + longest) or n < 2:
            raise ValueError("its parts do not belong together")
        if not familiar.mean.shape == familiar.std.shape == familiar.known.shape[1:]:
            raise ValueError("its parts do not belong together")
        return cls(LoadedPredictor(network, tau, threshold, tensors[MARGINS], {}), familiar, longest)
