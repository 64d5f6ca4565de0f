"""Context-intensive extraction: answers that need many places of the document at once.

Offloaded and sparse KV caches that pass needle tests were found to fail when a task looks up much of its prompt
(Text2JSON, arXiv 2604.08426). This suite asks such questions about its own documents. The fall of the score from 8 to
24 records shows what a budget can hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from fluxion_sglang.commands import needle

from . import metrics
from .base import Codec, Sample, Suite, Task
from .extraction_answers import triples_f1
from .extraction_symbolic import facts_among_words
from .extraction_text import records_among_sentences
from .ruler_definitions import seeded

ASKED: Final = (8, 16, 24)
"""Numbers of records in a question, one task each."""
QUESTIONS: Final = 4
"""Maximum number of questions about one symbolic document; fewer if it lacks facts."""


class _Extraction(Task):
    """Makes documents until there are enough samples; prompt and answer have `length` tokens together."""

    def samples(self, codec: Codec, length: int | None, count: int, seed: int) -> list[Sample]:
        """`count` samples.

        Raises:
            ValueError: the length is too short.
        """
        if length is None:
            raise ValueError(f"Task {self.name} makes documents of a wanted length; give one.")
        made: list[Sample] = []
        document = 0
        while len(made) < count:
            # The seed includes the task's name, so that tasks use different documents; the bootstrap draws documents.
            rng = seeded("extraction", self.name, seed, length, document)
            made += self._samples(codec, length, f"{self.name}-{document}", rng)
            document += 1
        return made[:count]

    def _samples(self, codec: Codec, length: int, document: str, rng: np.random.Generator) -> Iterator[Sample]:
        """The samples of one document."""
        raise NotImplementedError


@dataclass(frozen=True)
class Records(_Extraction):
    """English notes. The answer is a JSON object per line; the score is F1 over (record, field, value)."""

    asked: int
    kind: ClassVar[str] = "records"

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"records_{self.asked}"

    def _samples(self, codec: Codec, length: int, document: str, rng: np.random.Generator) -> Iterator[Sample]:
        for found in records_among_sentences(codec, length, self.asked, rng):
            meta = {"kind": found.kind, "records": self.asked}
            name = f"{document}-{found.kind}"
            yield Sample(name, found.prompt, found.answer, found.max_new_tokens, document, meta)

    def score(self, sample: Sample, output: str) -> float:
        """F1 over the triples."""
        return triples_f1(output, sample.references)


@dataclass(frozen=True)
class Facts(_Extraction):
    """Symbolic facts. The score is the share of facts, key and value, that the output contains.

    A value alone does not count: with another key it is a wrong answer.
    """

    asked: int

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"facts_{self.asked}"

    def _samples(self, codec: Codec, length: int, document: str, rng: np.random.Generator) -> Iterator[Sample]:
        for number, found in enumerate(facts_among_words(length, self.asked, QUESTIONS, rng)):
            facts = tuple(needle.to_text((*key, *value)) for key, value in zip(found.keys, found.values, strict=True))
            meta = {"keys": list(map(needle.to_text, found.keys)), "answer": needle.to_text(found.answer)}
            yield Sample(f"{document}-{number}", found.prompt, facts, len(found.answer), document, meta)

    def score(self, sample: Sample, output: str) -> float:
        """The share of facts found, as runs of whole symbols."""
        return metrics.match_all_symbols(output, sample.references)


class Extraction(Suite):
    """Many records of one document at once; makes its own documents."""

    name = "extraction"
    lengths = True

    def tasks(self, codec: Codec, data: Path | None) -> list[Task]:
        """One task for every number in `ASKED`; `data` is not used."""
        kind = Facts if codec.symbolic else Records
        return [kind(asked) for asked in ASKED]
