"""Who may take which task of a layer, and in what order: the interface of a scheduler, and the one that serves.

Source: Fluxion (arXiv 2605.07719), section 6.2. `lab/schedulers.py` has those that the paper compares it with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fluxion_sglang import plugins
from fluxion_sglang.executor.base import ExecutorId
from fluxion_sglang.policy.base import DecodeStep, LayerPlan


class Schedule(NamedTuple):
    """What `NativePlan` takes of it.

    Attributes:
        value: [B, H] float32, larger runs earlier; equal ones in the order of arrival.
        owner: [B, H] int32, the `ExecutorId` that alone may take the task; None: whoever is free.
    """

    value: torch.Tensor
    owner: torch.Tensor | None


Scheduler = Callable[[LayerPlan, DecodeStep, Sequence[ExecutorId]], Schedule]
"""From what a layer reads and the executors there are, the native workers first; pure."""


def by_priority(plan: LayerPlan, step: DecodeStep, executors: Sequence[ExecutorId]) -> Schedule:
    """One queue, the largest value first; whoever is free takes the next."""
    return Schedule(plan.value, None)


def scheduler_named(name: str) -> Scheduler:
    """The scheduler of the option `scheduler`."""
    if name == "priority":
        return by_priority
    scheduler: Scheduler = plugins.load(plugins.SCHEDULERS, name)
    return scheduler
