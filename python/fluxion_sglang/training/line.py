"""The line that is learnt of a head's least budgets: Fluxion's Eq. 1, bgt(blk) = bgt0 + k log2 blk."""

from __future__ import annotations

import torch

from fluxion_sglang.predictor.measure import BLOCK_SIZES


def fit_line(budgets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bgt0, the budget for blocks of one token as in the paper, and k, the least squares of the other sizes.

    Args:
        budgets: [..., 5], as `Measurement.budgets`.

    Returns:
        bgt0 [...], k [...], in the dtype of `budgets`.
    """
    x = torch.tensor(BLOCK_SIZES, dtype=budgets.dtype, device=budgets.device).log2()
    bgt0 = budgets[..., 0]
    k = ((budgets - bgt0[..., None]) * x).sum(-1) / x.square().sum()
    return bgt0, k
