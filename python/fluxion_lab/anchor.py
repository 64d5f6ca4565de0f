"""anchor: the least budgets of the request's anchor query, for all of its decode steps. Needs no training.

The query of a request's last prefilled token is measured once a layer: the least budget at every block size that keeps
the criterion, by reading everything. The paper has these numbers as features (Fluxion, appendix A: "budget
estimation"); here they are the decision. It is the better the more the later queries of a head are like its anchor's.
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

ANY: Final = "any"


def choice(blocks: str = ANY, heads: str | None = None, *more: str) -> Choice:
    """What BLK[:all] leaves to choose from: one block size BLK, or any; and with all no streaming heads.

    Raises:
        NotLegal: it is not written like that.
    """
    if more or heads not in (None, "all"):
        raise arguments.NotLegal
    return Choice(BLOCKS if blocks == ANY else (arguments.block(blocks),), heads == "all")


class AnchorPolicy(Policy):
    """Every head reads what its anchor query would have had to read; a head that needed nothing streams.

    Args:
        criterion: what the budgets achieve for the anchor query.
        choice: what there is to choose from.
    """

    forms: ClassVar[tuple[str, ...]] = ("anchor[:TAU[:BLK[:all]]]",)
    needs = Needs.FEATURES
    option_keys = frozenset({"tau"})

    def __init__(self, criterion: Criterion, choice: Choice = DYNAMIC) -> None:
        self.criterion = criterion
        self.choice = choice
        self._step: DecodeStep | None = None

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        tau = arguments.fraction(words[0]) if words else context.tau
        return cls(Criterion(Deviation.LAYER, tau), choice(*words[1:]))

    def begin_step(self, step: DecodeStep) -> None:
        self._step = step

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        assert observed.features is not None
        return self.planned(observed.features[..., BUDGETS])

    def planned(self, budgets: torch.Tensor) -> LayerPlan:
        """A plan by least budgets [B, Hq, 4], by block size."""
        assert self._step is not None, "plan() before begin_step()"
        return plan_measured(budgets, self._step.middle, self._step.kv_heads, self.choice)
