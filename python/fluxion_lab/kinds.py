"""The lab's kinds of tasks (`csrc/lab/single_tokens.h`, `early_stop.h`, `listed.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple

import torch

from fluxion_lab.native import function
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.policy.base import LayerPlan, TaskKind

SINGLE: Final = 1
"""The block size of groups whose heads each read their own single tokens, selected by exact scores."""

LISTED: Final = -1
"""The block size of groups that read the tokens listed in their plan."""


class SingleTokens(TaskKind):
    """Tasks of block size `SINGLE`: ceil(budget * middle) tokens a head; of equal scores the earlier one."""

    @cached_property
    def handle(self) -> object:
        return function("single_tokens_create")()

    @classmethod
    def joined(cls, parts: Sequence[tuple[torch.Tensor, SingleTokens | None]], step: tuple[int, int]) -> SingleTokens:
        return cls()


@dataclass(frozen=True)
class EarlyStop(TaskKind):
    """Heads that read the blocks of their group in order until an estimate suffices, at most up to their budgets.

    They need `Needs.RESIDENTS`, and blocks of 16 tokens or more.

    Attributes:
        stop: [B, H] float32: in (0, 1), the share of its attention, residents included, that each head of the group
            must reach by PSA's estimate (`psa.py`); 0 and 1: heads read their budgets.
        spread: [B, H] float32 in [0, 1], the spread of these groups' block scores (`NativePool`); other groups use 1,
            Quest's bound.
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


class Record(NamedTuple):
    """Memory for the selections of tasks with lists.

    With a record, every head with a budget below 1 scores all its listed tokens, even if it selects all of them.

    Attributes:
        chosen: [n, G] uint16, as `Listed.masks`: the tokens that a head attended to; zero for groups without a task.
        scores: [n, G, 16] float32: q.k, unscaled, of the tokens chosen by heads with a budget < 1; else undefined.
    """

    chosen: torch.Tensor
    scores: torch.Tensor


class Given(NamedTuple):
    """Attention to the middle, or a part of it, that the policy has computed; merged with the lists' result.

    Attributes:
        o: [B, Hq, D] float32. lse: [B, Hq] float32, natural log; -inf: nothing, and o is not read.
    """

    o: torch.Tensor
    lse: torch.Tensor


@dataclass
class Listed(TaskKind):
    """Tasks of block size `LISTED`: single tokens listed in the plan; contiguous CPU tensors.

    A head with a budget of at least 1 attends to all its listed tokens. With a budget between 0 and 1 it attends to the
    ceil(budget * middle) of them with the largest exact q.k (of equal scores the earlier token); with 0 to none. A
    group whose budgets are all 0 makes no task, even if something is given. Heads of a group share the reading of a
    page, and each attends only to its own tokens, for any `attend_union`. Bytes read are the rows of K and V that some
    head attends to, and the keys that were ranked.

    Pages that are unsorted or outside the middle, and invalid offsets, fail the layer.

    Attributes:
        offsets: [B * H + 1] int64: the group of request b and KV head h has entries offsets[b * H + h] to offsets[b * H
            + h + 1]; a group with neither entries nor given attention makes no task.
        pages: [n] int32, logical pages of the request, ascending within a group, in its middle.
        masks: [n, G] uint16: bit t of a head = it lists token t of the page.
        record: receives the tasks' selections, or None.
        given: attention to merge, or None.
    """

    offsets: torch.Tensor
    pages: torch.Tensor
    masks: torch.Tensor
    record: Record | None = None
    given: Given | None = None
    _within: tuple[Listed, torch.Tensor] | None = field(default=None, repr=False)
    """The lists of the whole batch, and the indices of these entries there."""

    @cached_property
    def handle(self) -> object:
        record, given = self.record or (None, None), self.given or (None, None)
        return function("listed_create")(self.offsets, self.pages, self.masks, *record, *given)

    def recorded(self) -> Record:
        """The record, after the layer is done."""
        assert self.record is not None
        if self._within is not None:
            whole, at = self._within
            for mine, joint in zip(self.record, whole.recorded(), strict=True):
                mine.copy_(joint[at])
        return self.record

    @classmethod
    def joined(cls, parts: Sequence[tuple[torch.Tensor, Listed | None]], step: tuple[int, int]) -> Listed:
        """The lists of all parts as one; the entries of a request stay contiguous."""
        batch, heads = step
        counts = torch.zeros(step, dtype=torch.int64)
        pieces: dict[int, tuple[Listed, slice]] = {}  # for each request: its lists and the slice of its entries
        lists = [(at, own) for at, own in parts if own is not None]
        for at, own in lists:
            counts[at] = own.offsets.diff().view(-1, heads)
            ends = own.offsets[::heads].tolist()
            pieces |= {b: (own, slice(*of)) for b, of in zip(at.tolist(), pairwise(ends), strict=True)}
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.flatten().cumsum(0)])
        ordered = [pieces[b] for b in sorted(pieces)]
        pages = torch.cat([own.pages[at] for own, at in ordered])
        masks = torch.cat([own.masks[at] for own, at in ordered])
        whole = cls(offsets, pages, masks, given=_joined_given([(at, own.given) for at, own in lists], batch))
        if any(own.record for _, own in lists):
            whole.record = Record(torch.zeros_like(masks), torch.empty(*masks.shape, PAGE))
            owner = torch.cat([torch.full((at.stop - at.start,), id(own)) for own, at in ordered])
            for own in (own for _, own in lists if own.record):
                own._within = whole, (owner == id(own)).nonzero().squeeze(1)
        return whole


def _joined_given(parts: Sequence[tuple[torch.Tensor, Given | None]], batch: int) -> Given | None:
    of = next((given for _, given in parts if given is not None), None)
    if of is None:
        return None
    whole = Given(torch.empty(batch, *of.o.shape[1:]), torch.full((batch, of.lse.shape[1]), -torch.inf))
    for at, given in parts:
        if given is not None:
            whole.o[at], whole.lse[at] = given
    return whole


def early_stop(plan: LayerPlan) -> EarlyStop | None:
    """The early-stop tasks of a plan, or None."""
    return next((kind for kind in plan.kinds if isinstance(kind, EarlyStop)), None)


def listed(plan: LayerPlan) -> Listed | None:
    """The lists of a plan, or None."""
    return next((kind for kind in plan.kinds if isinstance(kind, Listed)), None)
