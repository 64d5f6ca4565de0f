"""The kernels in torch float64: short enough to verify by reading.

Tiles are [P, 2, 16, D] (K, then V), entries [N, 2, D] (min, then max), masks uint16 [n, G] (bit t = token t).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def token_bits(masks: Tensor) -> Tensor:
    """Masks [n, G] as bool [G, n, 16]."""
    return ((masks.to(torch.int32)[:, :, None] >> torch.arange(16)) & 1).bool().permute(1, 0, 2)


def capped(logits: Tensor, cap: float) -> Tensor:
    """Logits after a soft cap; 0: there is none."""
    return cap * torch.tanh(logits / cap) if cap else logits


def attend(
    q: Tensor, scale: float, tiles: Tensor, pages: Tensor, masks: Tensor | None = None, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention of q [G, D] over the pages: o [G, D] and natural LSE [G]; without tokens 0 and -inf."""
    chosen = tiles[pages.long()].double()
    keys, values = chosen[:, 0], chosen[:, 1]
    wanted = token_bits(masks) if masks is not None else torch.ones(len(q), len(pages), 16, dtype=torch.bool)
    scores = capped(torch.einsum("gd,ntd->gnt", q.double(), keys) * scale, cap)
    scores = torch.where(wanted, scores, -math.inf)
    lse = torch.logsumexp(scores.flatten(1), dim=1)
    weights = torch.where(wanted, torch.exp(scores - lse[:, None, None]), 0.0)
    terms = torch.where(wanted[..., None], weights[..., None] * values, 0.0)
    return terms.sum(dim=(1, 2)), lse


def extend(
    q: Tensor, scale: float, tiles: Tensor, pages: Tensor, keys: int, first: int, window: int = 1 << 30
) -> tuple[Tensor, Tensor]:
    """Attention of q [T, G, D]: query t attends to tokens max(0, first + t - window + 1) .. min(first + t, keys - 1) of
    the listed pages."""
    chosen = tiles[pages.long()].double()
    k, v = (chosen[:, i].flatten(0, 1)[: max(min(keys, first + len(q)), 0)] for i in (0, 1))
    last = first + torch.arange(len(q))[:, None]
    seen = (torch.arange(len(k)) <= last) & (torch.arange(len(k)) > last - window)
    scores = torch.einsum("tgd,kd->tgk", q.double(), k) * scale
    scores = torch.where(seen[:, None], scores, -math.inf)
    lse = torch.logsumexp(scores, dim=2) if len(k) else torch.full(q.shape[:2], -math.inf).double()
    weights = torch.where(seen[:, None], torch.exp(scores - lse[..., None]), 0.0)
    return torch.einsum("tgk,kd->tgd", weights, v), lse


def score(q: Tensor, entries: Tensor, index: Tensor, spread: float = 1.0) -> Tensor:
    """q at the center of each box, plus `spread` times |q| at its half widths, [G, n]."""
    low, high = entries[index.long()].double().unbind(1)
    q = q.double()
    return q @ ((low + high) / 2).T + spread * q.abs() @ ((high - low) / 2).T


def score_tokens(q: Tensor, tiles: Tensor, pages: Tensor) -> Tensor:
    """q.k of every token of the pages, [G, n, 16]."""
    return torch.einsum("gd,ntd->gnt", q.double(), tiles[pages.long(), 0].double())


def select(scores: Tensor, k: int) -> Tensor:
    """bool [n]: the k largest; the lower index first among equals; NaN counts as -inf."""
    keys = [-math.inf if math.isnan(x) else x for x in scores.tolist()]
    order = sorted(range(len(keys)), key=lambda i: (-keys[i], i))
    chosen = torch.zeros(len(keys), dtype=torch.bool)
    chosen[order[:k]] = True
    return chosen


def block_mass(
    scores: Tensor, chosen: Tensor, scale: float, tokens: int, first: int, last: int, cap: float = 0.0
) -> tuple[float, float]:
    """Log of the sum of tokens * exp(scale * score) over the chosen blocks (bool [n]) and over the others.

    The first block has `first` tokens, the last one `last` (a single one `first`), the others `tokens`.
    """
    counts = torch.full((len(scores),), float(tokens), dtype=torch.float64)
    counts[-1] = last
    counts[0] = first
    logits = torch.where(scores.isnan(), -math.inf, capped(scores.double() * scale, cap)).clamp(
        max=torch.finfo(torch.float32).max
    )
    logits = logits + counts.log()
    return float(logits[chosen].logsumexp(0)), float(logits[~chosen].logsumexp(0))


def page_minmax(tile: Tensor) -> Tensor:
    return torch.stack([tile[0].amin(dim=0), tile[0].amax(dim=0)])


def page_moments(tile: Tensor) -> Tensor:
    """sum k, sum v, sum |k|^1..4, sum |v|^1..4: float64 [2 * D + 8]."""
    norms = tile.double().norm(dim=-1)
    powers = torch.stack([norms**p for p in (1, 2, 3, 4)], dim=-1).sum(dim=1)
    return torch.cat([tile.double().sum(dim=1).flatten(), powers.flatten()])


def merge_state(o_a: Tensor, lse_a: float, o_b: Tensor, lse_b: float) -> tuple[Tensor, float]:
    """Merge two partial attentions; a side with LSE -inf is empty."""
    if lse_a == lse_b == -math.inf:
        return torch.zeros_like(o_a, dtype=torch.float64), -math.inf
    top = max(lse_a, lse_b)
    a, b = math.exp(lse_a - top), math.exp(lse_b - top)
    o = (o_a.double() * a if a else 0.0) + (o_b.double() * b if b else 0.0)
    return o / (a + b), top + math.log(a + b)
