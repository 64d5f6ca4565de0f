"""The size of a haystack with which a prompt just stays below a number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_PROBES: Final = 8  # estimates by slope before plain bisection takes over


def fit(prompt: Callable[[int], list[int]], least: int, most: int, enough: int, limit: int) -> tuple[int, list[int]]:
    """A size, and its prompt of at most `limit` tokens: with `enough` tokens or more, else the largest that fits.

    Tokenising is the cost, and a prompt's tokens grow almost linearly: so sizes are guessed from the slope so far, a
    cheap small one first, and two or three prompts of the full size are made in all.

    Args:
        prompt: tokens of the prompt of a size; about rising.
        least, most: smallest and largest size.

    Raises:
        ValueError: the smallest prompt is longer than `limit`.
    """
    low, best = least, prompt(least)
    if len(best) > limit:
        raise ValueError(f"{limit} tokens were left for a prompt that has at least {len(best)}")
    high: int | None = None
    above = 0  # tokens at `high`
    slope = 0.0  # tokens a unit
    tries = 0
    while len(best) < enough and low < (most if high is None else high - 1):
        tries += 1
        if high is not None:
            slope = (above - len(best)) / (high - low)
        if slope <= 0 or tries > _PROBES:
            size = 2 * low + 4 if high is None else (low + high) // 2
        else:
            # The first guess with a slope is one from few units: it is tried on a sixteenth of the prompt.
            aim = limit / 16 if tries == 2 and len(best) < limit / 32 else (enough + limit) / 2
            size = low + int((aim - len(best)) / slope)
        size = min(max(size, low + 1), most if high is None else high - 1)
        tokens = prompt(size)
        if len(tokens) > limit:
            high, above = size, len(tokens)
        else:
            slope = (len(tokens) - len(best)) / (size - low)
            low, best = size, tokens
    return low, best
