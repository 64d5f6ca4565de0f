"""Sketches of keys straight from their definition (`write_sketch` in csrc/kernels/table.h): the kernels' reference."""

from __future__ import annotations

import torch

from fluxion_sglang.kv.placement import PAGE

_CODES = 7.5
"""Codes from 0 to 15 stand for themselves less this."""


def rotation(dim: int) -> torch.Tensor:
    """[D, D] float64: a key k is rotated to k @ rotation(D). q.k of two that were rotated is q.k times
    `mixed_together(D)`."""
    size = mixed_together(dim)
    whole = torch.ones(1, 1, dtype=torch.float64)
    while len(whole) < size:
        whole = torch.cat([torch.cat([whole, whole], 1), torch.cat([whole, -whole], 1)])
    signs = [-1.0 if (d * 0x9E3779B1 & 0xFFFFFFFF) >> 31 else 1.0 for d in range(dim)]
    mixed: torch.Tensor = torch.block_diag(*[whole] * (dim // size))
    return torch.tensor(signs, dtype=torch.float64)[:, None] * mixed


def mixed_together(dim: int) -> int:
    """Elements that a rotation mixes with one another: the largest power of two that divides D."""
    return dim & -dim


def unpacked(sketch: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [16, D] and scales [16] of a sketch [bytes] uint8, float64."""
    both = sketch[: PAGE * dim // 2].view(dim // 8, PAGE, 4)
    codes = torch.stack([both & 15, both >> 4], 2)  # [D / 8, 16, 2, 4]
    scales = sketch[PAGE * dim // 2 :][: 2 * PAGE].view(torch.bfloat16)
    return codes.permute(1, 0, 2, 3).reshape(PAGE, dim).double(), scales.double()


def keys_of(sketch: torch.Tensor, dim: int) -> torch.Tensor:
    """The keys [16, D] that a sketch stands for, float64."""
    codes, scales = unpacked(sketch, dim)
    return (codes - _CODES) * scales[:, None] @ rotation(dim).T / mixed_together(dim)


def least_kept(weights: torch.Tensor, others: float, left: float) -> torch.Tensor:
    """[n] bool: the fewest tokens, the heaviest first, after which at most the share `left` of all is unread.

    Args:
        weights: [n], of the tokens. others: what is read anyway, in the same unit.
    """
    ordered, order = weights.sort(descending=True)
    rest = ordered.flip(0).cumsum(0).flip(0)  # with this token and all after it
    kept = torch.zeros(len(weights), dtype=torch.bool)
    kept[order] = rest > left * (float(weights.sum()) + others)
    return kept
