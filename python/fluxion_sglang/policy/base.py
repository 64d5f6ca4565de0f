"""What to read: the interface of a policy.

A policy decides, for every group of every request in a layer, the block size, each head's budget, and the priority of
the task; it neither selects pages nor computes attention. Budgets are fractions of the middle, so a policy needs no
knowledge of pages; executors turn them into selections, the one currency between the two sides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from fluxion_sglang.kv.placement import Placement


@dataclass(frozen=True)
class DecodeStep:
    """One decode step of a batch of B requests; all tensors on the CPU.

    Attributes:
        rows: [B] int32, request rows (they name the device window).
        seq_lens: [B] int32, tokens of each request, this step's included.
        page_table: [B, M] int32, physical page of every logical page.
        middle: [B] int32, tokens of each request's middle.
        kv_heads: KV heads of this process; q_heads: query heads of this process.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    middle: torch.Tensor
    kv_heads: int
    q_heads: int

    @classmethod
    def build(
        cls,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        placement: Placement,
        kv_heads: int,
        q_heads: int,
    ) -> DecodeStep:
        middle = torch.tensor([placement.middle(int(n)) for n in seq_lens], dtype=torch.int32)
        return cls(
            rows.to(torch.int32), seq_lens.to(torch.int32), page_table, middle, kv_heads=kv_heads, q_heads=q_heads
        )

    @property
    def batch(self) -> int:
        return self.rows.numel()


@dataclass(frozen=True)
class LayerPlan:
    """What a layer reads; contiguous CPU tensors.

    Attributes:
        blk: [B, H] int32, block size of each group in tokens (16, 32, 64 or 128); 0 makes no task.
        budget: [B, Hq] float32, fraction of the middle's tokens that each head reads; >= 1 is everything, 0 a
            streaming head.
        value: [B, H] float32, the task's priority: larger runs earlier.
    """

    blk: torch.Tensor
    budget: torch.Tensor
    value: torch.Tensor


def task_value(middle: torch.Tensor, blk: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """Work of each task in tokens: V(blk) = 2 L / blk + 2 L * sum_h bgt_h (Fluxion, section 6).

    Args:
        middle: [B] tokens of the middle, L. blk: [B, H]. budget: [B, Hq], clipped at 1 here.

    Returns:
        [B, H] float32.
    """
    tokens = middle.to(torch.float32).unsqueeze(1)
    per_group = budget.clamp(max=1.0).view(*blk.shape, -1).sum(-1)
    return 2 * tokens / blk.clamp(min=1) + 2 * tokens * per_group


class Policy(ABC):
    """Decides what each group reads in each layer of a decode step."""

    @abstractmethod
    def begin_step(self, step: DecodeStep) -> None:
        """A new step begins; called once before its layers."""

    @abstractmethod
    def plan(self, layer: int, q: torch.Tensor) -> LayerPlan:
        """What `layer` of the current step reads. q: [B, Hq, D] on the CPU."""
