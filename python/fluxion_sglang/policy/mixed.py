"""A batch whose requests have policies of their own: each part to its policy, one plan out of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.policy.base import UNSEEN, DecodeStep, Given, LayerPlan, Listed, Observed, Policy, Record, TaskKind


def compose(policies: Sequence[Policy]) -> Policy:
    """One policy for a batch, given that of each request: the policy itself where all have the same object."""
    if all(policy is policies[0] for policy in policies):
        return policies[0]
    return MixedPolicy(policies)


class MixedPolicy(Policy):
    """Lets every policy plan the requests that are its own, as if there were no others in the batch.

    Args:
        policies: one a request, in the order of the batch. Requests with the same object form one part.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        parts: dict[int, tuple[Policy, list[int]]] = {}
        for i, policy in enumerate(policies):
            parts.setdefault(id(policy), (policy, []))[1].append(i)
        self._parts = [(policy, torch.tensor(indices)) for policy, indices in parts.values()]
        self._plans: list[LayerPlan] = []
        self._whole: LayerPlan | None = None
        self._pieces: list[tuple[int, int, int]] = []

    def begin_step(self, step: DecodeStep) -> None:
        self._whole = None
        for policy, at in self._parts:
            table = None if step.page_table is None else step.page_table[at]
            part = replace(
                step, rows=step.rows[at], seq_lens=step.seq_lens[at], middle=step.middle[at], page_table=table
            )
            policy.begin_step(part)

    def decoded(self, layer: int, q: torch.Tensor, out: torch.Tensor | None) -> None:
        if self._whole is not None and self._whole.record is not None:
            end = 0
            for part, first, last in self._pieces:
                own = self._plans[part].record
                start, end = end, end + last - first
                for mine, joint in zip(own or (), self._whole.record if own else (), strict=True):
                    mine[first:last] = joint[start:end]
        for policy, at in self._parts:
            policy.decoded(layer, q[at], None if out is None else out[at])

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        plans = [policy.plan(layer, q[at], _part(observed, at)) for policy, at in self._parts]
        # Policies that plan a step once give the same object for every layer.
        if self._whole is None or any(new is not old for new, old in zip(plans, self._plans, strict=True)):
            self._plans, self._whole = plans, self._scatter(plans, q.shape[0])
        return self._whole

    def _scatter(self, plans: list[LayerPlan], batch: int) -> LayerPlan:
        first = plans[0]
        blk, budget, value = (
            torch.empty(batch, part.shape[1], dtype=part.dtype) for part in (first.blk, first.budget, first.value)
        )
        listed = self._joined(plans, batch, first.blk.shape[1])
        record = None
        if listed is not None and any(plan.record is not None for plan in plans):
            chosen = torch.zeros_like(listed.masks)
            record = Record(chosen, torch.empty(*chosen.shape, PAGE))
        given = None
        of = next((plan.given for plan in plans if plan.given is not None), None)
        if of is not None:
            given = Given(torch.empty(batch, *of.o.shape[1:]), torch.full((batch, of.lse.shape[1]), -torch.inf))
        for (_, at), plan in zip(self._parts, plans, strict=True):
            blk[at], budget[at], value[at] = plan.blk, plan.budget, plan.value
            if given is not None and plan.given is not None:
                given.o[at], given.lse[at] = plan.given
        return LayerPlan(blk, budget, value, listed, record, given, self._joined_kinds(plans, (batch, blk.shape[1])))

    def _joined_kinds(self, plans: list[LayerPlan], step: tuple[int, int]) -> tuple[TaskKind, ...]:
        kinds = dict.fromkeys(type(kind) for plan in plans for kind in plan.kinds)
        return tuple(
            kind.joined(
                [
                    (at, next((own for own in plan.kinds if type(own) is kind), None))
                    for (_, at), plan in zip(self._parts, plans, strict=True)
                ],
                step,
            )
            for kind in kinds
        )

    def _joined(self, plans: list[LayerPlan], batch: int, kv_heads: int) -> Listed | None:
        """The lists of all plans as one: those of a request follow one another in both."""
        counts = torch.zeros(batch, kv_heads, dtype=torch.int64)
        of: dict[int, tuple[int, int, int]] = {}  # of each request: whose list, from where to where
        for part, ((_, at), plan) in enumerate(zip(self._parts, plans, strict=True)):
            if plan.listed is None:
                continue
            counts[at] = plan.listed.offsets.diff().view(-1, kv_heads)
            starts = plan.listed.offsets[::kv_heads].tolist()
            of |= {b: (part, *ends) for b, *ends in zip(at.tolist(), starts[:-1], starts[1:], strict=True)}
        self._pieces = [of[b] for b in sorted(of)]
        if not self._pieces:
            return None
        lists = {part: listed for part, plan in enumerate(plans) if (listed := plan.listed) is not None}
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.flatten().cumsum(0)])
        pages = torch.cat([lists[part].pages[first:end] for part, first, end in self._pieces])
        masks = torch.cat([lists[part].masks[first:end] for part, first, end in self._pieces])
        return Listed(offsets, pages, masks)


def _part(observed: Observed, at: torch.Tensor) -> Observed:
    features, parts = (None if tensor is None else tensor[at] for tensor in (observed.features, observed.parts))
    return Observed(features, observed.scale, parts, observed.windows)
