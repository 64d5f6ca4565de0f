"""fixed(blk, budget): the same budget for every head, at one block size.

Blocks are ranked by the min/max bound of Quest (arXiv 2406.10774); with (16, 0.05) this is the paper's
"w/o Fluxion" baseline.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.policy import arguments
from fluxion_sglang.policy.base import UNSEEN, Context, DecodeStep, LayerPlan, Observed, Policy, task_value


class FixedPolicy(Policy):
    """Every head of every layer chooses `budget` of the middle in blocks of `blk` tokens.

    All heads of a group attend to the union of their choices, so a head may read more than its budget.

    Args:
        blk: 16, 32, 64 or 128 tokens; 0 makes no task (`streaming`).
        budget: fraction of the middle in [0, 1].
    """

    forms: ClassVar[tuple[str, ...]] = ("fixed:BLK:BUDGET",)

    def __init__(self, blk: int, budget: float) -> None:
        self.blk = blk
        self.budget = budget
        self._plan: LayerPlan | None = None

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        if len(words) != 2:
            raise arguments.NotLegal
        return cls(arguments.block(words[0]), arguments.fraction(words[1]))

    @property
    def steady(self) -> bool:
        own = type(self)  # a subclass may override one of these
        return (own.begin_step, own.plan, own.decoded) == (FixedPolicy.begin_step, FixedPolicy.plan, Policy.decoded)

    @property
    def uniform(self) -> tuple[int, float] | None:
        return (self.blk, self.budget) if self.steady and self.blk in (0, *BLOCKS) else None

    def begin_step(self, step: DecodeStep) -> None:
        blk = torch.full((step.batch, step.kv_heads), self.blk, dtype=torch.int32)
        budget = torch.full((step.batch, step.q_heads), self.budget, dtype=torch.float32)
        # The plan depends on neither layer nor query; one plan serves the whole step.
        self._plan = LayerPlan(blk, budget, task_value(step.middle, blk, budget))

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        assert self._plan is not None, "plan() before begin_step()"
        return self._plan
