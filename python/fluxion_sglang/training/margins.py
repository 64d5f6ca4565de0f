"""Margins of budgets: of a head's budgets, at most a stated share is too small (split conformal prediction).

A quantile that a network learnt is one on the training sequences and over all heads: off them, and for a head alone, it
promises nothing. So every head gets, for every block size, a factor that its predicted budgets are multiplied with,
from sequences that it was not trained on: with n of them and ratios r = least budget / predicted budget,

    margin = the ceil((n + 1) coverage)-th smallest r

Of one ratio more, exchangeable with these, the probability to be above the margin is at most 1 - coverage, whatever
the network is worth (Vovk, Gammerman and Shafer 2005; with quantiles, Romano, Patterson and Candes 2019). A network
that asks for too much has margins below 1. The score is a ratio and no difference (Papadopoulos et al. 2002 call it
normalised), because errors grow with the budget: an offset that is enough for large budgets would drown small ones.

Steps of one sequence resemble each other, so what n is worth lies between their number and that of sequences. And some
kinds of sequences are harder than others: a margin that covers 98% of all steps may leave out a whole kind.
"""

from __future__ import annotations

import math

import torch

from fluxion_sglang.kv.placement import BLOCKS

FEW = 100
"""Heads with fewer samples than these share a margin: the largest of a handful is no quantile."""


def fit_margins(
    predicted: torch.Tensor,
    labels: torch.Tensor,
    layer: torch.Tensor,
    head: torch.Tensor,
    shape: tuple[int, int],
    coverage: float,
) -> torch.Tensor:
    """The margins of every head, from S samples of retrieval heads.

    Heads with few samples count as one, so that the promise holds for them together; where even these have few, that
    one is all heads.

    Args:
        predicted: [S, 4] float32, above 0: budgets at blocks of 16, 32, 64, 128 tokens, at least one block.
        labels: [S, 4] float32, least budgets.
        layer, head: [S] int64, of the model. shape: the model's layers and query heads.
        coverage: in (0, 1), the share of budgets that shall suffice. Where there are fewer than
            coverage / (1 - coverage) samples in all, the largest ratio is the margin, and less is promised.

    Returns:
        [layers, heads, 4] float32, above 0; all 1 where there is no sample.
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
    rank = math.ceil((n + 1) * coverage - 1e-9)  # a product that is whole but for its rounding is whole
    return ratios.sort(0).values[min(rank, n) - 1]
