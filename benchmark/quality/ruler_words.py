"""Words and prose for RULER's tasks in text.

The words are those of the package `wonderwords`, as in the published benchmark: eight thousand English words under the
MIT licence, without dependencies. Its version is fixed where the package is required, because other lists are other
samples.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from .base import MissingData

ESSAY_FILE: Final = "PaulGrahamEssays.json"


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


@functools.cache
def word_list(category: str) -> tuple[str, ...]:
    """The words of a category ("noun", "adjective", "verb"), sorted.

    Raises:
        MissingData: the package is not installed.
    """
    try:
        from wonderwords import RandomWord
    except ImportError:
        raise MissingData(
            "RULER's words come from the package wonderwords, which is not installed; "
            'install it with: pip install "fluxion-sglang[quality]".'
        ) from None
    return tuple(sorted(set(RandomWord().filter(include_categories=[category]))))


@functools.cache
def all_words() -> tuple[str, ...]:
    return tuple(sorted({*word_list("noun"), *word_list("adjective"), *word_list("verb")}))


def draw_compounds(rng: np.random.Generator, count: int) -> list[str]:
    """`count` different adjectives with a noun ("quiet-river"), RULER's keys; six million there are."""
    adjectives, nouns = word_list("adjective"), word_list("noun")
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        pairs = rng.integers(0, [len(adjectives), len(nouns)], (count - len(drawn), 2)).tolist()
        drawn |= dict.fromkeys(f"{adjectives[i]}-{nouns[j]}" for i, j in pairs)
    return list(drawn)


def draw_words(rng: np.random.Generator, count: int) -> list[str]:
    """`count` different words; where the lists end, compounds follow."""
    words = all_words()
    drawn = [words[i] for i in rng.permutation(len(words))[:count]]
    return drawn + draw_compounds(rng, count - len(drawn)) if count > len(drawn) else drawn


class Prose:
    """Endless prose: a text that starts over at its end, to be cut after any word."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        """Where it is from: a file's name, or "generated"."""
        words = [sentence.split() for sentence in re.split(r"(?<=[.!?])\s+", text)]
        self._sentences = [" ".join(sentence) for sentence in words if sentence]
        self._ends = np.cumsum([len(sentence) for sentence in words if sentence])

    def sentences(self, words: int) -> list[str]:
        """The first so many words, as sentences; the last one may be cut."""
        rounds, rest = divmod(words, int(self._ends[-1]))
        whole = int(np.searchsorted(self._ends, rest, side="right"))
        taken = self._sentences * rounds + self._sentences[:whole]
        cut = rest - (int(self._ends[whole - 1]) if whole else 0)
        return [*taken, " ".join(self._sentences[whole].split()[:cut])] if cut else taken


@functools.lru_cache(maxsize=1)
def read_essay(path: Path) -> Prose:
    """The essays of the published benchmark: a JSON file with the one key "text".

    Raises:
        MissingData: the file is something else.
    """
    try:
        text = json.loads(path.read_text(encoding="utf-8"))["text"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MissingData(f'{path} is not RULER\'s file of essays, {{"text": "..."}}: {error!r}.') from None
    return Prose(text, path.name)


def generated_essay(rng: np.random.Generator, words: int) -> Prose:
    """At least so many words of plain sentences without a plot."""
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
