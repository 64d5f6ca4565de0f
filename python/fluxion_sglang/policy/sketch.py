"""sketch: estimates the attention weights of the middle from 4-bit copies of its keys, and reads the heaviest tokens.

The pool keeps a *sketch* of every key: 4 bits an element, rotated so that no element dominates, with one scale a token.
1. A step scores all pages by the upper two bits, a fourteenth of the bytes of keys and values in bfloat16.
2. It scores the tokens of pages that may matter by all four bits.
3. A head selects the heaviest tokens until at most the share EPS of its attention is left.
4. The heaviest of these are read as stored. For the others, only the values are read, weighted by estimate.

The policy needs no training and keeps no state, so the first request is served like any other.

Sources: a share of the attention instead of a number of tokens, and 4-bit keys to estimate it, Twilight (arXiv
2502.02770); the rotation, QuaRot (arXiv 2404.00456).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final

import torch

from fluxion_sglang.native import function
from fluxion_sglang.policy import arguments
from fluxion_sglang.policy.base import (
    SKETCHED,
    UNSEEN,
    Context,
    DecodeStep,
    LayerPlan,
    Needs,
    Observed,
    Policy,
    TaskKind,
    task_value,
)

DEFAULT_EPS: Final = 0.05

READ: Final = 0.1
"""Typical share of the middle that is read. Tasks are ranked by it, because the true share is unknown when planning."""


@dataclass(frozen=True)
class SketchedTokens(TaskKind):
    """Tasks of block size `SKETCHED` (`csrc/engine/sketched.h`). They need `Needs.RESIDENTS` and a pool with sketches.

    All heads of a group attend to the union of their choices. A budget above 0 says only that a group reads.

    Attributes:
        left: [B, H] float32 in [0, 1]: share of its attention, residents included, that a head of the group may leave
            unread by the sketches' estimate. 0 reads everything, keys and values.
    """

    left: torch.Tensor

    @cached_property
    def handle(self) -> object:
        return function("sketched_create")(self.left)

    @classmethod
    def joined(
        cls, parts: Sequence[tuple[torch.Tensor, SketchedTokens | None]], step: tuple[int, int]
    ) -> SketchedTokens:
        whole = cls(torch.zeros(step))
        for at, own in parts:
            if own is not None:
                whole.left[at] = own.left
        return whole


class SketchPolicy(Policy):
    """Heads of all layers read until at most the share `eps` of their attention is left.

    Args:
        eps: that share, in (0, 1]; 1 reads nothing of the middle.
    """

    forms: ClassVar[tuple[str, ...]] = ("sketch[:EPS]",)
    needs = Needs.RESIDENTS
    sketches = True

    def __init__(self, eps: float = DEFAULT_EPS) -> None:
        self.eps = eps
        self._plan: LayerPlan | None = None

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        arguments.at_most(words, 1)
        return cls(arguments.fraction(words[0]) if words else DEFAULT_EPS)

    @property
    def steady(self) -> bool:
        return type(self) is SketchPolicy

    def begin_step(self, step: DecodeStep) -> None:
        groups = step.batch, step.kv_heads
        budget = torch.ones(step.batch, step.q_heads)
        self._plan = LayerPlan(
            torch.full(groups, SKETCHED, dtype=torch.int32),
            budget,
            task_value(step.middle, torch.ones(groups), READ * budget),
            kinds=(SketchedTokens(torch.full(groups, self.eps)),),
        )

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        assert self._plan is not None, "plan() before begin_step()"
        return self._plan
