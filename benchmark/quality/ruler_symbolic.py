"""RULER's tasks in the symbolic language of the bundled model (`fluxion_sglang.commands.needle`).

A prompt and its answer have exactly the given length together; the length of the answer is known and limits generation.
Facts in question lie at least `needle.LEAD` tokens after the beginning of the document and `needle.TAIL` before its
end, outside the sinks and the window. The same holds for words to be counted: in RULER they are everywhere, and the
ends alone would reveal the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fluxion_sglang.commands import needle

from .ruler_definitions import (
    Asked,
    Chains,
    CommonWords,
    Definition,
    Draw,
    FrequentWords,
    Needles,
    draw_depths,
)

KEY_SYMBOLS: Final = {"words": needle.WORD_KEY, "uuids": needle.UUID_KEY}
VALUE_SYMBOLS: Final = {"numbers": needle.NUMBER, "uuids": needle.UUID}

Fact = tuple[tuple[int, ...], tuple[int, ...]]
"""Key and value."""


def write(definition: Definition, draw: Draw, questions: int) -> list[Asked]:
    """One document, and up to `questions` questions about it; they differ only in the question.

    Raises:
        ValueError: the length is too short for the task.
    """
    if draw.length < needle.MIN_LENGTH:
        raise ValueError(f"Task {draw.task} needs a length of {needle.MIN_LENGTH} tokens or more, not {draw.length}.")
    match definition:
        case Needles(haystack="needle"):
            return _facts_only(definition, draw, questions)
        case Needles():
            return _facts_in_words(definition, draw, questions)
        case Chains():
            return [_chain(definition, draw)]
        case CommonWords():
            return [_common_words(definition, draw)]
        case FrequentWords():
            return [_frequent_words(definition, draw)]
    raise ValueError(f"Task {draw.task} does not exist in the symbolic language.")


@dataclass(frozen=True)
class _Shape:
    """Sizes in tokens of a task's parts."""

    length: int
    question: int
    answer: int

    @property
    def body(self) -> int:
        """Tokens left for the document, without its <bos>."""
        return self.length - 1 - self.question - self.answer

    def asked(
        self,
        body: Sequence[int],
        question: Sequence[int],
        answer: Sequence[int],
        references: list[str],
        meta: dict[str, Any],
    ) -> Asked:
        prompt = (needle.BOS, *body, *question)
        assert (len(body), len(question), len(answer)) == (self.body, self.question, self.answer)
        meta = {**meta, "answer": needle.to_text(answer)}
        return Asked(prompt, tuple(references), self.answer, meta)


def _needles_shape(task: Needles, draw: Draw) -> _Shape:
    key, value = KEY_SYMBOLS[task.key], VALUE_SYMBOLS[task.value]
    return _Shape(draw.length, 1 + task.queries * key, 1 + task.queries * task.values * (key + value + 1))


def _ask(task: Needles, shape: _Shape, body: list[int], facts: list[Fact], positions: list[int]) -> Asked:
    """The question whose answer is these facts, in this order."""
    keys = list(dict.fromkeys(key for key, _ in facts))
    meta = {"haystack": task.haystack, "keys": [needle.to_text(key) for key in keys], "positions": positions}
    references = [needle.to_text(value) for _, value in facts]
    return shape.asked(body, needle.ask(keys), needle.answer(facts), references, meta)


def _facts_in_words(task: Needles, draw: Draw, questions: int) -> list[Asked]:
    rng = draw.rng()
    shape = _needles_shape(task, draw)
    keys = needle.draw_keys(rng, task.keys, KEY_SYMBOLS[task.key])
    values = iter(needle.draw_values(rng, task.keys * task.values, VALUE_SYMBOLS[task.value], apart=True))
    facts: list[Fact] = [(key, next(values)) for key in keys for _ in range(task.values)]
    facts = [facts[i] for i in rng.permutation(len(facts))]
    room = _room(shape, draw, [needle.fact(*fact) for fact in facts])
    cuts = [round(room * depth / 100) for depth in draw_depths(rng, len(facts))]
    body, places = _among_words(_words(task.haystack, rng, shape.body), [needle.fact(*fact) for fact in facts], cuts)

    order = [keys[i] for i in rng.permutation(len(keys))]
    groups = [order[i : i + task.queries] for i in range(0, len(order), task.queries)]
    asked = []
    for group in groups[:questions]:
        by_value = sorted(range(len(facts)), key=lambda i: facts[i][1])  # the order of an answer
        mine = [i for key in group for i in by_value if facts[i][0] == key]
        asked.append(_ask(task, shape, body, [facts[i] for i in mine], [places[i] for i in mine]))
    return asked


def _facts_only(task: Needles, draw: Draw, questions: int) -> list[Asked]:
    """A document of facts; those in question lie in the middle. Words at the start fill the remainder."""
    rng = draw.rng()
    shape = _needles_shape(task, draw)
    size = KEY_SYMBOLS[task.key] + VALUE_SYMBOLS[task.value] + 2
    count, rest = divmod(shape.body, size)
    keys = needle.draw_keys(rng, count, KEY_SYMBOLS[task.key])
    facts = list(zip(keys, _different_values(rng, count, VALUE_SYMBOLS[task.value]), strict=True))
    body = needle.essay(rng, rest) + [symbol for fact in facts for symbol in needle.fact(*fact)]
    places = [1 + rest + i * size for i in range(count)]
    end = 1 + shape.body
    middle = [i for i, at in enumerate(places) if at > needle.LEAD and at + size <= end - needle.TAIL]
    chosen = [middle[i] for i in rng.permutation(len(middle))[:questions]]
    return [_ask(task, shape, body, [facts[i]], [places[i]]) for i in chosen]


