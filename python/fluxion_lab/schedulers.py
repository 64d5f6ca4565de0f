"""The three schedulers that Fluxion's own order (the largest value first) is compared with: `DecodeEngine.scheduler`.

Source: Fluxion (arXiv 2605.07719), section 8.3 (Fig. 10 c): "No
Parallel, which performs no scheduling; Uniform allocation, which uniformly distributes tasks according to the number of
attention heads; Length-based allocation, which statically assigns tasks based on input length". The paper says no more
of these; what it leaves open is decided here, and each docstring says how. None of the three knows what a task costs:
tasks stay in the order of arrival, by request, then by KV head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fluxion_sglang.executor.base import ExecutorId
from fluxion_sglang.policy.base import DecodeStep, LayerPlan


def one_alone(plan: LayerPlan, step: DecodeStep, executors: Sequence[ExecutorId]) -> tuple[torch.Tensor, torch.Tensor]:
    """The first executor does everything, as in the paper's baseline, whose sparse attention is the CPU's alone."""
    return _assigned(torch.zeros_like(plan.blk), executors)


def evenly(plan: LayerPlan, step: DecodeStep, executors: Sequence[ExecutorId]) -> tuple[torch.Tensor, torch.Tensor]:
    """Every executor gets as many tasks as any other, give or take one, however large: they are dealt in turn."""
    tasks = _tasks(plan, step)
    turn = tasks.flatten().cumsum(0).view_as(plan.blk) - 1
    return _assigned(turn.clamp(min=0) % len(executors), executors)


def by_length(plan: LayerPlan, step: DecodeStep, executors: Sequence[ExecutorId]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tasks of the longest requests to the first executor, of the shortest to the last, with equal tokens for all.

    Tokens are those of the middles, whatever the budgets: the input's length is all this scheduler knows. A task on the
    border between two executors belongs to the one with most of it.
    """
    tokens = (_tasks(plan, step) * step.middle.long().unsqueeze(1)).flatten()
    longest_first = tokens.argsort(descending=True, stable=True)
    in_order = tokens[longest_first]
    # Where the middle of each task lies among all tokens, doubled to stay whole: 0 .. 2 * total.
    at = 2 * in_order.cumsum(0) - in_order
    share = torch.empty_like(tokens)
    share[longest_first] = at * len(executors) // (2 * tokens.sum()).clamp(min=1)
    return _assigned(share.clamp(max=len(executors) - 1).view_as(plan.blk), executors)


def _tasks(plan: LayerPlan, step: DecodeStep) -> torch.Tensor:
    """[B, H] bool: the groups that make a task. (One that lists nothing makes none, and is counted all the same.)"""
    wanted = (plan.budget > 0).view(step.batch, step.kv_heads, step.q_heads // step.kv_heads).any(-1)
    return (plan.blk != 0) & (step.middle > 0).unsqueeze(1) & wanted


def _assigned(share: torch.Tensor, executors: Sequence[ExecutorId]) -> tuple[torch.Tensor, torch.Tensor]:
    """share: [B, H], index into `executors`."""
    ids = torch.tensor([int(executor) for executor in executors], dtype=torch.int32)
    return torch.zeros(share.shape), ids[share.long()]
