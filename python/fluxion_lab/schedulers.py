"""Three schedulers to compare Fluxion's own order (the largest value first) with, for `DecodeEngine.scheduler`.

Source: Fluxion (arXiv 2605.07719), section 8.3 (Fig. 10 c): "No
Parallel, which performs no scheduling; Uniform allocation, which uniformly distributes tasks according to the number of
attention heads; Length-based allocation, which statically assigns tasks based on input length". The paper gives no
further details; each docstring states the decisions made here. None of the three uses a task's cost: tasks stay in
order of arrival, by request, then by KV head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fluxion_sglang.executor.base import ExecutorId
from fluxion_sglang.policy.base import DecodeStep, LayerPlan


def one_alone(plan: LayerPlan, step: DecodeStep, executors: Sequence[ExecutorId]) -> tuple[torch.Tensor, torch.Tensor]:
    """The first executor does everything, as in the paper's baseline, where only the CPU computes sparse attention."""
    return _assigned(torch.zeros_like(plan.blk), executors)


def evenly(plan: LayerPlan, step: DecodeStep, executors: Sequence[ExecutorId]) -> tuple[torch.Tensor, torch.Tensor]:
    """Distribute the tasks in turn: every executor gets the same number, give or take one, of tasks of any size."""
    tasks = _tasks(plan, step)
    turn = tasks.flatten().cumsum(0).view_as(plan.blk) - 1
    return _assigned(turn.clamp(min=0) % len(executors), executors)


def by_length(plan: LayerPlan, step: DecodeStep, executors: Sequence[ExecutorId]) -> tuple[torch.Tensor, torch.Tensor]:
    """Assign the tasks of the longest requests to the first executor, of the shortest to the last, in equal shares.

    Tokens are those of the middles, for any budgets, because this scheduler knows only the input's length. A task on
    the border between two executors belongs to the one with most of it.
    """
    tokens = (_tasks(plan, step) * step.middle.long().unsqueeze(1)).flatten()
    longest_first = tokens.argsort(descending=True, stable=True)
    in_order = tokens[longest_first]
    # Center of each task's interval among all tokens, doubled to stay integral: 0 .. 2 * total.
    at = 2 * in_order.cumsum(0) - in_order
    share = torch.empty_like(tokens)
    share[longest_first] = at * len(executors) // (2 * tokens.sum()).clamp(min=1)
    return _assigned(share.clamp(max=len(executors) - 1).view_as(plan.blk), executors)


def _tasks(plan: LayerPlan, step: DecodeStep) -> torch.Tensor:
    """[B, H] bool: the groups that make a task. (A group with an empty list makes none, but is counted.)"""
    wanted = (plan.budget > 0).view(step.batch, step.kv_heads, step.q_heads // step.kv_heads).any(-1)
    return (plan.blk != 0) & (step.middle > 0).unsqueeze(1) & wanted


def _assigned(share: torch.Tensor, executors: Sequence[ExecutorId]) -> tuple[torch.Tensor, torch.Tensor]:
    """share: [B, H], index into `executors`."""
    ids = torch.tensor([int(executor) for executor in executors], dtype=torch.int32)
    return torch.zeros(share.shape), ids[share.long()]
