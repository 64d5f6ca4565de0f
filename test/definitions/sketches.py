"""Sketches of keys straight from their definition (`write_sketch` in csrc/kernels/table.h): the kernels' reference."""

from __future__ import annotations

import math

import torch

from fluxion_sglang.kv.placement import PAGE

_CODES = 7.5
"""A code c from 0 to 15 stands for c - _CODES."""


def rotation(dim: int) -> torch.Tensor:
    """[D, D] float64: a key k is rotated to k @ rotation(D). q.k after rotation is q.k times `mixed_together(D)`."""
    size = mixed_together(dim)
    whole = torch.ones(1, 1, dtype=torch.float64)
    while len(whole) < size:
        whole = torch.cat([torch.cat([whole, whole], 1), torch.cat([whole, -whole], 1)])
    signs = [-1.0 if (d * 0x9E3779B1 & 0xFFFFFFFF) >> 31 else 1.0 for d in range(dim)]
    mixed: torch.Tensor = torch.block_diag(*[whole] * (dim // size))
    return torch.tensor(signs, dtype=torch.float64)[:, None] * mixed


def mixed_together(dim: int) -> int:
    """Number of elements that a rotation mixes: the largest power of two that divides D."""
    return dim & -dim


def unpacked(sketch: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [16, D] and scales [16] of a sketch [bytes] uint8, float64."""
    plane = PAGE * dim // 4
    upper, scales, lower = sketch[: 2 * plane + 2 * PAGE].split([plane, 2 * PAGE, plane])
    codes = 4 * _two_bits(upper, dim) + _two_bits(lower, dim)
    return codes.double(), scales.view(torch.bfloat16).double()


def _two_bits(plane: torch.Tensor, dim: int) -> torch.Tensor:
    """[16, D] of [bytes] uint8: four elements a byte."""
    packed = plane.view(dim // 16, PAGE, 4)
    fields = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], 2)  # [D / 16, 16, 4, 4]
    return fields.permute(1, 0, 2, 3).reshape(PAGE, dim)


def keys_of(sketch: torch.Tensor, dim: int) -> torch.Tensor:
    """The keys [16, D] that a sketch stands for, float64."""
    codes, scales = unpacked(sketch, dim)
    return (codes - _CODES) * scales[:, None] @ rotation(dim).T / mixed_together(dim)


def skimmed(sketch: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate from the upper bits of a sketch for queries [G, D], float64: the largest q.k of the page [G], and how
    far the lower bits may raise it [G], 1.5 standard deviations."""
    dim = q.shape[1]
    codes, scales = unpacked(sketch, dim)
    rotated = q.double() @ rotation(dim)
    about = rotated @ ((4 * (codes // 4) - 6) * scales[:, None]).T / mixed_together(dim)
    off = 1.5 * math.sqrt(1.25) * rotated.norm(dim=1) * scales.max() / mixed_together(dim)
    return about.amax(1), off


def exact_share(left: float) -> float:
    """Share of the attention below the tokens whose keys are read, if `left` may stay unread."""
    return max(left, min(4 * left, 0.5))


def least_kept(weights: torch.Tensor, others: float, left: float) -> torch.Tensor:
    """[n] bool: the fewest tokens, the heaviest first, that leave at most the share `left` of the total unread.

    Args:
        weights: [n], of the tokens. others: weight that is read in any case, in the same unit.
    """
    ordered, order = weights.sort(descending=True)
    rest = ordered.flip(0).cumsum(0).flip(0)  # with this token and all after it
    kept = torch.zeros(len(weights), dtype=torch.bool)
    kept[order] = rest > left * (float(weights.sum()) + others)
    return kept
