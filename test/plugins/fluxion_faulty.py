"""Failing policies of another package, for servers. A server finds them with this folder on PYTHONPATH."""

from __future__ import annotations

import time

import torch

from fluxion_sglang.policy.base import UNSEEN, DecodeStep, LayerPlan, Observed
from fluxion_sglang.policy.full import FullPolicy
from fluxion_sglang.policy.streaming import StreamingPolicy


class FaultyPolicy(FullPolicy):
    """faulty:STEP[:RANK] reads everything, and raises in decode step STEP (from 1) after its first layer; with RANK
    only on that rank."""

    def __init__(self, step: str, rank: str = "") -> None:
        super().__init__()
        self.left, self.rank = int(step), int(rank) if rank else None

    def begin_step(self, step: DecodeStep) -> None:
        self.left -= 1
        super().begin_step(step)

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        if self.left == 0 and layer == 1 and self.rank in (None, torch.distributed.get_rank()):
            raise RuntimeError("injected fault")
        return super().plan(layer, q, observed)


class SleeperPolicy(StreamingPolicy):
    """sleeper:SECONDS delays the plan of the second layer in every step."""

    def __init__(self, seconds: str) -> None:
        super().__init__()
        self.seconds = float(seconds)

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        time.sleep(self.seconds if layer == 1 else 0)
        return super().plan(layer, q, observed)


class RotPolicy(FullPolicy):
    """rot reads everything, and flips a bit of its first request in the host pool before its second step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def begin_step(self, step: DecodeStep) -> None:
        self.steps += 1
        if self.steps == 2:
            assert self.world is not None and step.page_table is not None
            page = int(step.page_table[0, self.world.pool.placement.sink_pages + 3])
            tile = self.world.pool.tiles(1)[0, page]
            tile.view(torch.uint8).flatten()[99] ^= 4
        super().begin_step(step)
