"""Kullback-Leibler divergence of a policy's next-token distribution from that of full attention.

Both answers are greedy. While their tokens agree, their contexts are the same. So the distributions are compared at
every step up to and including the first with different tokens. The token of step 0 comes from the prefill, which is
exact under every policy, and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

WHOLE: Final = 1024
"""Largest vocabulary that is compared whole."""
TOP: Final = 256
"""Number of most probable tokens per distribution that are compared for larger vocabularies."""

_LEAST: Final = 1e-7  # resolution of the remaining mass computed from float32 logprobs


@dataclass(frozen=True)
class Distribution:
    """The most probable next tokens, or all of them.

    Attributes:
        ids: [n] distinct token ids.
        logprobs: [n] their natural log probabilities.
    """

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]

    @property
    def likeliest(self) -> int:
        """The id of the most probable token."""
        return int(self.ids[np.argmax(self.logprobs)])


def tokens_compared(vocabulary: int) -> int:
    """Number of tokens that a distribution must list for `divergence`."""
    return vocabulary if vocabulary <= WHOLE else TOP


def divergence(full: Distribution, other: Distribution) -> float:
    """KL(full || other) in nats, over the tokens that both list and one bucket for all others.

    If both list the whole vocabulary, this is the exact divergence. Otherwise it is a lower bound, because merging
    outcomes never increases a divergence (data-processing inequality).
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
    """The divergence at every comparable step (see the module), without step 0.

    Args:
        full, other: one distribution a token.
    """
    steps = min(len(full_tokens), len(other_tokens))
    same = next((i for i in range(steps) if full_tokens[i] != other_tokens[i]), steps - 1)
    return [divergence(full[i], other[i]) for i in range(1, same + 1)]
