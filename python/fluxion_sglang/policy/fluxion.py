"""fluxion: a trained predictor estimates each head's budget at every step (Fluxion, sections 5 and 6)."""

from __future__ import annotations

from typing import ClassVar

import torch

from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.policy import arguments
from fluxion_sglang.policy.base import UNSEEN, Context, DecodeStep, LayerPlan, Needs, Observed, Policy, unplanned
from fluxion_sglang.predictor.artifact import LoadedPredictor
from fluxion_sglang.predictor.criterion import Criterion, Deviation
from fluxion_sglang.predictor.features import COUNT, INDEX
from fluxion_sglang.predictor.inference import NativePredictor, plan_groups


class FluxionPolicy(Policy):
    """Streaming heads read nothing. Other heads get a budget at every block size (Eq. 1) and a block size (Eq. 3).

    Args:
        predictor: trained for this model, sinks, window and the criterion's tau.

    Attributes:
        threshold: heads whose logit exceeds it are streaming heads.
        blocks: the block sizes to choose from.
    """

    forms: ClassVar[tuple[str, ...]] = ("fluxion[:TAU]",)
    needs = Needs.FEATURES
    predicts = True

    def __init__(self, predictor: LoadedPredictor) -> None:
        self.criterion = Criterion(Deviation.LAYER, predictor.tau)
        self.predictor = NativePredictor(predictor.network)
        self.margins = predictor.margins
        self.threshold = predictor.threshold
        self.blocks: tuple[int, ...] = BLOCKS
        self._step: DecodeStep | None = None
        self._predicted = torch.empty(0, 3)
        self._margins: dict[int, torch.Tensor] = {}  # by local layer, for this process's heads

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        arguments.at_most(words, 1)
        return cls(context.predictor(arguments.fraction(words[0]) if words else None))

    def begin_step(self, step: DecodeStep) -> None:
        self._step = step
        if self._predicted.shape[0] != step.batch * step.q_heads:
            self._predicted = torch.empty(step.batch * step.q_heads, 3)

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        assert self._step is not None, "plan() before begin_step()"
        assert observed.features is not None
        step = self._step
        if layer not in self._margins:
            self._margins[layer] = self._of_these_heads(observed.features)
        self.predictor.forward(observed.features.view(-1, COUNT), self._predicted, step.workers)
        plan = unplanned(step)
        plan_groups(
            self._predicted,
            step.middle,
            step.kv_heads,
            self.threshold,
            self._margins[layer],
            plan.blk,
            plan.budget,
            plan.value,
            self.blocks,
        )
        return plan

    def _of_these_heads(self, features: torch.Tensor) -> torch.Tensor:
        """The margins [Hq, 4] of a layer. The features give the indices of layer and heads in the whole model."""
        layer, heads = (features[0, :, INDEX[name]].long() for name in ("layer", "head"))
        return self.margins[layer, heads].contiguous()
