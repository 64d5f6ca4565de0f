"""Perplexity at decode steps (HGCA's measure of quality, its Table 1): the last tokens of windows of real text.

HGCA reports perplexities of texts of given lengths under its sparse attention. Here a text is cut into windows of the
given length. The last tokens of each, 64 to 512, are forced one by one; each is a decode step at the full length, where
policies act. The exact prefill computes the first of them, which does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from fluxion_sglang.commands import needle

from .base import Codec, MissingData, Sample, Suite, Task
from .extraction_symbolic import facts_among_words
from .ruler_definitions import seeded

MOST_TARGETS: Final = 512
"""Maximum forced tokens of a window of real text; an eighth of the window is forced."""
TARGETS: Final = 64
"""Minimum forced tokens of a window; also the number in the language of the bundled model."""

Written = tuple[list[int], int, list[int] | None]
"""Prompt, number of targets, and indices of those that count; see `Symbolic`."""


class _Forced(Task):
    """A task whose samples are forced: there is no output to score."""

    def score(self, sample: Sample, output: str) -> float:
        raise TypeError(f"Task {self.name} has targets to be forced, not answers to be scored.")


@dataclass(frozen=True)
class Text(_Forced):
    """Windows of texts, side by side from each text's beginning.

    Attributes:
        targets: minimum number of forced tokens.
        answer: share of a window that is forced; None: an eighth, up to MOST_TARGETS.
    """

    paths: Sequence[Path]
    name: str = "text"
    targets: int = TARGETS
    answer: float | None = None

    def samples(self, codec: Codec, length: int | None, count: int, seed: int) -> list[Sample]:
        """`count` windows of `length` tokens (bos included), drawn from all texts, or all there are.

        Raises:
            ValueError: no text has that many tokens.
        """
        length = _checked(length, self.targets)
        forced = min(length // 8, MOST_TARGETS) if self.answer is None else int(self.answer * length)
        targets = max(self.targets, forced)
        start = codec.plain("")
        size = length - len(start)
        windows = []
        longest = 0
        for path in self.paths:
            tokens = codec.encode(path.read_text(encoding="utf-8"))
            longest = max(longest, len(tokens))
            windows += [(path, i, tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]
        if not windows:
            raise ValueError(
                f"A window of {length} tokens needs a longer text: the longest has {longest} (of "
                f"{len(self.paths)} in {self.paths[0].parent})."
            )
        chosen = sorted(seeded("perplexity", self.name, seed).permutation(len(windows))[:count])
        return [
            Sample(
                id=f"{path.name}-{at}",
                prompt=(*start, *tokens),
                references=(),
                max_new_tokens=targets,
                meta={"targets": targets, "position": at},
            )
            for path, at, tokens in (windows[i] for i in chosen)
        ]


@dataclass(frozen=True)
class Symbolic(_Forced):
    """Texts in the language of the bundled model.

    Args:
        write: (length, generator) -> (prompt of that length, number of trailing targets, indices of those that count or
            None: all but the first).
    """

    name: str
    write: Callable[[int, np.random.Generator], Written]

    def samples(self, codec: Codec, length: int | None, count: int, seed: int) -> list[Sample]:
        """`count` texts of `length` tokens."""
        length = _checked(length, TARGETS)
        made = []
        for i in range(count):
            prompt, targets, counted = self.write(length, seeded("perplexity", self.name, seed, length, i))
            meta = {"targets": targets, **({"counted": counted} if counted else {})}
            made.append(Sample(f"{self.name}-{i}", tuple(prompt), (), targets, meta=meta))
        return made


def words(length: int, rng: np.random.Generator) -> Written:
    """Words only. Each follows from at most twelve tokens before it: a policy must not harm the local context."""
    return [needle.BOS, *needle.essay(rng, length - 1)], TARGETS, None


def answers(length: int, rng: np.random.Generator) -> Written:
    """Words with facts, a question for ten of them, and its answer as targets: a policy must find distant facts.

    Only values count. Keys are copied from the question, and the end of a fact follows from its place.
    """
    asked = facts_among_words(length, 10, 1, rng)[0]  # 1 + 10 * (2 of the key, 3 of the value, 1 end) = 61 targets
    size = needle.WORD_KEY + needle.NUMBER + 1
    counted = [first + i for first in range(1, len(asked.answer), size) for i in range(needle.WORD_KEY, size - 1)]
    return [*asked.prompt, *asked.answer], len(asked.answer), counted


def _checked(length: int | None, targets: int) -> int:
    if length is None or length < 2 * targets:
        raise ValueError(
            f"Perplexity of {targets} targets needs a length of {2 * targets} tokens or more, not {length}."
        )
    return length


class Perplexity(Suite):
    """Perplexity of texts given as `data`; the bundled model has texts of its own language."""

    name = "perplexity"
    lengths = True

    def tasks(self, codec: Codec, data: Path | None) -> list[Task]:
        """One task for all texts together; without data, the bundled model's own tasks.

        Args:
            data: a text file (UTF-8), or a folder with *.txt.

        Raises:
            MissingData: there is no text.
        """
        if codec.symbolic and data is None:
            return [Symbolic("words", words), Symbolic("answers", answers)]
        if data is None:
            raise MissingData(
                "Name a text by --data: a UTF-8 file or a folder of *.txt with long texts, for instance books of the "
                "hub's dataset emozilla/pg19 or the text of Salesforce/wikitext, one file a book."
            )
        paths = [data] if data.is_file() else sorted(data.glob("*.txt"))
        if not paths:
            raise MissingData(
                f"There is no file {data}, nor a folder of that name with *.txt: give long texts in UTF-8."
            )
        return [Text(tuple(paths))]
