"""Policies of another package, for servers that are to fail. A server finds them with this folder on PYTHONPATH."""

from __future__ import annotations

import time

import torch

from fluxion_sglang.policy.base import UNSEEN, DecodeStep, LayerPlan, Observed
from fluxion_sglang.policy.full import FullPolicy
from fluxion_sglang.policy.streaming import StreamingPolicy


class FaultyPolicy(FullPolicy):
    """faulty:STEP reads everything, and raises in one decode step, counted from 1, after its first layer."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.left = int(step)

    def begin_step(self, step: DecodeStep) -> None:
        self.left -= 1
        super().begin_step(step)

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        if self.left == 0 and layer == 1:
            raise RuntimeError("injected fault")
        return super().plan(layer, q, observed)


class SleeperPolicy(StreamingPolicy):
    """sleeper:SECONDS takes so long to plan the second layer of every step."""

    def __init__(self, seconds: str) -> None:
        super().__init__()
        self.seconds = float(seconds)

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        time.sleep(self.seconds if layer == 1 else 0)
        return super().plan(layer, q, observed)
