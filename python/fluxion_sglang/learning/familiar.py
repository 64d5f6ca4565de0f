"""Whether a request is like those that a predictor was trained on.

A predictor is right on requests of the kinds that it has seen, and may be wrong on every one of another kind. What a
request is like is told by its anchor features (`predictor/features.py`): those of its last prefilled token, of all
heads, which its first decode step measures anyway. A request is familiar if it is no further from the third nearest
of the training requests than nearly all of these are from their own third nearest: a novelty test by neighbours, in
the manner of conformal prediction (Bates et al., 2023). So few that come like the others are called unfamiliar. How
many strange ones are taken for familiar, nothing bounds.

Distances add up layer by layer, each with a limit of its own: so a step is judged before it is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import torch

NEIGHBOURS: Final = 3
"""With so many requests of a kind the predictor knows something of it; with one it may have learnt nothing."""

MISTAKEN: Final = 0.05
"""The share of requests that may be called unfamiliar although they come like the others. So many of those served may
also be alone of their kind before everything looks familiar."""

FURTHEST: Final = 8.0
"""Standard deviations at which a feature is as far off as can be: one alone does not decide."""

SAME: Final = 1e-3
"""Differences of a feature below this share of its size are rounding."""


@dataclass(frozen=True)
class Familiar:
    """n training requests, of L layers, each layer with F numbers.

    Attributes:
        mean, std: [L, F] float32. known: [n, L, F] float32, standardised.
        limits: [L] float32: how far a request may be, in the squares of the layers up to this one.
    """

    mean: torch.Tensor
    std: torch.Tensor
    known: torch.Tensor
    limits: torch.Tensor

    @classmethod
    def of(cls, anchors: torch.Tensor, stand_for: torch.Tensor) -> Self:
        """Of at least two requests.

        Args:
            anchors: [n, L, F] float32. stand_for: [n] float32, of how many that were served each is one.
        """
        mean, std = anchors.mean(0), anchors.std(0, correction=0)
        std = torch.maximum(std, SAME * mean.abs() + 1e-6)
        known = _standardised(anchors, mean, std)
        apart = torch.stack([((known - one) ** 2).sum(-1).cumsum(-1) for one in known])
        apart.diagonal().fill_(torch.inf)  # [L, n] of [n, n, L]: nobody is a neighbour of its own
        nearest = apart.kthvalue(min(NEIGHBOURS, len(anchors) - 1), dim=1).values
        # Those that are not familiar are all kept, the others seldom: each counts for as many as it stands for.
        ranked, order = nearest.sort(dim=0)
        counts = stand_for.double()[order].cumsum(0)
        rank = (1 - MISTAKEN) * (float(stand_for.double().sum()) + 1) - 1e-9
        # Of few requests the largest distance is no such quantile, and the best that there is.
        at = (counts < rank).sum(0).clamp(max=len(anchors) - 1)
        return cls(mean, std, known, ranked.gather(0, at.unsqueeze(0))[0])

    def start(self) -> torch.Tensor:
        """The distances of a request of which nothing is known yet."""
        return torch.zeros(len(self.known))

    def add(self, layer: int, anchor: torch.Tensor, distances: torch.Tensor) -> bool:
        """Whether a request is familiar, by its layers up to this one.

        Args:
            layer: in rising order. anchor: [F] of it. distances: [n] of the layers before; this one's are added.
        """
        distances += ((self.known[:, layer] - _standardised(anchor, self.mean[layer], self.std[layer])) ** 2).sum(-1)
        nearest = distances.kthvalue(min(NEIGHBOURS, len(distances))).values
        return bool(nearest <= self.limits[layer])  # not where it is no number


def _standardised(values: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return ((values - mean) / std).clamp(-FURTHEST, FURTHEST)
