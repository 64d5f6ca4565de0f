"""Generated prose, and the search for the amount that fills a prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

_PROBES: Final = 8  # guesses from the slope before plain bisection


def _choices(text: str) -> list[str]:
    return [choice.strip() for choice in text.split("|")]


_DETERMINERS: Final = _choices("the|one|every|that|this|another|our|their|her|his")
_ADJECTIVES: Final = _choices(
    "old|quiet|small|bright|careful|early|empty|gentle|heavy|honest|narrow|patient|plain|proud|simple|steady|strange|"
    "tired|warm|wide|young|clever|distant|familiar|modest|ordinary"
)
_NOUNS: Final = _choices(
    "teacher|river|market|window|garden|letter|bridge|village|doctor|kitchen|mountain|engine|harbour|library|neighbour|"
    "painter|road|school|summer|table|train|valley|visitor|winter|worker|farmer|boat|question|story|house|field|"
    "machine|shop|street|friend|meeting|plan|tree|evening|town"
)
_VERBS: Final = _choices(
    "watched|followed|described|noticed|remembered|repaired|crossed|reached|painted|studied|visited|carried|opened|"
    "closed|mentioned|helped|changed|found|kept|left|liked|met|moved|needed|passed|saw|showed|trusted|used|wanted"
)
_PLACES: Final = _choices(
    "near the station|before the rain|after breakfast|by the lake|at the end of the day|in the morning|on the hill|"
    "behind the church|without a word|for the first time|in spite of the cold|all through the week|along the coast|"
    "once again|with great care|under the old roof"
)
_LINKS: Final = _choices("and|but|while|so|because|although")


class Prose:
    """Endless prose: a text that repeats from its beginning, to be cut after any word."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        """Origin: a file's name, or "generated"."""
        words = [sentence.split() for sentence in re.split(r"(?<=[.!?])\s+", text)]
        self._sentences = [" ".join(sentence) for sentence in words if sentence]
        self._ends = np.cumsum([len(sentence) for sentence in words if sentence])

    def sentences(self, words: int) -> list[str]:
        """The first `words` words as sentences; the last one may be cut."""
        rounds, rest = divmod(words, int(self._ends[-1]))
        whole = int(np.searchsorted(self._ends, rest, side="right"))
        taken = self._sentences * rounds + self._sentences[:whole]
        cut = rest - (int(self._ends[whole - 1]) if whole else 0)
        return [*taken, " ".join(self._sentences[whole].split()[:cut])] if cut else taken


def generated_essay(rng: np.random.Generator, words: int) -> Prose:
    """At least `words` words of plain sentences without a plot."""
    picks = iter(rng.integers(0, 2**31, words * 2 + 64).tolist())
    sentences = []
    size = 0
    while size < words:
        sentences.append(_sentence(picks))
        size += sentences[-1].count(" ") + 1
    return Prose(" ".join(sentences), "generated")


def _sentence(picks: Iterator[int]) -> str:
    def one(options: Sequence[str]) -> str:
        return options[next(picks) % len(options)]

    def someone() -> str:
        return f"{one(_DETERMINERS)} {one(_ADJECTIVES) + ' ' if next(picks) % 2 else ''}{one(_NOUNS)}"

    def clause() -> str:
        place = f" {one(_PLACES)}" if next(picks) % 3 == 0 else ""
        return f"{someone()} {one(_VERBS)} {someone()}{place}"

    text = clause()
    if next(picks) % 3 == 0:
        text = f"{text} {one(_LINKS)} {clause()}"
    return f"{text[0].upper()}{text[1:]}."


def fit(prompt: Callable[[int], list[int]], least: int, most: int, enough: int, limit: int) -> tuple[int, list[int]]:
    """A size and its prompt with at most `limit` tokens: one with `enough` tokens or more, else the largest that fits.

    Tokenising dominates the cost, and the tokens of a prompt grow almost linearly with its size. Sizes are therefore
    guessed from the slope so far, after a cheap small prompt; two or three prompts of the full size suffice.

    Args:
        prompt: returns the tokens of the prompt for a size; nearly increasing.
        least, most: smallest and largest size.

    Raises:
        ValueError: the smallest prompt exceeds `limit`.
    """
    low, best = least, prompt(least)
    if len(best) > limit:
        raise ValueError(f"{limit} tokens were left for a prompt that has at least {len(best)}")
    high: int | None = None
    above = 0  # tokens at `high`
    slope = 0.0  # tokens per unit of size
    tries = 0
    while len(best) < enough and low < (most if high is None else high - 1):
        tries += 1
        if high is not None:
            slope = (above - len(best)) / (high - low)
        if slope <= 0 or tries > _PROBES:
            size = 2 * low + 4 if high is None else (low + high) // 2
        else:
            # The first slope comes from a small size and is imprecise, so try it on a sixteenth of the prompt first.
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
