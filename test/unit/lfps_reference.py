"""LFPS straight from its equations, in float64: one query head, dense tables, everything recomputed in every step."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fluxion_sglang.kv.placement import PAGE, Placement

Array = NDArray[np.float64]

FIRST, LOCAL = 4, 5


def lse(scores: Array) -> float:
    if not len(scores):
        return -math.inf
    most = scores.max()
    return float(most if np.isinf(most) else most + np.log(np.exp(scores - most).sum()))


def threshold(entries: Array, alpha: float) -> tuple[float, float]:
    """Mean, and Eq. 8: mean + (alpha + 3 / kurtosis) sqrt(m4 / m2); for a flat table, its mean."""
    if not len(entries):
        return 0.0, 0.0
    mean = entries.mean()
    m2, m4 = ((entries - mean) ** 2).mean(), ((entries - mean) ** 4).mean()
    if m2 <= 1e-9 * mean**2:
        return mean, mean
    return mean, mean + (alpha + 3 * m2**2 / m4) * math.sqrt(m4 / m2)


class ReferenceHead:
    """Tables of one head: `vertical` by position, `slash` by offset, up to the request's maximum length."""

    def __init__(
        self, placement: Placement, room: int, alpha: tuple[float, float] = (0.2, 0.2), expand: bool = True
    ) -> None:
        self.placement, self.alpha, self.expand, self.decay = placement, alpha, expand, 0.95
        self.vertical, self.slash = np.zeros(room), np.zeros(room)
        self.spread = 0.0

    def begin(self, keys: Array, queries: Array, scale: float) -> None:
        """Eq. 4. keys: [n, D]. queries: [m, D] of the last m tokens."""
        n, m, first = len(keys), len(queries), self.placement.sinks
        self.vertical[:], self.slash[:] = 0, 0
        for row, query in enumerate(queries):
            t = n - m + row
            scores = scale * keys[first : t + 1] @ query
            weights = np.exp(scores - lse(scores)) / (2 * m * (1 - self.decay))
            for p, weight in enumerate(weights, start=first):
                self.vertical[p] += weight
                self.slash[t - p] += weight
            if len(scores) and query.any():
                self.spread = scores.var() / (query @ query)

    def passed(
        self, keys: Array, values: Array, query: Array, scale: float, limit: float
    ) -> tuple[float, float, Array]:
        """Eq. 5 and 6 for a request of n tokens [n, D]: the share of the first tokens minus the limit; if it is above
        0, the middle gets this LSE and output."""
        n = len(keys)
        middle = slice(self.placement.sinks, self.placement.window_start(n))
        scores = scale * keys @ query
        sink, local = lse(scores[:FIRST]), lse(scores[n - LOCAL :])
        count = middle.stop - middle.start
        mu = scale * keys[middle].mean(0) @ query
        estimate = math.log(count) + mu + self.spread * (query @ query) / 2
        share = 1 / (1 + math.exp(max(estimate, local) - sink))
        return share - limit, estimate, values[middle].mean(0)

    def candidates(self, n: int, slack: float = 0.0) -> set[int]:
        """Eq. 7 to 9 for a request of n tokens. slack: relative increase of the limits."""
        first, start = self.placement.sinks, self.placement.window_start(n)
        mean_v, limit_v = threshold(self.vertical[first:start], self.alpha[0])
        mean_s, limit_s = threshold(
            self.slash[self.placement.window : max(self.placement.window, n - first)], self.alpha[1]
        )

        def above(p: int, of_vertical: float, of_slash: float) -> bool:
            grow = 1 + slack
            return bool(self.vertical[p] > grow * of_vertical or self.slash[n - 1 - p] > grow * of_slash)

        middle = range(first, start)
        chosen = {p for p in middle if above(p, limit_v, limit_s)} | set(middle[-PAGE:])
        if not self.expand:
            return chosen
        near = {p + step for p in chosen for step in (-1, 0, 1, 2)} & set(middle)
        return chosen | {p for p in near if above(p, mean_v, mean_s)}

    def update(self, n: int, chosen: dict[int, float], local_lse: float) -> None:
        """Eq. 10. chosen: scaled scores by position. local_lse: LSE of the window."""
        total = lse(np.array([local_lse, *chosen.values()]))
        self.vertical *= self.decay
        self.slash *= self.decay
        for p, score in chosen.items():
            weight = math.exp(score - total) / 2
            self.vertical[p] += weight
            self.slash[n - 1 - p] += weight
