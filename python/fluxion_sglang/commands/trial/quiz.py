"""Documents with needles, and questions about them, in a model's own tokens.

A needle says the value of a key. Every needle lies in the middle: neither sinks nor window hold an answer, so what is
right was read from the host pool. The questions about one document share it as a prefix.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fluxion_sglang.commands import needle
from fluxion_sglang.commands.codec import Codec, SymbolicCodec, codec_of
from fluxion_sglang.commands.prose import fit, generated_essay
from fluxion_sglang.commands.trial.results import ModelFacts, TrialError

KEYS: Final = 8
"""Needles of a document, where it has the room."""

# The first and the last tokens of a prompt that hold no needle: more than sinks, and more than window and answer.
_LEAD, _TAIL = 80, 300
_SPARE: Final = 8
"""Questions about one document differ by a few tokens; the longest must fit, too."""

_SAMPLE: Final = 1000
"""Words by which the tokens of a sentence are counted."""

_COLOURS: Final = (
    "amber|azure|bronze|copper|coral|crimson|emerald|golden|indigo|ivory|jade|olive|pearl|purple|scarlet|silver"
)
_THINGS: Final = (
    "anchor|arrow|beacon|candle|compass|crown|dragon|falcon|harp|kettle|ladder|lantern|mirror|saddle|tower|violin"
)


@dataclass(frozen=True)
class Question:
    """A prompt, and the answer as text."""

    prompt: tuple[int, ...]
    answer: str


Document = list[Question]
"""Questions about one document, each a whole prompt."""


class Quiz(ABC):
    """Writes documents for one model.

    Attributes:
        what: one sentence for the report.
        max_new: tokens that an answer may take.
    """

    what: str
    max_new: int

    @abstractmethod
    def document(self, length: int, questions: int, seed: int) -> Document:
        """A document, as long as `length` with its answer.

        Args:
            questions: how many; fewer where the length has no room for so many needles.

        Raises:
            ValueError: one sentence: not even one needle fits.
        """

    @abstractmethod
    def right(self, question: Question, output: Sequence[int]) -> bool:
        """Whether the output tokens begin with the answer."""


class SymbolicQuiz(Quiz):
    """For the bundled model, whose language has phrases for keys and values."""

    what = "A document hides 8 keys with a value each, in the language of the bundled model; a question asks for one."
    max_new = 8

    def document(self, length: int, questions: int, seed: int) -> Document:
        prompt = needle.needle_prompt(length - self.max_new, KEYS, seed)
        return [Question(tuple(prompt.token_ids(i)), prompt.questions[i].answer) for i in range(min(questions, KEYS))]

    def right(self, question: Question, output: Sequence[int]) -> bool:
        return needle.score(question.answer, needle.to_text(output))


class TextQuiz(Quiz):
    """For models that read English: with the chat template where there is one, else as text to be continued."""

    max_new = 12

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        sample = _sentences(np.random.default_rng(0), _SAMPLE)
        self._sentence = max(len(codec.encode(" ".join(sample))) / len(sample), 1.0)
        self._words = _SAMPLE / len(sample)
        self.what = (
            "A text of made-up sentences hides up to 8 keys with a number each; a question asks for one number, and "
            'the answer begins with "The magic number for KEY is".'
        )

    def document(self, length: int, questions: int, seed: int) -> Document:
        rng = np.random.default_rng(seed)
        lead, tail = (int(size / self._sentence) + 1 for size in (_LEAD, _TAIL))
        lines = _sentences(rng, int(self._words * (lead + tail + 8 + length / self._sentence)))
        keys = _keys(rng, KEYS)
        values = [str(value) for value in 10_000 + rng.choice(90_000, KEYS, replace=False)]
        depths = np.sort(rng.random(KEYS)).tolist()
        for count in range(KEYS, 0, -1):
            facts = [_fact(*pair) for pair in zip(keys[:count], values[:count], strict=True)]

            def prompt(size: int, asked: str = keys[0], facts: list[str] = facts, count: int = count) -> list[int]:
                places = [lead + int(depth * (size - lead - tail)) for depth in depths[:count]]
                return self._codec.chat(*_text(lines[:size], places, facts, asked))

            limit = length - self.max_new - _SPARE
            try:
                size, _ = fit(prompt, lead + tail, len(lines), limit - int(self._sentence) - 1, limit)
            except ValueError:
                continue
            asked = zip(keys[: min(questions, count)], values, strict=False)
            return [Question(tuple(prompt(size, key)), value) for key, value in asked]
        raise ValueError(f"{length} tokens of this model hold no needle between sinks and window; give longer lengths.")

    def right(self, question: Question, output: Sequence[int]) -> bool:
        said = re.search(r"\d[\d,]*", self._codec.decode(output))
        return said is not None and said[0].replace(",", "") == question.answer


def open_quiz(facts: ModelFacts, trust: bool = False) -> Quiz:
    """The quiz in a model's own tokens.

    Raises:
        TrialError: its tokenizer cannot be read.
    """
    try:
        codec = codec_of(facts.folder or facts.name, trust=trust)
    except ValueError as error:
        raise TrialError(f"{str(error).rstrip('.')}; a trial needs the model's tokenizer for its prompts.") from None
    return SymbolicQuiz() if isinstance(codec, SymbolicCodec) else TextQuiz(codec)


def _sentences(rng: np.random.Generator, words: int) -> list[str]:
    """So many words in sentences that say nothing; the last one may be cut."""
    return generated_essay(rng, words).sentences(words)


def _keys(rng: np.random.Generator, count: int) -> list[str]:
    """Different names, such as "the amber lantern"; no two share a noun. count: 16 at most."""
    nouns = rng.permutation(_THINGS.split("|"))[:count]
    return [f"the {rng.choice(_COLOURS.split('|'))} {noun}" for noun in nouns]


def _fact(key: str, value: str) -> str:
    return f"The magic number for {key} is {value}."


def _text(lines: list[str], places: list[int], facts: list[str], asked: str) -> tuple[str, str]:
    """What the user says, and how the answer begins."""
    body: list[str] = []
    done = 0
    for place, fact in zip(places, facts, strict=True):
        body += [*lines[done:place], fact]
        done = place
    body += lines[done:]
    return (
        "A text follows. It hides magic numbers. Remember them, because a question asks for one of them.\n\n"
        f"{' '.join(body)}\n\nWhat is the magic number for {asked}?",
        f" The magic number for {asked} is",
    )
