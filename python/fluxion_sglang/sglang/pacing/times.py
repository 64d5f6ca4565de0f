"""Predicts the time of a prefill pass from measured passes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Final

import numpy as np

_KEPT: Final = 0.95
"""Decay of a pass's weight per later pass, because the machine's other load changes."""
_RIDGE: Final = 1e-3
"""Weight of the prior, because identical passes do not determine the coefficients."""
_FOLLOW, _JUMP = 0.3, 3.0
"""Learning rate of the drift factor in the logarithm, and the largest ratio by which a single pass counts as slower."""
GROWTH: Final = 4
"""Largest pass, as a multiple of the largest measured pass. Predictions must not extrapolate further, because the first
passes are slow for other reasons."""
FIRST: Final = 16
"""Tokens of a pass before any was measured."""


class PassTimes:
    """Predicts the seconds of a pass: a + b * tokens + c * attended. attended is the sum, over the tokens, of the
    number of
    tokens before each. a: reading weights. b: matrix products. c: attention.

    The coefficients are a weighted least-squares fit, non-negative, of errors relative to the measured time, so
    unusually slow passes have little weight. A separate drift factor follows the machine's other load.
    """

    def __init__(self) -> None:
        self._gram = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._unit = np.ones(3)
        """Scales of the features, so that the sums have similar magnitude."""
        self._coefficients = np.zeros(3)
        self._passes = 0
        self._largest = 0
        self._drift = 1.0

    def observe(self, tokens: int, attended: float, seconds: float) -> None:
        """Record a measured pass. tokens, attended (as for the class) and seconds must be above 0."""
        features = np.array([1.0, tokens, attended])
        self._passes += 1
        if self._passes <= 2:  # caches and compilation slow the first pass; the second replaces it
            self._unit = np.array([1.0, tokens, max(attended, 1.0)]) / seconds
            prior = np.array([0.0, 1.0, 0.0])
            self._gram, self._moment = _RIDGE * np.eye(3), _RIDGE * prior
        else:
            ratio = seconds / max(self.predict(tokens, attended), 1e-9)
            self._drift *= min(max(ratio, 1 / _JUMP), _JUMP) ** _FOLLOW
        self._largest = max(self._largest, tokens)
        # In units of the prior the coefficients are near 1; a row is the features divided by the time.
        row = self._drift * features / (self._unit * seconds)
        self._gram = _KEPT * self._gram + np.outer(row, row)
        self._moment = _KEPT * self._moment + row
        self._gram += (1 - _KEPT) * _RIDGE * np.eye(3)
        self._moment += (1 - _KEPT) * _RIDGE * np.array([0.0, 1.0, 0.0])
        self._coefficients = _non_negative(self._gram, self._moment) / self._unit

    def predict(self, tokens: int, attended: float) -> float:
        """Predicted seconds; 0 before any pass was measured."""
        return self._drift * float(self._coefficients @ (1.0, tokens, attended))

    def halves_within(self, seconds: float, attended: Callable[[int], float], page: int, most: int) -> int:
        """Like `tokens_within`, but the result is `most`, its half, its quarter and so on, so that noise in the
        measurements seldom changes it. Growth is not limited, and before any pass was measured the result is `most`."""
        tokens = most
        while tokens > page and self.predict(tokens, attended(tokens)) > seconds:
            tokens = max(tokens // 2 // page, 1) * page
        return tokens

    def tokens_within(self, seconds: float, attended: Callable[[int], float], page: int, most: int) -> int:
        """Tokens of the largest pass whose predicted time is at most `seconds`.

        Args:
            attended: maps a pass's tokens to its attended sum; increasing. page: the result is a multiple of it.
            most: the largest result.

        Returns:
            At least one page, even if it takes longer.
        """
        most = min(most, max(FIRST, GROWTH * self._largest))
        low, high = 1, max(most // page, 1)
        while low < high:
            middle = (low + high + 1) // 2
            if self.predict(middle * page, attended(middle * page)) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low * page


def _non_negative(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """The non-negative x [3] that minimizes x'Gx/2 - x'm. G is positive definite."""
    best, least = np.zeros(3), 0.0
    for size in (1, 2, 3):
        for chosen in map(list, combinations(range(3), size)):
            part = np.linalg.solve(gram[np.ix_(chosen, chosen)], moment[chosen])
            value = -0.5 * float(part @ moment[chosen])
            if value < least and (part >= 0).all():
                best, least = np.zeros(3), value
                best[chosen] = part
    return best
