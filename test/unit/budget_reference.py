"""Least budgets straight from their definition, in torch float64: the reference for `predictor.measure`.

It shares no code with the native library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from definitions.torch_executor import block_pages, block_scores

from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.predictor.criterion import Deviation
from fluxion_sglang.predictor.measure import BLOCK_SIZES


def block_positions(middle: int, blk: int, sinks: int) -> list[range]:
    """Positions of every block of a middle of `middle` tokens, in order; blk 1: of every token."""
    start = sinks
    if blk == 1:
        return [range(p, p + 1) for p in range(start, start + middle)]
    if middle == 0:
        return []
    return [range(p.start * PAGE, p.stop * PAGE) for p in block_pages(middle, blk, sinks // PAGE)]


def order_of(q: torch.Tensor, k: torch.Tensor, groups: Sequence[range], spread: float = 1.0) -> list[int]:
    """Indices of the blocks, best first; the lower of equal ones first. q [D], k [n, D], both as stored.

    Args:
        spread: see `block_scores`.
    """
    if not groups:
        return []
    if len(groups[0]) == 1 and len(groups[-1]) == 1:
        scores = k[groups[0].start : groups[-1].stop].double() @ q.double()
    else:
        lo = torch.stack([k[list(group)].amin(0) for group in groups])
        hi = torch.stack([k[list(group)].amax(0) for group in groups])
        scores = block_scores(q[None].double(), lo, hi, spread)[0]
    order: list[int] = torch.sort(scores, descending=True, stable=True).indices.tolist()
    return order


def budget_of_count(count: int, middle: int, blk: int, blocks: int) -> float:
    """The budget with which serving reads exactly `count` of `blocks` blocks: min(1, count * blk / middle).

    1 is reserved for all blocks. If cut blocks let fewer blocks reach it, the largest float32 below 1 is returned.
    """
    if count == 0:
        return 0.0
    return 1.0 if count == blocks else min(count * blk / middle, 1 - 2.0**-24)


@dataclass(frozen=True)
class Prefixes:
    """Results of every prefix of one head's ranked blocks; entry c belongs to the c best, from 0 to blocks.

    Attributes:
        distance: [blocks + 1] float64, |o' - o|.
        mass: [blocks + 1] float64, share of the attention mass that is read.
    """

    distance: torch.Tensor
    mass: torch.Tensor

    def values(self, kind: int, norm: float, largest: float) -> torch.Tensor:
        """Values that criterion `kind` compares with its threshold: [blocks + 1]. norm: |o|; largest: maximum over
        heads."""
        if kind == Deviation.COVERAGE:
            return self.mass
        by = largest if kind == Deviation.LAYER else norm
        return self.distance / by if by > 0 else torch.where(self.distance > 0, math.inf, 0.0)

    def first(self, kind: int, threshold: float, norm: float, largest: float) -> int:
        """The smallest number of blocks that meets the criterion; all blocks always do."""
        values = self.values(kind, norm, largest)
        met = values >= threshold if kind == Deviation.COVERAGE else values <= threshold
        met[-1] = True
        return int(met.int().argmax())


def prefixes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, placement: Placement, blk: int, spread: float = 1.0
) -> Prefixes:
    """Prefixes of one head over the blocks of its middle, each computed from scratch.

    Args:
        q: [D]. k, v: [n, D], the request's tokens up to the query's own.
    """
    n = len(k)
    middle = placement.middle(n)
    scores = (k.double() @ q.double()) * scale
    weights = (scores - scores.logsumexp(0)).exp()
    exact = weights @ v.double()
    groups = block_positions(middle, blk, placement.sinks)
    read = torch.ones(n, dtype=torch.bool)
    read[placement.sinks : placement.sinks + middle] = False
    distance, mass = [], []
    for index in [None, *order_of(q, k, groups, spread)]:
        if index is not None:
            read[list(groups[index])] = True
        total = weights[read].sum()
        output = (weights[read] / total) @ v.double()[read]
        distance.append((output - exact).norm())
        mass.append(total)
    return Prefixes(torch.stack(distance), torch.stack(mass))


def least_budgets(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, placement: Placement,
    criteria: Sequence[tuple[int, float]],
) -> torch.Tensor:  # fmt: skip
    """`Measurement.budgets` of one query.

    Args:
        q: [Hq, D]. k, v: [n, H, D], the request's tokens up to the query's own.

    Returns:
        [Hq, C, 5] float32.
    """
    group = len(q) // k.shape[1]
    middle = placement.middle(len(k))
    keys, values = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    shares = (torch.einsum("hd,nhd->hn", q.double(), keys) * scale).softmax(-1)
    norms = torch.einsum("hn,nhd->hd", shares, values).norm(dim=-1).tolist()
    out = torch.zeros(len(q), len(criteria), len(BLOCK_SIZES))
    for head in range(len(q)):
        for size, blk in enumerate(BLOCK_SIZES):
            walk = prefixes(q[head], k[:, head // group], v[:, head // group], scale, placement, blk)
            blocks = len(walk.mass) - 1
            for c, (kind, threshold) in enumerate(criteria):
                count = walk.first(kind, threshold, norms[head], max(norms))
                out[head, c, size] = budget_of_count(count, middle, blk, blocks)
    return out
