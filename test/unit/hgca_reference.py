"""HGCA, Algorithm 1, in float64 and from the definitions: one head of one layer, a token at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fluxion_sglang.kv.placement import Placement


@dataclass
class Head:
    """State of one head.

    Attributes:
        average: moving averages of the residents' weights, by position.
        salient: positions of the contextual set.
        near: minimum distance of any decision from its threshold, relative to it.
    """

    placement: Placement
    alpha: float
    beta: float
    scale: float
    average: dict[int, float] = field(default_factory=dict)
    salient: set[int] = field(default_factory=set)
    near: float = math.inf
    length: int = 0

    def residents(self, n: int) -> list[int]:
        return [*range(min(self.placement.sinks, n)), *range(self.placement.window_start(n), n)]

    def middle(self, n: int) -> range:
        return range(self.placement.sinks, self.placement.window_start(n))

    def weights(self, q: Tensor, keys: Tensor, at: list[int]) -> dict[int, float]:
        """Softmax over the tokens `at` (line 8, and line 4 of Algorithm 2)."""
        if not at:
            return {}
        scores = keys[torch.tensor(at)].double() @ q.double() * self.scale
        return dict(zip(at, scores.softmax(0).tolist(), strict=True))

    def keep(self, weights: dict[int, float], size: int) -> set[int]:
        """Lines 20 and 23."""
        threshold = self.beta / size
        if self.beta == 0:
            return set(weights)
        for weight in weights.values():
            self.near = min(self.near, abs(weight - threshold) / threshold)
        return {t for t, weight in weights.items() if weight > threshold}

    def prefill(self, keys: Tensor, queries: Tensor) -> None:
        """keys [n, D] of the request, queries [m, D] of its last tokens."""
        n, m = len(keys), len(queries)
        seen: dict[int, list[float]] = {t: [] for t in self.residents(n)}
        middle: dict[int, list[float]] = {t: [] for t in self.middle(n)}
        for i, q in enumerate(queries):
            position = n - m + i
            for t, weight in self.weights(q, keys, [t for t in seen if t <= position]).items():
                seen[t].append(weight)
            for t, weight in self.weights(q, keys, list(middle)).items():
                middle[t].append(weight)
        self.average = {t: sum(weights) / len(weights) for t, weights in seen.items()}
        self.salient = self.keep({t: sum(w) / m for t, w in middle.items()}, max(1, len(middle)))
        self.length = n

    def decode(self, keys: Tensor, q: Tensor) -> None:
        """keys [n, D], including the step's own."""
        n = len(keys)
        now = self.residents(n)
        leaving = {t: weight for t, weight in self.average.items() if t not in set(now)}
        self.salient |= self.keep(leaving, len(self.average))
        old = {t: weight for t, weight in self.average.items() if t not in leaving}
        self.average = {
            t: (1 - self.alpha) * old[t] + self.alpha * weight if t in old else weight
            for t, weight in self.weights(q, keys, now).items()
        }
        self.length = n
