"""The policy `drawn`: on any model, groups read what groups of the bundled model would read.

Heads of a model with random weights are not worth predicting. To time what `fluxion` costs on such a model, every group
draws a plan (block size, a budget per head) at every step, from plans that the bundled model's predictor made for its
own heads. The time excludes the predictor's decisions, because `plan` only draws. The plans in `plans.json` were
recorded on 2026-11-22.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from fluxion_sglang.policy import DecodeStep, LayerPlan, Policy
from fluxion_sglang.policy.base import UNSEEN, Observed, task_value

PLANS = Path(__file__).with_name("plans.json")
SPEC = "drawn"


class DrawnPolicy(Policy):
    """Draws a new plan for every group at every step; the sequence of draws is the same in every run.

    Args:
        plans: [N, 1 + G] float32: block size of a group (0: all its heads stream) and budgets of its heads. A group
            with more heads than G draws the missing ones from further plans of the same block size.
    """

    spec = SPEC

    def __init__(self, plans: torch.Tensor, seed: int = 0) -> None:
        self._plans = plans
        self._random = torch.Generator().manual_seed(seed)
        self._same = {int(blk): plans[plans[:, 0] == blk, 1:] for blk in plans[:, 0].unique()}

    def begin_step(self, step: DecodeStep) -> None:
        self._step = step

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        step = self._step
        groups, group = step.batch * step.kv_heads, step.q_heads // step.kv_heads
        drawn = self._plans[self._draw(len(self._plans), groups)]
        budget = drawn[:, 1 : 1 + group]
        while budget.shape[1] < group:
            more = [self._same[int(blk)][self._draw(len(self._same[int(blk)]), 1)] for blk in drawn[:, 0]]
            budget = torch.cat([budget, *([torch.cat(more)] if more else [budget])], dim=1)[:, :group]
        blk = drawn[:, 0].to(torch.int32).view(step.batch, step.kv_heads).contiguous()
        blk[step.middle == 0] = 0
        budget = budget.reshape(step.batch, step.q_heads).contiguous()
        return LayerPlan(blk, budget, task_value(step.middle, blk, budget))

    def _draw(self, below: int, count: int) -> torch.Tensor:
        return torch.randint(below, (count,), generator=self._random)


def drawn() -> DrawnPolicy:
    """The policy with the plans of plans.json."""
    return DrawnPolicy(torch.tensor(json.loads(PLANS.read_text())["plans"]))
