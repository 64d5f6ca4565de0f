"""anchor: applies the least budgets of a request's anchor query to all of its decode steps. Needs no training.

The query of a request's last prefilled token is measured once a layer: by reading everything, it finds the least budget
at every block size that meets the criterion. In the paper these numbers are features (Fluxion, appendix A: "budget
estimation"); here they are the budgets. Quality depends on the similarity of later queries to the anchor query.
"""

from __future__ import annotations

from typing import ClassVar, Final

import torch

from fluxion_lab.granularity import DYNAMIC, Choice, plan_measured
from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.policy import arguments
from fluxion_sglang.policy.base import UNSEEN, Context, DecodeStep, LayerPlan, Needs, Observed, Policy
from fluxion_sglang.predictor.criterion import Criterion, Deviation
from fluxion_sglang.predictor.features import BUDGETS

TAU: Final = 0.10
"""Default of specs without a tau."""

ANY: Final = "any"


def choice(blocks: str = ANY, heads: str | None = None, *more: str) -> Choice:
    """Parse BLK[:all]: one block size BLK, or any; with all, no head is a streaming head.

    Raises:
        NotLegal: other words.
    """
    if more or heads not in (None, "all"):
        raise arguments.NotLegal
    return Choice(BLOCKS if blocks == ANY else (arguments.block(blocks),), heads == "all")


class AnchorPolicy(Policy):
    """Every head reads the least budget of its anchor query; a head with budget 0 streams.

    Args:
        criterion: error criterion of the budgets.
        choice: the allowed block sizes and heads.
    """

    forms: ClassVar[tuple[str, ...]] = ("anchor[:TAU[:BLK[:all]]]",)
    needs = Needs.FEATURES

    def __init__(self, criterion: Criterion, choice: Choice = DYNAMIC) -> None:
        self.criterion = criterion
        self.choice = choice
        self._step: DecodeStep | None = None

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        tau = arguments.fraction(words[0]) if words else TAU
        return cls(Criterion(Deviation.LAYER, tau), choice(*words[1:]))

    def begin_step(self, step: DecodeStep) -> None:
        self._step = step

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        assert observed.features is not None
        return self.planned(observed.features[..., BUDGETS])

    def planned(self, budgets: torch.Tensor) -> LayerPlan:
        """A plan from least budgets [B, Hq, 4], by block size."""
        assert self._step is not None, "plan() before begin_step()"
        return plan_measured(budgets, self._step.middle, self._step.kv_heads, self.choice)
