"""Ablations of the paper's policies (Fluxion, section 8.3): restricted choices, and other criteria.

`fluxion`, `anchor` and `labels` take NAME:TAU:BLK[:all] (`anchor.choice`).
"""

from __future__ import annotations

import math
from typing import ClassVar, Final

from fluxion_lab.anchor import AnchorPolicy, choice
from fluxion_sglang.policy import arguments
from fluxion_sglang.policy.base import Context, Policy
from fluxion_sglang.policy.fluxion import FluxionPolicy
from fluxion_sglang.predictor.criterion import Criterion, Deviation

CRITERIA: Final = {
    "score95": Criterion(Deviation.COVERAGE, 0.95),
    "output10": Criterion(Deviation.HEAD, 0.10),
}
"""The criteria of the label ablation."""


class FluxionAblation(FluxionPolicy):
    """`fluxion` with restricted choices."""

    forms: ClassVar[tuple[str, ...]] = ("fluxion:TAU:BLK[:all]",)

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        if not words:
            raise arguments.NotLegal
        tau, legal = arguments.fraction(words[0]), choice(*words[1:])
        policy = cls(context.predictor(tau))
        policy.blocks = legal.blocks
        if legal.every_head:
            policy.threshold = math.inf
        return policy


class Score95(AnchorPolicy):
    """`anchor` with the attention mass that is read as the criterion."""

    forms: ClassVar[tuple[str, ...]] = ("score95",)

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        arguments.at_most(words, 0)
        return cls(CRITERIA["score95"])


class Output10(AnchorPolicy):
    """`anchor` with the error relative to each head's own output as the criterion."""

    forms: ClassVar[tuple[str, ...]] = ("output10",)

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        arguments.at_most(words, 0)
        return cls(CRITERIA["output10"])
