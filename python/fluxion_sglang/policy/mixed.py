"""Combines the policies of a batch whose requests have different ones into one plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fluxion_sglang.policy.base import UNSEEN, DecodeStep, LayerPlan, Observed, Policy, TaskKind


def compose(policies: Sequence[Policy]) -> Policy:
    """One policy for a batch, given that of each request. If all are the same object, return it."""
    if all(policy is policies[0] for policy in policies):
        return policies[0]
    return MixedPolicy(policies)


class MixedPolicy(Policy):
    """Each policy plans its own requests as if the batch had no others.

    Args:
        policies: one for each request, in batch order. Requests with the same object form one part.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        parts: dict[int, tuple[Policy, list[int]]] = {}
        for i, policy in enumerate(policies):
            parts.setdefault(id(policy), (policy, []))[1].append(i)
        self._parts = [(policy, torch.tensor(indices)) for policy, indices in parts.values()]
        self._plans: list[LayerPlan] = []
        self._whole: LayerPlan | None = None

    @property
    def steady(self) -> bool:
        return all(policy.steady for policy, _ in self._parts)

    def begin_step(self, step: DecodeStep) -> None:
        self._whole = None
        for policy, at in self._parts:
            table = None if step.page_table is None else step.page_table[at]
            part = replace(
                step, rows=step.rows[at], seq_lens=step.seq_lens[at], middle=step.middle[at], page_table=table
            )
            policy.begin_step(part)

    def decoded(self, layer: int, q: torch.Tensor, out: torch.Tensor | None) -> None:
        for policy, at in self._parts:
            policy.decoded(layer, q[at], None if out is None else out[at])

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        plans = [policy.plan(layer, q[at], _part(observed, at)) for policy, at in self._parts]
        # Steady policies return the same object for every layer; then the joined plan is reused.
        if self._whole is None or any(new is not old for new, old in zip(plans, self._plans, strict=True)):
            self._plans, self._whole = plans, self._scatter(plans, q.shape[0])
        return self._whole

    def _scatter(self, plans: list[LayerPlan], batch: int) -> LayerPlan:
        first = plans[0]
        blk, budget, value = (
            torch.empty(batch, part.shape[1], dtype=part.dtype) for part in (first.blk, first.budget, first.value)
        )
        for (_, at), plan in zip(self._parts, plans, strict=True):
            blk[at], budget[at], value[at] = plan.blk, plan.budget, plan.value
        return LayerPlan(blk, budget, value, self._joined(plans, (batch, blk.shape[1])))

    def _joined(self, plans: list[LayerPlan], step: tuple[int, int]) -> tuple[TaskKind, ...]:
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


def _part(observed: Observed, at: torch.Tensor) -> Observed:
    features, parts = (None if tensor is None else tensor[at] for tensor in (observed.features, observed.parts))
    return Observed(features, observed.scale, parts, observed.windows)
