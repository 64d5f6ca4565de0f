"""labels: the least budgets of every step itself, found by reading everything. For quality tables only.

It shows the decisions of an ideal predictor. In a table it separates the predictor's loss from the limits of the
criterion and of the selection by blocks.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from fluxion_lab.ablations import CRITERIA
from fluxion_lab.anchor import TAU, AnchorPolicy, choice
from fluxion_sglang.policy import arguments
from fluxion_sglang.policy.base import UNSEEN, Context, LayerPlan, Needs, Observed, Policy
from fluxion_sglang.predictor.criterion import Criterion, Deviation
from fluxion_sglang.predictor.measure import measure


class LabelsPolicy(AnchorPolicy):
    """Like `AnchorPolicy`, with every step as its own anchor."""

    forms: ClassVar[tuple[str, ...]] = ("labels[:TAU[:BLK[:all]]]", "labels:score95", "labels:output10")
    needs = Needs.RESIDENTS
    yardstick = True

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        match words:
            case ():
                return cls(Criterion(Deviation.LAYER, TAU))
            case (name,) if name in CRITERIA:
                return cls(CRITERIA[name])
            case tau, *chosen:
                return cls(Criterion(Deviation.LAYER, arguments.fraction(tau)), choice(*chosen))
        raise arguments.NotLegal

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        step, world = self._step, self.world
        assert step is not None and step.page_table is not None, "plan() before begin_step()"
        assert world is not None and observed.scale is not None
        # The first size is single tokens, which serving does not select.
        found = [
            measure(
                world.pool, layer, step.page_table[b], step.seq_lens[b : b + 1], q[b : b + 1], observed.scale,
                world.pool.placement.window, [self.criterion],
            ).budgets[0, :, 0, 1:]
            for b in range(step.batch)
        ]  # fmt: skip
        return self.planned(torch.stack(found))
