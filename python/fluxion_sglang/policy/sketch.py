"""sketch: tokens of the middle are weighed by small copies of their keys, and those that weigh enough are read.

The pool keeps every key a second time, in four bits an element (a *sketch*: rotated, so that no element stands out,
and with one scale a token). A step skims all pages by the upper two bits, a fourteenth of what keys and values take in
bfloat16. It scores the tokens of pages that may matter by all four bits, and a head takes the heaviest until at most
the share EPS of its attention is left. The heaviest of these are read as they are stored. The others are many and weigh
little: of them only the values are read, and the sketches' weights stand.

Nothing is trained or learned, and nothing is remembered: the first request is served like any other.

Sources: a share of the attention instead of a number of tokens, and keys in four bits to estimate it, Twilight (arXiv
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
"""About the share of the middle that is read: what tasks are ranked by before anybody knows."""


@dataclass(frozen=True)
class SketchedTokens(TaskKind):
    """Tasks of block size `SKETCHED` (`csrc/engine/sketched.h`). It takes `Needs.RESIDENTS` and a pool with sketches.

    Attributes:
        left: [B, H] float32 in [0, 1]: the share of its attention, residents included, that a head of the group
            may leave unread by the estimate of the sketches; 0 reads everything, keys and values. Budgets say only that
            a group reads.
            All heads of the group attend to what any of them chose.
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
    """Heads of all layers read until at most a share of their attention is left.

    Args:
        eps: that share, in (0, 1]; with 1 they read nothing of the middle.
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
