"""Words and prose for RULER's tasks in text.

The words come from the package `wonderwords`, as in the published benchmark: eight thousand English words under the MIT
licence, without dependencies. The requirement pins its version, because another list gives other samples.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Final

import numpy as np

from .base import MissingData
from .prose import Prose

ESSAY_FILE: Final = "PaulGrahamEssays.json"


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
    """`count` different adjectives with a noun ("quiet-river"), RULER's keys; there are six million."""
    adjectives, nouns = word_list("adjective"), word_list("noun")
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        pairs = rng.integers(0, [len(adjectives), len(nouns)], (count - len(drawn), 2)).tolist()
        drawn |= dict.fromkeys(f"{adjectives[i]}-{nouns[j]}" for i, j in pairs)
    return list(drawn)


def draw_words(rng: np.random.Generator, count: int) -> list[str]:
    """`count` different words; compounds follow when the lists are exhausted."""
    words = all_words()
    drawn = [words[i] for i in rng.permutation(len(words))[:count]]
    return drawn + draw_compounds(rng, count - len(drawn)) if count > len(drawn) else drawn


@functools.lru_cache(maxsize=1)
def read_essay(path: Path) -> Prose:
    """The essays of the published benchmark: a JSON file with a single key "text".

    Raises:
        MissingData: the file has another format.
    """
    try:
        text = json.loads(path.read_text(encoding="utf-8"))["text"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MissingData(f'{path} is not RULER\'s file of essays, {{"text": "..."}}: {error!r}.') from None
    return Prose(text, path.name)
