"""Extraction in the symbolic language: one question for many facts that lie among the words of a document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from fluxion_sglang.commands import needle

SPACING: Final = 32
"""Tokens of a document per fact, as in `needle.needle_prompt`; facts are about a fifth of the tokens."""


@dataclass(frozen=True)
class Facts:
    """A question for several facts.

    Attributes:
        prompt: document and question.
        answer: the right answer, including the "=" that prefill computes.
        keys, values: of the facts in question, in its order.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...]
    values: tuple[tuple[int, ...], ...]


def facts_among_words(length: int, asked: int, questions: int, rng: np.random.Generator) -> list[Facts]:
    """One document and up to `questions` questions about it, each for `asked` other facts.

    Prompt and answer have `length` tokens together. All facts lie outside the sinks and the window (`needle.LEAD`,
    `needle.TAIL`), and there are at least twice as many as one question needs.

    ValueError: the length is too short.
    """
    size = 1 + needle.WORD_KEY + needle.NUMBER + 1
    question, answer = 1 + asked * needle.WORD_KEY, 1 + asked * (size - 1)
    body = length - 1 - question - answer
    count = max(2 * asked, length // SPACING)
    room = body - needle.LEAD - needle.TAIL - count * size
    if room < 0:
        raise ValueError(f"Questions for {asked} facts need {-room} tokens more than {length}.")

    keys, values = needle.draw_keys(rng, count), needle.draw_values(rng, count)
    words = needle.essay(rng, body - count * size)
    cuts = needle.LEAD + np.sort(rng.integers(0, room + 1, count))
    document = [needle.BOS]
    done = 0
    for key, value, cut in zip(keys, values, cuts.tolist(), strict=True):
        document += words[done:cut] + needle.fact(key, value)
        done = cut
    document += words[done:]

    order = rng.permutation(count)
    made = []
    for first in range(0, count - asked + 1, asked)[:questions]:
        chosen = [(keys[i], values[i]) for i in order[first : first + asked]]
        mine = tuple(key for key, _ in chosen)
        prompt = (*document, *needle.ask(mine))
        made.append(Facts(prompt, tuple(needle.answer(chosen)), mine, tuple(value for _, value in chosen)))
    return made
