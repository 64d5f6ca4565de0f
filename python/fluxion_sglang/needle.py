"""Seeded prompts in the language of the needle model (models/needle), for the demo, tests and benchmarks.

A document is ``<bos>``, then filler words with statements spread among them; a question names a statement's
key, and the model continues with what the statement said:

========== ================================================= ===================== ==================
task       statements in the document                        question              answer
========== ================================================= ===================== ==================
single     ``K k v1 v2`` (one)                               ``Q k``               ``v1 v2``
multikey   ``K k v1 v2`` (many)                              ``Q k``               ``v1 v2``
vartrack   ``X x0 v``, ``X x1 x0``, ``X x2 x1``, ... (chain) ``XQ x2``             ``x1 x0 v``
copy       ``C k t1 .. tn`` (16 to 24 tokens)                ``R k``               ``t1 .. tn``
========== ================================================= ===================== ==================

One symbol is one token, and a text is its symbols joined by spaces. The tokenizer adds no ``<bos>``, so the
texts here spell it out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final, Literal, get_args

import numpy as np

Task = Literal["single", "multikey", "vartrack", "copy"]
TASKS: Final[tuple[Task, ...]] = get_args(Task)

BOS, KEY_FACT, KEY_ASK, VAR_FACT, VAR_ASK, COPY_FACT, COPY_ASK = 1, 3, 4, 5, 6, 7, 8
FIRST_KEY, KEYS = 16, 192
FIRST_VALUE, VALUES = 208, 96
FIRST_VAR, VARS = 304, 48
FIRST_FILLER, FILLERS = 352, 160
VOCABULARY: Final[tuple[str, ...]] = (
    "<pad>", "<bos>", "<eos>", "K", "Q", "X", "XQ", "C", "R",
    *(f"r{i}" for i in range(9, 16)),
    *(f"k{i}" for i in range(KEYS)),
    *(f"v{i}" for i in range(VALUES)),
    *(f"x{i}" for i in range(VARS)),
    *(f"w{i}" for i in range(FILLERS)),
)  # fmt: skip

# A filler word follows, by one of these rules, from the word so many places back. Rules and tables are the
# language the model was trained on: other numbers would put every prompt off its distribution.
_LAGS: Final = (1, 2, 4, 12)
_LAG_SHARES: Final = (0.35, 0.2, 0.2, 0.15, 0.1)  # the last share: a word that follows from nothing
_TABLES: Final = np.random.default_rng(1234).integers(0, FILLERS, (len(_LAGS), FILLERS, 2))

# Statements keep this far from the ends, so that neither the sinks nor the window of a decode step (64 and at
# most 271 tokens with the default options) can hold one: every answer has to be read from the middle.
_LEAD, _TAIL = 72, 288
_QUESTION = 2  # tokens of a question, in every task
MIN_LENGTH: Final = 512


@dataclasses.dataclass(frozen=True)
class Question:
    """One question about a document, with the one right answer."""

    token_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    position: int  # of the first token of the statement (vartrack: of the last link) in the document

    @property
    def text(self) -> str:
        return to_text(self.token_ids)

    @property
    def answer(self) -> str:
        return to_text(self.answer_ids)


@dataclasses.dataclass(frozen=True)
class NeedlePrompt:
    """A document and the questions that can be asked about it, each by itself."""

    task: Task
    document: tuple[int, ...]
    questions: tuple[Question, ...]

    def token_ids(self, question: int = 0) -> list[int]:
        """Document and question: a prompt of exactly the length that was asked for."""
        return [*self.document, *self.questions[question].token_ids]

    def text(self, question: int = 0) -> str:
        return to_text(self.token_ids(question))


def to_text(token_ids: Sequence[int]) -> str:
    return " ".join(VOCABULARY[i] for i in token_ids)


def score(answer: str | Sequence[int], output: str | Sequence[int]) -> bool:
    """Whether the output begins with the whole answer; both are texts or both are token ids."""
    if isinstance(answer, str) != isinstance(output, str):
        raise TypeError("score compares two texts or two lists of token ids, not one of each")
    want = answer.split() if isinstance(answer, str) else list(answer)
    got = output.split() if isinstance(output, str) else list(output)
    return got[: len(want)] == want


def needle_prompt(
    length: int, keys: int | None = None, seed: int = 0, depth: float | None = None, task: Task = "multikey"
) -> NeedlePrompt:
    """A document with ``keys`` things to ask for, and a question for each.

    Args:
        length: tokens of document and question together, at least 512.
        keys: how many keys, chains or passages; None takes the task's usual number at this length. More than
            the vocabulary or three fifths of the document can hold is an error. ``single`` has one, always.
        seed: equal arguments give equal prompts, on every machine.
        depth: where in the document the statement lies, 0 (first) to 1 (last); only for one key. None: at
            random.

    Raises:
        ValueError: an argument out of the ranges above.
    """
    if task not in TASKS:
        raise ValueError(f"there is no needle task {task!r}; take one of {', '.join(TASKS)}")
    if length < MIN_LENGTH:
        raise ValueError(f"a prompt of {length} tokens has no middle to ask about; take {MIN_LENGTH} or more")
    count = _usual_keys(task, length) if keys is None else keys
    limit = 1 if task == "single" else VARS // 5 if task == "vartrack" else KEYS
    if not 1 <= count <= limit:
        raise ValueError(f"task {task!r} can ask for 1 to {limit} keys, not {count}")
    if depth is not None and (count != 1 or not 0 <= depth <= 1):
        raise ValueError("depth is a number from 0 to 1 and places one key; leave it out for several keys")

    rng = np.random.default_rng(seed)
    items = _ITEMS[task](rng, count)
    facts = [(owner, fact) for owner, item in enumerate(items) for fact in item.facts]
    used = sum(len(fact) for _, fact in facts)
    if keys is not None and used > 0.6 * length:
        raise ValueError(f"{count} keys of task {task!r} crowd a prompt of {length} tokens; ask for fewer")
    while used > 0.6 * length:  # the usual number is a guess from the length: drop what does not fit
        facts = [(owner, fact) for owner, fact in facts if owner != len(items) - 1]
        items.pop()
        used = sum(len(fact) for _, fact in facts)

    room = length - _QUESTION - 1 - used - _LEAD - _TAIL
    if room < 0:
        raise ValueError(f"{count} keys of task {task!r} crowd a prompt of {length} tokens; ask for fewer")
    order = rng.permutation(len(facts))
    spread = rng.integers(0, room + 1, len(facts))
    cuts = np.sort(spread) if depth is None else np.full(len(facts), round(depth * room))
    gaps = np.diff(cuts, prepend=0, append=room)
    gaps[0] += _LEAD
    gaps[-1] += _TAIL

    filler = _filler(rng, int(gaps.sum()))
    document = [BOS]
    positions = [0] * len(items)
    done = 0
    for place, gap in zip(order, gaps, strict=False):
        owner, fact = facts[place]
        document += filler[done : done + gap]
        done += gap
        if fact[1] == items[owner].question[1]:
            positions[owner] = len(document)
        document += fact
    document += filler[done:]
    questions = (Question(item.question, item.answer, at) for item, at in zip(items, positions, strict=True))
    return NeedlePrompt(task, tuple(document), tuple(questions))


@dataclasses.dataclass(frozen=True)
class _Item:
    facts: list[list[int]]
    question: tuple[int, int]
    answer: tuple[int, ...]


def _usual_keys(task: Task, length: int) -> int:
    """The numbers of the published accuracy tables of the model (models/needle/README.md)."""
    match task:
        case "single":
            return 1
        case "multikey":
            return min(160, length // 16)
        case "vartrack":
            return min(VARS // 5, max(2, length // 100))
        case "copy":
            return min(16, max(2, length // 128))


def _draw(rng: np.random.Generator, first: int, count: int, size: int) -> list[int]:
    return [int(i) for i in first + rng.permutation(count)[:size]]


def _values(rng: np.random.Generator, size: int) -> list[int]:
    return [int(i) for i in FIRST_VALUE + rng.integers(0, VALUES, size)]


def _key_items(rng: np.random.Generator, count: int) -> list[_Item]:
    items = []
    for key in _draw(rng, FIRST_KEY, KEYS, count):
        values = _values(rng, 2)
        items.append(_Item([[KEY_FACT, key, *values]], (KEY_ASK, key), tuple(values)))
    return items


def _chain_items(rng: np.random.Generator, count: int) -> list[_Item]:
    variables = _draw(rng, FIRST_VAR, VARS, VARS)
    items = []
    for _ in range(count):
        chain = [variables.pop() for _ in range(int(rng.integers(3, 6)))]
        (value,) = _values(rng, 1)
        facts = [[VAR_FACT, name, source] for name, source in zip(chain, [value, *chain], strict=False)]
        items.append(_Item(facts, (VAR_ASK, chain[-1]), (*reversed(chain[:-1]), value)))
    return items


def _copy_items(rng: np.random.Generator, count: int) -> list[_Item]:
    items = []
    for key in _draw(rng, FIRST_KEY, KEYS, count):
        values = _values(rng, int(rng.integers(16, 25)))
        items.append(_Item([[COPY_FACT, key, *values]], (COPY_ASK, key), tuple(values)))
    return items


_ITEMS: Final[dict[Task, Callable[[np.random.Generator, int], list[_Item]]]] = {
    "single": _key_items,
    "multikey": _key_items,
    "vartrack": _chain_items,
    "copy": _copy_items,
}


def _filler(rng: np.random.Generator, size: int) -> list[int]:
    warm = max(_LAGS)  # the rules look this far back, so the first words are free
    rules = rng.choice(len(_LAG_SHARES), size + warm, p=_LAG_SHARES).tolist()
    sides = rng.integers(0, 2, size + warm).tolist()
    words = rng.integers(0, FILLERS, size + warm).tolist()
    tables = _TABLES.tolist()
    for i in range(warm, size + warm):
        if rules[i] < len(_LAGS):
            words[i] = tables[rules[i]][words[i - _LAGS[rules[i]]]][sides[i]]
    return [FIRST_FILLER + word for word in words[warm:]]
