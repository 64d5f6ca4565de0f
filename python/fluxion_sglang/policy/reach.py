"""Reach: how far below what a head has a block's logit may be, and still be read (`csrc/engine/reach.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fluxion_sglang.native import function
from fluxion_sglang.policy.base import TaskKind

BLK = 16
"""Tokens of the blocks that heads go through."""


@dataclass(frozen=True)
class Reach(TaskKind):
    """Heads that go through the blocks of 16 tokens of their group, best first, as long as they are within reach.

    A head goes on while the best block that it has not come to scores a logit of at least log(weight of its residents
    and of the blocks that it has come to) - reach. It does not begin where no block of 128 tokens scores log(weight of
    its residents) - gate. It takes `Needs.RESIDENTS`, and budgets bound how far a head may go.

    Attributes:
        reach, gate: [B, Hq] float32, in units of logits; inf reads everything, -inf nothing. NaN in `reach`: a head of
            a group that is not done so.
    """

    reach: torch.Tensor
    gate: torch.Tensor

    @cached_property
    def handle(self) -> object:
        return function("reach_create")(self.reach, self.gate)

    @classmethod
    def joined(cls, parts: Sequence[tuple[torch.Tensor, Reach | None]], step: tuple[int, int]) -> Reach:
        q_heads = next(own.reach.shape[1] for _, own in parts if own is not None)
        whole = cls(*(torch.full((step[0], q_heads), torch.nan) for _ in range(2)))
        for at, own in parts:
            if own is not None:
                whole.reach[at], whole.gate[at] = own.reach, own.gate
        return whole
