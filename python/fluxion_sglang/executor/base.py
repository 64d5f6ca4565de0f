"""The interface of an executor, which computes tasks.

The tasks of a layer form one queue, sorted by priority: a lane for each executor and a shared lane, each with an atomic
position. An idle executor pulls the next task and owns it, so each task is computed exactly once. The native workers
(`csrc/engine`) pull without Python. Other executors use this interface; they run on the calling thread between the
layer's begin and finish.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from fluxion_sglang.policy.base import DecodeStep, LayerPlan

if TYPE_CHECKING:
    from fluxion_sglang.native import NativeEngine


class ExecutorId(IntEnum):
    """Identifies an executor to the native queue, which records the owner of each task."""

    CPU = 0
    TORCH = 1


@dataclass(frozen=True)
class LayerWork:
    """A layer's queue as an executor sees it, valid until the layer finishes.

    Attributes:
        page_table: [B, M] int32 on the CPU, physical page of every logical page.
        layer: index into the pool's layers.
        q: [B, Hq, D] on the CPU. scale: multiplies q.k. cap: of the logits (`Variant`).
    """

    native: NativeEngine
    step: DecodeStep
    page_table: torch.Tensor
    plan: LayerPlan
    layer: int
    q: torch.Tensor
    scale: float
    cap: float = 0.0

    @property
    def group(self) -> int:
        return self.step.q_heads // self.step.kv_heads

    def pop(self, executor: ExecutorId) -> int | None:
        """Pop the next task that this executor may take; None if there is none."""
        task = self.native.queue_pop(int(executor))
        return None if task < 0 else task

    def request_and_head(self, task: int) -> tuple[int, int]:
        """Batch index and KV head of a task."""
        return divmod(self.native.task(task), self.step.kv_heads)


class Executor(ABC):
    """Computes tasks of a layer from its queue.

    Attributes:
        id: its identity in the queue, unique within an engine.
    """

    id: ExecutorId

    @abstractmethod
    def drain(self, work: LayerWork) -> None:
        """Pull and complete tasks until the queue is empty. Must deliver or fail every task that it pulled."""
