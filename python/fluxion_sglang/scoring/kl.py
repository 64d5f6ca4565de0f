"""How far a policy moves the next-token distribution: Kullback-Leibler divergence against full attention.

Both answers are greedy and begin alike. While their tokens agree, their contexts are the same, and so are the questions
put to the two distributions: they are compared at every step up to and including the first whose token differs. The
token of step 0 comes from the prefill, which is exact under every policy, so it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

WHOLE: Final = 1024
"""Vocabularies up to this size are compared whole."""
TOP: Final = 256
"""Of larger ones, this many of each distribution's most probable tokens."""

_LEAST: Final = 1e-7  # what float32 logprobs say of the mass of a rest is no finer than this


@dataclass(frozen=True)
class Distribution:
    """The most probable next tokens, or all of them.

    Attributes:
        ids: [n] token ids, each once.
        logprobs: [n] their natural log probabilities.
    """

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]

    @property
    def likeliest(self) -> int:
        """The id of the most probable token."""
        return int(self.ids[np.argmax(self.logprobs)])


def tokens_compared(vocabulary: int) -> int:
    """How many tokens a distribution has to list for `divergence`."""
    return vocabulary if vocabulary <= WHOLE else TOP


def divergence(full: Distribution, other: Distribution) -> float:
    """KL(full || other) in nats, over the tokens that both list and one bucket for all others.

    Where both list the whole vocabulary this is the divergence itself. Where they do not, it is a lower bound of it:
    merging outcomes never increases a divergence (data-processing inequality).
    """
    _, at, to = np.intersect1d(full.ids, other.ids, assume_unique=True, return_indices=True)
    p, q = np.exp(full.logprobs[at]), np.exp(other.logprobs[to])
    taken = p > 0
    terms = p[taken] * (full.logprobs[at][taken] - np.maximum(other.logprobs[to][taken], -1e4))
    rest = max(1.0 - float(p.sum()), 0.0)
    total = float(terms.sum())
    if rest > _LEAST:
        total += rest * float(np.log(rest) - np.log(max(1.0 - float(q.sum()), _LEAST)))
    return max(total, 0.0)


def divergences(
    full_tokens: Sequence[int],
    full: Sequence[Distribution],
    other_tokens: Sequence[int],
    other: Sequence[Distribution],
) -> list[float]:
    """The divergence at every step that can be compared (see the module), step 0 left out.

    Args:
        full, other: one distribution a token.
    """
    steps = min(len(full_tokens), len(other_tokens))
    same = next((i for i in range(steps) if full_tokens[i] != other_tokens[i]), steps - 1)
    return [divergence(full[i], other[i]) for i in range(1, same + 1)]
