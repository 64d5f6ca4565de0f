"""Whether a request is like those that a predictor was trained on.

A predictor is right on requests of the kinds that it has seen, and may be wrong on every one of another kind. What a
request is like is told by its anchor features (`predictor/features.py`): those of its last prefilled token, of all
heads, which its first decode step measures anyway. How far a request is from the eighth nearest of the training
requests is compared with how far its neighbours are from their seventh (of eight of a kind, each has seven others), as
the local outlier factor does (Breunig et al., 2000): some kinds of requests are more alike than others. A request is
familiar if that ratio is no larger than it is for nearly all training requests, as in conformal prediction (Bates et
al., 2023). So few that come like the others are called unfamiliar. How many strange ones are taken for familiar,
nothing bounds.

Distances add up layer by layer, each with a limit of its own: so a step is judged before it is over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch

from fluxion_sglang.learning.measured import Measured

NEIGHBOURS: Final = 8
"""With so many requests of a kind the predictor knows something of it; with two or three it has learnt little."""

MISTAKEN: Final = 0.02
"""The share of requests that may be called unfamiliar although they come like the others."""

ALONE: Final = 0.02
"""The share of requests that may be alone of their kind before everything looks familiar."""

STRETCH: Final = (0.1, 1.4)
"""A limit is at most so many times the value that all but this share do not exceed: where few requests are known, one
that is alone of its kind would make it any number."""

LEAST: Final = 1e-12
"""Of a distance that something is divided by."""

FURTHEST: Final = 8.0
"""Standard deviations at which a feature is as far off as can be: one alone does not decide."""

SAME: Final = 1e-3
"""Differences of a feature below this share of its size are rounding."""


@dataclass(frozen=True)
class Familiar:
    """n training requests, of L layers, each layer with F numbers.

    Attributes:
        mean, std: [L, F] float32. known: [n, L, F] float32, standardised.
        near: [L, n] float32: how far each is from its own seventh nearest, in the squares of the layers up to this one,
            but no further than nearly all are: one that is alone tells nothing of its neighbourhood.
        limits: [L] float32: how many times as far as the least of its neighbours a request may be.
    """

    mean: torch.Tensor
    std: torch.Tensor
    known: torch.Tensor
    near: torch.Tensor
    limits: torch.Tensor

    @classmethod
    def of(cls, anchors: torch.Tensor) -> Self:
        """Of at least two requests.

        Args:
            anchors: [n, L, F] float32.
        """
        mean, std = _spread(anchors)
        known = _standardised(anchors, mean, std)
        apart = torch.stack([((known - one) ** 2).sum(-1).cumsum(-1) for one in known]).permute(2, 0, 1)
        apart.diagonal(dim1=1, dim2=2).fill_(torch.inf)  # nobody is a neighbour of its own
        # Not the eighth: of a kind of which just eight are known it would be one of another kind, so that requests of
        # any kind between the two would pass.
        nearest, neighbours = apart.topk(min(NEIGHBOURS - 1, len(anchors) - 1), dim=2, largest=False)  # [L, n, 7]
        own = nearest[..., -1]
        near = torch.minimum(own, _all_but(ALONE, own).unsqueeze(1))
        around = near.gather(1, neighbours.flatten(1)).view(neighbours.shape).amin(2)
        ratios = own / around.clamp(min=LEAST)
        share, times = STRETCH
        limits = torch.minimum(_all_but(MISTAKEN, ratios), times * _all_but(share, ratios))
        return cls(mean, std, known, near, limits)

    def start(self) -> torch.Tensor:
        """The distances of a request of which nothing is known yet."""
        return torch.zeros(len(self.known))

    def add(self, layer: int, anchor: torch.Tensor, distances: torch.Tensor) -> bool:
        """Whether a request is familiar, by its layers up to this one.

        Args:
            layer: in rising order. anchor: [F] of it. distances: [n] of the layers before; this one's are added.
        """
        distances += ((self.known[:, layer] - _standardised(anchor, self.mean[layer], self.std[layer])) ** 2).sum(-1)
        nearest, neighbours = distances.topk(min(NEIGHBOURS, len(distances)), largest=False)
        around = self.near[layer, neighbours].amin()
        return bool(nearest[-1] <= self.limits[layer] * around.clamp(min=LEAST))  # not where it is no number


def _spread(anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of [n, ...], the latter above rounding."""
    mean, std = anchors.mean(0), anchors.std(0, correction=0)
    return mean, torch.maximum(std, SAME * mean.abs() + 1e-6)


def _all_but(share: float, values: torch.Tensor) -> torch.Tensor:
    """[L]: the least of [L, n] that all but this share do not exceed. Of few the largest is no such quantile, and the
    best that there is."""
    n = values.shape[1]
    rank = math.ceil((1 - share) * (n + 1) - 1e-9)
    return values.sort(dim=1).values[:, min(rank, n) - 1]


def _standardised(values: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return ((values - mean) / std).clamp(-FURTHEST, FURTHEST)


def thinned(requests: Sequence[Measured], most: int) -> list[Measured]:
    """So many of them at most, in their order: of the two nearest the older one goes, again and again."""
    kept = list(requests)
    if len(kept) <= most:
        return kept
    anchors = torch.stack([request.anchor for request in kept])
    mean, std = _spread(anchors)
    known = _standardised(anchors, mean, std).flatten(1)
    apart = torch.cdist(known, known).fill_diagonal_(torch.inf)
    gone = set()
    for _ in range(len(kept) - most):
        older = min(divmod(int(apart.argmin()), len(kept)))
        apart[older] = apart[:, older] = torch.inf
        gone.add(older)
    return [request for i, request in enumerate(kept) if i not in gone]
