"""Parameters of RULER's thirteen tasks (Hsieh et al., arXiv 2404.06654), independent of the language.

The numbers are those of the configuration published with the paper. A language (`ruler_text`, `ruler_symbolic`) writes
a task down; questions and frequencies are the same in both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

import numpy as np


@dataclass(frozen=True)
class Needles:
    """Needle in a haystack: facts hidden in a document, some of which are asked for.

    Attributes:
        haystack: one repeated sentence, an essay, or other facts.
        keys: number of keys of the facts (a haystack of facts has more of its own).
        values: facts per key; all must be named.
        queries: keys in one question.
    """

    haystack: Literal["repeat", "essay", "needle"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    tokens_to_generate: ClassVar[int] = 128


@dataclass(frozen=True)
class Chains:
    """Variable tracking: variables are assigned from one another; the question asks for all variables with a value."""

    chains: int = 1
    hops: int = 4
    tokens_to_generate: ClassVar[int] = 30


@dataclass(frozen=True)
class CommonWords:
    """A shuffled list of words; `words` of them occur `frequency` times, the others `other` times."""

    words: int = 10
    frequency: int = 30
    other: int = 3
    tokens_to_generate: ClassVar[int] = 120


@dataclass(frozen=True)
class FrequentWords:
    """Words whose frequencies follow a zeta distribution; the first is noise, the question asks for the next `top`."""

    alpha: float = 2.0
    top: int = 3
    tokens_to_generate: ClassVar[int] = 50


@dataclass(frozen=True)
class Documents:
    """A question, documents that answer it, and other documents."""

    dataset: Literal["squad", "hotpotqa"]
    tokens_to_generate: ClassVar[int] = 32


Definition = Needles | Chains | CommonWords | FrequentWords | Documents

DEFINITIONS: Final[Mapping[str, Definition]] = {
    "niah_single_1": Needles("repeat"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value="uuids"),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", key="uuids", value="uuids"),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", keys=4, queries=4),
    "vt": Chains(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    "qa_1": Documents("squad"),
    "qa_2": Documents("hotpotqa"),
}

DEPTHS: Final = tuple(round(100 * i / 39) for i in range(40))
"""Possible depths of needles in an essay, in percent."""


@dataclass(frozen=True)
class Asked:
    """A question about a document: a `Sample` without the names that its task assigns."""

    prompt: tuple[int, ...]
    references: tuple[str, ...]
    max_new_tokens: int
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Draw:
    """Seed of one document: equal fields give equal documents on every machine."""

    seed: int
    task: str
    length: int
    index: int

    def rng(self, purpose: str = "") -> np.random.Generator:
        """A new generator for a purpose; purposes are independent of each other."""
        return seeded(self.seed, self.task, self.length, self.index, purpose)

    def turn(self, size: int) -> int:
        """This document's place in a shuffle of `size`, which all documents of the task share at every length."""
        return int(seeded(self.seed, self.task).permutation(size)[self.index % size])


def seeded(*parts: object) -> np.random.Generator:
    """A generator for these parts, the same on every machine.

    numpy's own seeding treats [1, 0] like 1, so different parts could give the same stream.
    """
    digest = hashlib.sha256(repr(parts).encode()).digest()  # hash() differs from process to process
    return np.random.default_rng(int.from_bytes(digest, "little"))


def draw_depths(rng: np.random.Generator, count: int) -> list[int]:
    """`count` different values of DEPTHS in ascending order."""
    return sorted(DEPTHS[i] for i in rng.choice(len(DEPTHS), count, replace=False))
