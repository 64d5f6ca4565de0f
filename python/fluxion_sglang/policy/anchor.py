"""anchor: the least budgets of the request's anchor query, for all of its decode steps. Needs no training.

The query of a request's last prefilled token is measured once a layer: the least budget at every block size that keeps
the criterion, by reading everything. The paper has these numbers as features (Fluxion, appendix A: "budget
estimation"); here they are the decision. It is the better the more the later queries of a head are like its anchor's.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from fluxion_sglang.policy import arguments
from fluxion_sglang.policy.base import UNSEEN, Context, DecodeStep, LayerPlan, Needs, Observed, Policy, unplanned
from fluxion_sglang.policy.selector import DYNAMIC, Choice
from fluxion_sglang.predictor.criterion import Criterion, Deviation
from fluxion_sglang.predictor.features import BUDGETS
from fluxion_sglang.predictor.inference import plan_budgets


class AnchorPolicy(Policy):
    """Every head reads what its anchor query would have had to read; a head that needed nothing streams.

    Args:
        criterion: what the budgets achieve for the anchor query.
        choice: what the selector may choose from.
    """

    forms: ClassVar[tuple[str, ...]] = ("anchor[:TAU]",)
    needs = Needs.FEATURES
    option_keys = frozenset({"tau"})

    def __init__(self, criterion: Criterion, choice: Choice = DYNAMIC) -> None:
        self.criterion = criterion
        self.choice = choice
        self._step: DecodeStep | None = None

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        arguments.at_most(words, 1)
        return cls(Criterion(Deviation.LAYER, arguments.fraction(words[0]) if words else context.tau))

    def begin_step(self, step: DecodeStep) -> None:
        self._step = step

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        assert observed.features is not None
        return self.planned(observed.features[..., BUDGETS])

    def planned(self, budgets: torch.Tensor) -> LayerPlan:
        """A plan by least budgets [B, Hq, 4], by block size."""
        assert self._step is not None, "plan() before begin_step()"
        plan = unplanned(self._step)
        plan_budgets(
            budgets.contiguous(),
            self._step.middle,
            self._step.kv_heads,
            plan.blk,
            plan.budget,
            plan.value,
            every_head=self.choice.every_head,
            blocks=self.choice.blocks,
        )
        return plan
