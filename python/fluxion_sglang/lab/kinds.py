"""The lab's kinds of tasks (`csrc/lab/single_tokens.h`, `early_stop.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fluxion_sglang.native import function
from fluxion_sglang.policy.base import LayerPlan, TaskKind

SINGLE = 1
"""The block size of groups whose heads read single tokens by their exact scores, each head its own."""


class SingleTokens(TaskKind):
    """Tasks of block size `SINGLE`: ceil(budget * middle) tokens a head, of equal scores the earlier."""

    @cached_property
    def handle(self) -> object:
        return function("single_tokens_create")()

    @classmethod
    def joined(cls, parts: Sequence[tuple[torch.Tensor, SingleTokens | None]], step: tuple[int, int]) -> SingleTokens:
        return cls()


@dataclass(frozen=True)
class EarlyStop(TaskKind):
    """Heads that go through the blocks of their group until they have enough, at most through their budgets.

    It takes `Needs.RESIDENTS`, and blocks of 16 tokens or more.

    Attributes:
        stop: [B, H] float32: in (0, 1), the share of its attention, residents included, that each head of the group
            shall have by PSA's estimate (`progressive.py`); 0 and 1: they read their budgets.
        spread: [B, H] float32 in [0, 1], by which these groups score their blocks, whatever the option `spread` says
            of the others; 1 is Quest's bound.
    """

    stop: torch.Tensor
    spread: torch.Tensor

    @cached_property
    def handle(self) -> object:
        return function("early_stop_create")(self.stop, self.spread)

    @classmethod
    def joined(cls, parts: Sequence[tuple[torch.Tensor, EarlyStop | None]], step: tuple[int, int]) -> EarlyStop:
        whole = cls(torch.zeros(step), torch.ones(step))
        for at, own in parts:
            if own is not None:
                whole.stop[at], whole.spread[at] = own.stop, own.spread
        return whole


def early_stop(plan: LayerPlan) -> EarlyStop | None:
    """What a plan says of groups that stop early."""
    return next((kind for kind in plan.kinds if isinstance(kind, EarlyStop)), None)
