"""psa: reads blocks until an estimate suffices (PSA, arXiv 2503.00392, Algorithm 1).

Every head reads the blocks of the middle in order of criticality, a microbatch at a time. It stops when the tokens that
it attended to are estimated to hold the share epsilon of its attention. The estimate uses the bound that no remaining
block weighs more than the lightest chosen one. So the budget is found anew for every layer and query.

The native task implements it (`csrc/lab/early_stop.h`) and documents decisions that the paper leaves open. The
threshold covers the query's whole attention, including sinks and window, which in the paper are ordinary blocks and
here are always computed. The paper's cache of hot blocks (section 3.4) is in device memory; on the CPU there is none.
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
"""Block scores. `quest`: the upper bound of q.k over the box of minima and maxima (arXiv 2406.10774). `mean`: the same
over ArkVale's cuboid-mean (NeurIPS 2024, the paper's choice), which is the center of that box plus and minus the mean
distance of the keys from it, by dimension."""

MEAN_SPREAD: Final = {16: 0.5, 32: 0.45, 64: 0.4, 128: 0.4}
"""The mean distance from the box's center, as a share of its half width, by block size: approximately that of the
bundled model's keys. Metadata has only the box, so `mean` uses this share of it."""

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
        # The bytes that a task reads are unknown in advance; rank tasks by the length of the middle.
        value = task_value(step.middle, blk, budget)
        self._plan = LayerPlan(blk, budget, value, kinds=(EarlyStop(every(self.epsilon), every(self.spread)),))

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        assert self._plan is not None, "plan() before begin_step()"
        return self._plan
