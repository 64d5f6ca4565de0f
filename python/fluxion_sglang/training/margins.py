"""Margins of budgets, so that at most a given share of a head's budgets is too small (split conformal prediction).

A learned quantile holds on the training sequences and over all heads, but not on other sequences or for a single head.
So for every head and block size, predicted budgets are multiplied by a factor from n samples of sequences outside the
training set. With ratios r = least budget / predicted budget,

    margin = the ceil((n + 1) coverage)-th smallest r

A further ratio, exchangeable with these, exceeds the margin with a probability of at most 1 - coverage, for any network
(Vovk, Gammerman and Shafer 2005; with quantiles, Romano, Patterson and Candes 2019). A network that predicts too much
has margins below 1. The score is a ratio, not a difference (Papadopoulos et al. 2002 call it normalised), because
errors grow with the budget: an offset that suffices for large budgets is too much for small ones.

Steps of one sequence are similar, so the effective n lies between the numbers of sequences and of steps. Some kinds of
sequences are harder than others: a margin that covers 98% of all steps may fail for a whole kind.
"""

from __future__ import annotations

import math

import torch

from fluxion_sglang.kv.placement import BLOCKS

FEW = 100
"""Heads with fewer samples share a margin, because a quantile of few samples is unreliable."""


def fit_margins(
    predicted: torch.Tensor,
    labels: torch.Tensor,
    layer: torch.Tensor,
    head: torch.Tensor,
    shape: tuple[int, int],
    coverage: float,
) -> torch.Tensor:
    """The margins of every head, from S samples of retrieval heads.

    Heads with few samples are pooled, so the coverage holds for them together. If even the pool has few samples, the
    pool is all heads.

    Args:
        predicted: [S, 4] float32, above 0: budgets at blocks of 16, 32, 64, 128 tokens, at least one block.
        labels: [S, 4] float32, least budgets.
        layer, head: [S] int64, indices in the model. shape: the model's layers and query heads.
        coverage: in (0, 1), the share of budgets that must suffice. With fewer than coverage / (1 - coverage) samples
            in all, the margin is the largest ratio, and the coverage is lower.

    Returns:
        [layers, heads, 4] float32, above 0; all 1 without samples.
    """
    layers, heads = shape
    margins = torch.ones(layers * heads, len(BLOCKS))
    if len(labels) == 0:
        return margins.view(layers, heads, -1)
    ratios, at = labels / predicted, layer * heads + head
    enough = max(FEW, math.ceil(coverage / (1 - coverage) - 1e-9))
    rare = torch.bincount(at, minlength=layers * heads) < enough
    of_rare = rare[at]
    margins[rare] = _margin(ratios[of_rare] if int(of_rare.sum()) >= enough else ratios, coverage)
    for one in (~rare).nonzero().flatten().tolist():
        margins[one] = _margin(ratios[at == one], coverage)
    return margins.view(layers, heads, -1)


def _margin(ratios: torch.Tensor, coverage: float) -> torch.Tensor:
    """ratios: [n, 4], n at least 1. Returns [4]."""
    n = len(ratios)
    rank = math.ceil((n + 1) * coverage - 1e-9)  # the offset undoes rounding of a product that is an integer
    return ratios.sort(0).values[min(rank, n) - 1]
