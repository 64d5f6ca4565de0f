"""psa: read until it is enough (PSA, arXiv 2503.00392, Algorithm 1).

Every head goes through the blocks of the middle in the order of their criticality, a microbatch at a time, and stops
when what it has attended to is estimated to hold the share epsilon of its attention, by the bound that no block which
is left weighs more than the lightest one it chose. So the budget is not set but found, for every layer and query anew.

The work is done in the native task (`csrc/lab/early_stop.h`), which says what the paper leaves open. The threshold is
of the query's whole attention: sinks and window, which are blocks like all others there and always computed here,
count. The paper's cache of hot blocks (section 3.4) is one of device memory: on the CPU there is none.
"""

from __future__ import annotations

from typing import ClassVar, Final

import torch

from fluxion_lab.kinds import EarlyStop
from fluxion_sglang.policy import arguments
from fluxion_sglang.policy.base import UNSEEN, Context, DecodeStep, LayerPlan, Needs, Observed, Policy, task_value

QUEST: Final = "quest"
MEAN: Final = "mean"
SCORES: Final = (QUEST, MEAN)
"""How blocks are ranked. `quest`: by the upper bound of q.k over the box of minima and maxima (arXiv 2406.10774).
`mean`: by the same over ArkVale's cuboid-mean (NeurIPS 2024, the paper's choice): the center of that box, plus and
minus the mean distance of the keys from it, dimension by dimension."""

MEAN_SPREAD: Final = {16: 0.5, 32: 0.45, 64: 0.4, 128: 0.4}
"""The mean distance from the box's center, as a share of its half width, by block size: about that of the bundled
model's keys. Metadata has the box alone, so `mean` takes this share of it."""

DEFAULT_EPSILON: Final = 0.95
DEFAULT_BLK: Final = 32
"""The paper's examples (sections 1 and 2.3)."""


class PsaPolicy(Policy):
    """Every head of every layer reads until it has the share `epsilon` of its attention.

    Args:
        epsilon: in (0, 1]; 1 reads everything.
        blk: 16, 32, 64 or 128 tokens.
        score: one of `SCORES`.
    """

    forms: ClassVar[tuple[str, ...]] = (f"psa[:EPS[:BLK[:{QUEST}|{MEAN}]]]",)
    needs = Needs.RESIDENTS

    def __init__(self, epsilon: float = DEFAULT_EPSILON, blk: int = DEFAULT_BLK, score: str = MEAN) -> None:
        self.epsilon = epsilon
        self.blk = blk
        self.spread = 1.0 if score == QUEST else MEAN_SPREAD[blk]
        self._plan: LayerPlan | None = None

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        arguments.at_most(words, 3)
        epsilon, blk, score = (*words, *(str(DEFAULT_EPSILON), str(DEFAULT_BLK), MEAN)[len(words) :])
        if score not in SCORES:
            raise arguments.NotLegal
        return cls(arguments.fraction(epsilon), arguments.block(blk), score)

    def begin_step(self, step: DecodeStep) -> None:
        def every(value: float) -> torch.Tensor:
            return torch.full((step.batch, step.kv_heads), value)

        blk = every(self.blk).to(torch.int32)
        budget = torch.ones(step.batch, step.q_heads)
        # What a task will read nobody knows yet: the longer the middle, the more.
        value = task_value(step.middle, blk, budget)
        self._plan = LayerPlan(blk, budget, value, kinds=(EarlyStop(every(self.epsilon), every(self.spread)),))

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        assert self._plan is not None, "plan() before begin_step()"
        return self._plan
