"""labels: the least budgets of every step itself, found by reading everything. For quality tables only.

What a predictor without error would decide: the row that separates what a predictor loses from what the criterion and
the selection by blocks can give.
"""

from __future__ import annotations

import torch

from fluxion_sglang.policy.anchor import AnchorPolicy
from fluxion_sglang.policy.base import UNSEEN, LayerPlan, Needs, Observed


class LabelsPolicy(AnchorPolicy):
    """As `AnchorPolicy`, with every step as its own anchor."""

    needs = Needs.BUDGETS
    yardstick = True

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        assert observed.budgets is not None
        # The first is that of single tokens, which serving does not select.
        return self._planned(observed.budgets[..., 1:])
