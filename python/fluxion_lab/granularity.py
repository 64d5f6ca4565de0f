"""Selects block sizes and budgets from measured budgets. It also has a reference for `plan_groups` of
`predictor/inference.py`: the choice of one block size a group, in torch, from its definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.policy.base import LayerPlan, task_value

_LOG2 = torch.tensor([blk.bit_length() - 1 for blk in BLOCKS], dtype=torch.float64)


@dataclass(frozen=True)
class Choice:
    """The allowed choices; restrictions are for ablations (Fluxion, Fig. 9).

    Attributes:
        blocks: block sizes.
        every_head: no head streams; all read at least one block.
    """

    blocks: tuple[int, ...] = BLOCKS
    every_head: bool = False


DYNAMIC = Choice()


def select_granularity(
    pred: torch.Tensor,
    middle: torch.Tensor,
    kv_heads: int,
    threshold: float,
    margins: torch.Tensor,
    blocks: Sequence[int] = BLOCKS,
) -> LayerPlan:
    """Plan a layer from predictions: budgets on the line bgt0 + k log2(blk) (Eq. 1), with margins.

    Args:
        pred: [B * Hq, 3] or [B, Hq, 3] float32: bgt0, k, streaming logit. NaN budgets become 1.
        middle: [B] int32, tokens of each middle; 0 makes no task.
        threshold: logits above it are streaming heads.
        margins: [Hq, 4] float32, above 0: factors of each head's budgets.
        blocks: sizes to choose from.
    """
    pred = pred.view(len(middle), -1, 3)
    lines = pred[..., :1].double() + pred[..., 1:2].double() * _LOG2
    budgets = torch.maximum(lines, _one_block(middle)) * margins.double()
    return _select(budgets, pred[..., 2] > threshold, middle, kv_heads, blocks)


def plan_measured(budgets: torch.Tensor, middle: torch.Tensor, kv_heads: int, choice: Choice = DYNAMIC) -> LayerPlan:
    """Plan a layer from budgets measured at each block size, without a fitted line.

    Args:
        budgets: [B, Hq, 4] float32, least budgets in blocks of 16, 32, 64, 128 tokens; all four 0: a streaming head.
        middle: [B] int32, tokens of each middle; 0 makes no task.
    """
    streaming = (budgets == 0).all(-1) & (not choice.every_head)
    return _select(budgets.double(), streaming, middle, kv_heads, choice.blocks)


def _select(
    budgets: torch.Tensor, streaming: torch.Tensor, middle: torch.Tensor, kv_heads: int, among: Sequence[int]
) -> LayerPlan:
    """budgets: [B, Hq, 4] float64, by block size. streaming: [B, Hq] bool."""
    batch, q_heads = streaming.shape
    blocks = torch.tensor(BLOCKS, dtype=torch.float64)
    budgets = torch.minimum(torch.maximum(budgets.nan_to_num(nan=1.0), _one_block(middle)), torch.ones(()).double())
    budgets = torch.where(streaming.unsqueeze(-1) | (middle <= 0).view(-1, 1, 1), 0.0, budgets).float()
    # V / (2 L) has the same minimum as V. The flip makes argmin return the larger of equal block sizes.
    groups = budgets.view(batch, kv_heads, q_heads // kv_heads, len(BLOCKS))
    volume = 1 / blocks + groups.double().sum(2)
    volume[..., [blk not in among for blk in BLOCKS]] = torch.inf
    best = len(BLOCKS) - 1 - volume.flip(-1).argmin(-1)
    empty = (groups == 0).all(-1).all(-1)
    chosen = best.unsqueeze(-1).expand(groups.shape[:3]).unsqueeze(-1)
    budget = groups.gather(-1, chosen).view(batch, q_heads)
    blk = torch.where(empty, 0, torch.tensor(BLOCKS, dtype=torch.int32)[best]).to(torch.int32)
    return LayerPlan(blk, budget.contiguous(), torch.where(empty, 0.0, task_value(middle, blk, budget)))


def _one_block(middle: torch.Tensor) -> torch.Tensor:
    """[B, 1, 4] float64: the budget of one block of each size, at most 1."""
    tokens = middle.to(torch.float64).view(-1, 1, 1)
    return (torch.tensor(BLOCKS, dtype=torch.float64) / tokens.clamp(min=1)).clamp(max=1.0)