def _chain(task: Chains, draw: Draw) -> Asked:
    """The links keep the order of the chain, at random places among RULER's noise, the repeated sentence."""
    rng = draw.rng()
    variables = task.hops + 1
    shape = _Shape(draw.length, 2, 3 + variables)
    value = needle.FIRST_VALUE + int(rng.integers(needle.VALUES))
    chain = (needle.FIRST_VAR + rng.permutation(needle.VARS)[:variables]).tolist()
    links = [needle.link(source, target) for source, target in zip([value, *chain], chain, strict=False)]
    room = _room(shape, draw, links)
    cuts = np.sort(rng.integers(0, room + 1, variables)).tolist()
    body, places = _among_words(_words("repeat", rng, shape.body), links, cuts)
    answer = [needle.ANSWER, value, *chain, needle.END]
    references = [needle.VOCABULARY[variable] for variable in chain]
    meta = {"haystack": "repeat", "value": needle.VOCABULARY[value], "positions": places}
    return shape.asked(body, [needle.ASK_CHAIN, value], answer, references, meta)


def _common_words(task: CommonWords, draw: Draw) -> Asked:
    """All words of the language, in RULER's proportion of frequencies; counts within a kind differ by at most one."""
    rng = draw.rng()
    shape = _Shape(draw.length, 1, 2 + task.words)
    words = (needle.FIRST_WORD + rng.permutation(needle.WORDS)).tolist()
    words[: task.words] = sorted(words[: task.words])
    ratio = task.frequency / task.other
    others = needle.WORDS - task.words
    common = round(shape.body * ratio / (task.words * ratio + others))
    each, more = divmod(shape.body - common * task.words, others)
    counts = [common] * task.words + [each + 1] * more + [each] * (others - more)
    body = _word_list(rng, draw, words, counts, words[: task.words])
    answer = [needle.ANSWER, *words[: task.words], needle.END]
    references = [needle.VOCABULARY[word] for word in words[: task.words]]
    return shape.asked(body, [needle.ASK_COMMON], answer, references, {"counts": [common, each]})


def _frequent_words(task: FrequentWords, draw: Draw) -> Asked:
    """Counts follow the distribution (RULER does not sample either), rounded to add up to the length."""
    rng = draw.rng()
    shape = _Shape(draw.length, 1, 2 + task.top)
    words = (needle.FIRST_WORD + rng.permutation(needle.WORDS)).tolist()
    words[0] = needle.DOTS
    counts = shares(shape.body, len(words), task.alpha)
    top = sorted(words[1 : 1 + task.top])
    body = _word_list(rng, draw, words, counts, top)
    references = [needle.VOCABULARY[word] for word in top]
    meta = {"counts": counts[: 2 + task.top]}
    return shape.asked(body, [needle.ASK_FREQUENT], [needle.ANSWER, *top, needle.END], references, meta)


def _word_list(
    rng: np.random.Generator, draw: Draw, words: list[int], counts: list[int], asked: list[int]
) -> list[int]:
    try:
        return needle.word_list(rng, dict(zip(words, counts, strict=True)), asked)
    except ValueError as e:
        raise ValueError(f"Task {draw.task} does not fit into {draw.length} tokens: {e}.") from e


def shares(total: int, ranks: int, alpha: float) -> list[int]:
    """Integers that add up to `total`, in proportion to 1 / rank^alpha, by largest remainders; they never increase."""
    exact = np.arange(1, ranks + 1) ** -alpha
    exact *= total / exact.sum()
    counts = np.floor(exact).astype(int)
    up = np.argsort(counts - exact, kind="stable")[: total - counts.sum()]
    counts[up] += 1
    return [int(i) for i in counts]


def _words(haystack: str, rng: np.random.Generator, size: int) -> list[int]:
    if haystack == "essay":
        return needle.essay(rng, size)
    return list(needle.SENTENCE * (size // len(needle.SENTENCE) + 1))[:size]


def _room(shape: _Shape, draw: Draw, phrases: list[list[int]]) -> int:
    """Number of words to distribute before, between and after the phrases."""
    room = shape.body - sum(map(len, phrases)) - needle.LEAD - needle.TAIL
    if room < 0:
        raise ValueError(f"Task {draw.task} does not fit into {draw.length} tokens; {-room} more are needed.")
    return room


def _among_words(words: list[int], phrases: list[list[int]], cuts: list[int]) -> tuple[list[int], list[int]]:
    """Insert each phrase after LEAD + cut words; `cuts` is ascending. Also return the phrases' positions in the
    prompt."""
    body: list[int] = []
    places = []
    done = 0
    for phrase, cut in zip(phrases, cuts, strict=True):
        body += words[done : needle.LEAD + cut]
        done = needle.LEAD + cut
        places.append(1 + len(body))
        body += phrase
    return body + words[done : len(words) - sum(map(len, phrases))], places


def _different_values(rng: np.random.Generator, count: int, symbols: int) -> list[tuple[int, ...]]:
    values: dict[tuple[int, ...], None] = {}
    while len(values) < count:
        values |= dict.fromkeys(needle.draw_values(rng, count - len(values), symbols))
    return list(values)
