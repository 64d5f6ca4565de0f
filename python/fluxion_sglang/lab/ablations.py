"""Ablations of the paper's policies (Fluxion, section 8.3): less to choose from, and other criteria.

`fluxion`, `anchor` and `labels` take NAME:TAU:BLK[:all]: one block size BLK, or any; and with all no streaming heads.
"""

from __future__ import annotations

from typing import ClassVar, Final

from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.policy import arguments
from fluxion_sglang.policy.anchor import AnchorPolicy
from fluxion_sglang.policy.base import Context, Policy
from fluxion_sglang.policy.fluxion import FluxionPolicy
from fluxion_sglang.policy.selector import Choice
from fluxion_sglang.predictor.criterion import Criterion, Deviation

ANY: Final = "any"

CRITERIA: Final = {
    "score95": Criterion(Deviation.COVERAGE, 0.95),
    "output10": Criterion(Deviation.HEAD, 0.10),
}
"""Those of the ablation of labels."""


def choice(blocks: str = ANY, heads: str | None = None, *more: str) -> Choice:
    """What BLK[:all] lets the selector choose from; raises NotLegal."""
    if more or heads not in (None, "all"):
        raise arguments.NotLegal
    return Choice(BLOCKS if blocks == ANY else (arguments.block(blocks),), heads == "all")


class FluxionAblation(FluxionPolicy):
    """`fluxion` with a choice."""

    forms: ClassVar[tuple[str, ...]] = ("fluxion:TAU:BLK[:all]",)

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        if not words:
            raise arguments.NotLegal
        tau, legal = arguments.fraction(words[0]), choice(*words[1:])
        return cls(context.predictor(tau), legal)


class AnchorAblation(AnchorPolicy):
    """`anchor` with a choice."""

    forms: ClassVar[tuple[str, ...]] = ("anchor:TAU:BLK[:all]",)

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        if not words:
            raise arguments.NotLegal
        return cls(Criterion(Deviation.LAYER, arguments.fraction(words[0])), choice(*words[1:]))


class Score95(AnchorPolicy):
    """`anchor` by the attention mass that is read."""

    forms: ClassVar[tuple[str, ...]] = ("score95",)

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        arguments.at_most(words, 0)
        return cls(CRITERIA["score95"])


class Output10(AnchorPolicy):
    """`anchor` by each head's own output."""

    forms: ClassVar[tuple[str, ...]] = ("output10",)

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        arguments.at_most(words, 0)
        return cls(CRITERIA["output10"])
