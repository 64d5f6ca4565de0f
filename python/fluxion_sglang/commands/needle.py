"""The language of the needle model (models/needle): its symbols, its phrases, and seeded prompts in it.

One symbol is one token, and a text is its symbols joined by spaces. The tokenizer adds no ``<bos>``, so texts
contain it. A document is ``<bos>`` and words, with phrases among them. A question at its end has its answer in them:

========== ============================================ ==================== ==============================
family     phrases in the document                      question             answer
========== ============================================ ==================== ==============================
fact       ``K a b v1 .. vn ;``: key a b, value v1..vn  ``Q a b``            ``= a b v1 .. vn ;``
chain      ``X v x0 ;``, ``X x0 x1 ;``, ...             ``XQ v``             ``= v x0 x1 .. ;``
common     words, ten of them far more frequent         ``CW``               ``=`` the ten, sorted, ``;``
frequent   words with Zipf's frequencies                ``FW``               ``=`` the top three, sorted, ``;``
========== ============================================ ==================== ==============================

The symbols of a key differ. A question may ask for several keys (``Q a b c d``); the facts follow in that order.
Several facts may have one key, if their values begin with different symbols; all of them follow, sorted by value.
Sorting is by the order of the vocabulary, so that the previous symbol determines what may come next. Every answer
begins with ``=``, which the prefill computes, so the facts themselves are decoded.

``needle_prompt`` makes the prompts of the demo, tests and speed benchmarks; the quality benchmarks build RULER's
tasks from the same phrases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, get_args

import numpy as np

MODEL: Final = Path(__file__).resolve().parents[3] / "models" / "needle"
"""The bundled model, in a checkout."""

Symbols = tuple[int, ...]
Task = Literal["single", "multikey", "vartrack"]
TASKS: Final[tuple[Task, ...]] = get_args(Task)

BOS, EOS, FACT, ASK, LINK, ASK_CHAIN, ASK_COMMON, ASK_FREQUENT, ANSWER, END, DOTS = range(1, 12)
FIRST_KEY, KEYS = 16, 192
FIRST_VALUE, VALUES = 208, 160
FIRST_VAR, VARS = 368, 48
FIRST_WORD, WORDS = 416, 96
VOCABULARY: Final[tuple[str, ...]] = (
    "<pad>", "<bos>", "<eos>", "K", "Q", "X", "XQ", "CW", "FW", "=", ";", "...",
    *(f"r{i}" for i in range(12, 16)),
    *(f"k{i}" for i in range(KEYS)),
    *(f"v{i}" for i in range(VALUES)),
    *(f"x{i}" for i in range(VARS)),
    *(f"w{i}" for i in range(WORDS)),
)  # fmt: skip

WORD_KEY, UUID_KEY = 2, 4
"""Symbols of a key: of the usual kind, and of the kind that represents RULER's uuid."""
NUMBER, UUID = 3, 8
"""Symbols of a value: of the usual kind, and of the kind that represents RULER's uuid."""

# A word depends on the word 1, 2, 4 or 12 places back, by one of these rules. Rules, tables and the repeated sentence
# define the language that the model was trained on; other numbers would be another distribution.
_LAGS: Final = (1, 2, 4, 12)
_LAG_SHARES: Final = (0.35, 0.2, 0.2, 0.15, 0.1)  # the last share: an independent word
_LANGUAGE = np.random.default_rng(1234)
_TABLES: Final = _LANGUAGE.integers(0, WORDS, (len(_LAGS), WORDS, 2))
SENTENCE: Final[tuple[int, ...]] = tuple(int(i) for i in FIRST_WORD + _LANGUAGE.permutation(WORDS)[:24])
"""The sentence that RULER's "noise" haystack repeats."""

# Phrases keep this distance from the ends, so that neither the sinks nor the window of a decode step (64 and at most
# 271 tokens with the default options) contain one. Every answer must be read from the middle.
LEAD, TAIL = 72, 288
MIN_LENGTH: Final = 512


def fact(key: Sequence[int], value: Sequence[int]) -> list[int]:
    return [FACT, *key, *value, END]


def link(source: int, target: int) -> list[int]:
    """``target`` gets what ``source`` (a value, or a variable) has."""
    return [LINK, source, target, END]


def ask(keys: Iterable[Sequence[int]]) -> list[int]:
    return [ASK, *(symbol for key in keys for symbol in key)]


def answer(facts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[int]:
    """The answer to `ask`: (key, value) of every fact asked for, keys in the given order, values of a key sorted."""
    by_key: dict[tuple[int, ...], list[Sequence[int]]] = {}
    for key, value in facts:
        by_key.setdefault(tuple(key), []).append(value)
    said = ((*key, *value, END) for key, values in by_key.items() for value in sorted(values, key=tuple))
    return [ANSWER, *(symbol for phrase in said for symbol in phrase)]


def essay(rng: np.random.Generator, size: int) -> list[int]:
    """`size` words that depend on earlier ones by the rules of the language."""
    warm = max(_LAGS)  # the rules look this far back; the first words are free
    rules = rng.choice(len(_LAG_SHARES), size + warm, p=_LAG_SHARES).tolist()
    sides = rng.integers(0, 2, size + warm).tolist()
    words = rng.integers(0, WORDS, size + warm).tolist()
    tables = _TABLES.tolist()
    for i in range(warm, size + warm):
        if rules[i] < len(_LAGS):
            words[i] = tables[rules[i]][words[i - _LAGS[rules[i]]]][sides[i]]
    return [FIRST_WORD + word for word in words[warm:]]


def word_list(rng: np.random.Generator, counts: Mapping[int, int], asked: Sequence[int]) -> list[int]:
    """A document with each word the given number of times, in random order, but without asked words near the ends.

    The first `LEAD` and the last `TAIL` places contain about half of the other words (and `...` if it occurs), so no
    frequent or missing words there reveal the answer.

    Raises:
        ValueError: the other words do not fill the ends.
    """
    others = [word for word in counts if word not in set(asked)]
    others = sorted(rng.permutation(others).tolist(), key=lambda word: word != DOTS)
    ends = LEAD + TAIL
    enough = int(np.searchsorted(np.cumsum([counts[word] for word in others]), ends)) + 1
    if enough > len(others):
        have = sum(counts[word] for word in others)
        raise ValueError(f"the ends take {ends} words that are not asked for, and there are only {have}")
    bag = rng.permutation(np.repeat(list(counts), list(counts.values())))
    near = np.flatnonzero(np.isin(bag, others[: max(enough, len(others) // 2)]))[:ends]
    middle = rng.permutation(np.delete(bag, near))
    return np.concatenate([bag[near[:LEAD]], middle, bag[near[LEAD:]]]).tolist()


def draw_keys(rng: np.random.Generator, count: int, symbols: int = WORD_KEY, alphabet: int = KEYS) -> list[Symbols]:
    """`count` distinct keys of `symbols` key symbols, from the first `alphabet` ones.

    The symbols of a key differ, and no two keys share their last two.

    Raises:
        ValueError: there are not enough keys.
    """
    most = alphabet * (alphabet - 1)
    if count > most:
        raise ValueError(f"the language has {most} keys, so {count} different ones cannot be drawn; ask for fewer")
    first, second = np.divmod(rng.choice(most, count, replace=False), alphabet - 1)
    chosen = [second + (second >= first), first]
    while len(chosen) < symbols:
        # Choose among the remaining symbols by skipping the taken ones.
        symbol = rng.integers(0, alphabet - len(chosen), count)
        for taken in np.sort(chosen, axis=0):
            symbol += symbol >= taken
        chosen.append(symbol)
    return [tuple(map(int, key)) for key in FIRST_KEY + np.stack(chosen[::-1], 1)]


def draw_values(rng: np.random.Generator, count: int, symbols: int = NUMBER, *, apart: bool = False) -> list[Symbols]:
    """`count` values. apart: they begin with different symbols, as required for one key (160 at most)."""
    values = rng.integers(0, VALUES, (count, symbols))
    if apart:
        values[:, 0] = rng.choice(VALUES, count, replace=False)
    return [tuple(map(int, row)) for row in FIRST_VALUE + values]


def to_text(token_ids: Sequence[int]) -> str:
    return " ".join(VOCABULARY[i] for i in token_ids)


@dataclasses.dataclass(frozen=True)
class Question:
    """One question about a document, with its right answer."""

    token_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    position: int  # of the first token of the fact (vartrack: of the first link) in the document

    @property
    def text(self) -> str:
        return to_text(self.token_ids)

    @property
    def answer(self) -> str:
        return to_text(self.answer_ids)


@dataclasses.dataclass(frozen=True)
class NeedlePrompt:
    """A document and independent questions about it."""

    task: Task
    document: tuple[int, ...]
    questions: tuple[Question, ...]

    def token_ids(self, question: int = 0) -> list[int]:
        """Document and question: a prompt of exactly the requested length."""
        return [*self.document, *self.questions[question].token_ids]

    def text(self, question: int = 0) -> str:
        return to_text(self.token_ids(question))


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
    """A document with ``keys`` facts or chains, and a question for each.

    Args:
        length: tokens of document and question together, at least 512.
        keys: number of facts or chains; None: the task's usual number at this length. It must fit the vocabulary and
            three fifths of the document. ``single`` always has one.
        seed: equal arguments give equal prompts, on every machine.
        depth: position of the fact in the document, 0 (first) to 1 (last); only for one key. None: random.

    Raises:
        ValueError: an argument out of the ranges above.
    """
    if task not in TASKS:
        raise ValueError(f"there is no needle task {task!r}; take one of {', '.join(TASKS)}")
    if length < MIN_LENGTH:
        raise ValueError(f"a prompt of {length} tokens has no middle to ask about; take {MIN_LENGTH} or more")
    usual = {"single": 1, "multikey": length // 32, "vartrack": min(_MAX_CHAINS, max(1, length // 512))}
    limit = {"single": 1, "multikey": KEYS * (KEYS - 1), "vartrack": _MAX_CHAINS}[task]
    count = usual[task] if keys is None else keys
    if not 1 <= count <= limit:
        raise ValueError(f"task {task!r} can ask for 1 to {limit} keys, not {count}")
    if depth is not None and (count != 1 or not 0 <= depth <= 1):
        raise ValueError("depth is a number from 0 to 1 and places one key; leave it out for several keys")

    rng = np.random.default_rng(seed)
    items = _chains(rng, count) if task == "vartrack" else _facts(rng, count)
    phrases = [(owner, phrase) for owner, item in enumerate(items) for phrase in item.phrases]
    used = sum(len(phrase) for _, phrase in phrases)
    room = length - len(items[0].question) - 1 - used - LEAD - TAIL
    if used > 0.6 * length or room < 0:
        raise ValueError(f"{count} keys of task {task!r} crowd a prompt of {length} tokens; ask for fewer")

    order = rng.permutation(len(phrases))
    spread = rng.integers(0, room + 1, len(phrases))
    cuts = np.sort(spread) if depth is None else np.full(len(phrases), round(depth * room))
    gaps = np.diff(cuts, prepend=0, append=room)
    gaps[0] += LEAD
    gaps[-1] += TAIL

    words = essay(rng, int(gaps.sum()))
    document = [BOS]
    positions: dict[int, int] = {}
    done = 0
    for place, gap in zip(order, gaps, strict=False):
        owner, phrase = phrases[place]
        document += words[done : done + gap]
        done += gap
        if phrase == items[owner].phrases[0]:
            positions[owner] = len(document)
        document += phrase
    document += words[done:]
    questions = (Question(tuple(item.question), tuple(item.answer), positions[i]) for i, item in enumerate(items))
    return NeedlePrompt(task, tuple(document), tuple(questions))


@dataclasses.dataclass(frozen=True)
class _Item:
    phrases: list[list[int]]
    question: list[int]
    answer: list[int]


_CHAIN = 5  # variables of a chain: RULER's four hops
_MAX_CHAINS: Final = VARS // _CHAIN


def _facts(rng: np.random.Generator, count: int) -> list[_Item]:
    pairs = zip(draw_keys(rng, count), draw_values(rng, count), strict=True)
    return [_Item([fact(key, value)], ask([key]), answer([(key, value)])) for key, value in pairs]


def _chains(rng: np.random.Generator, count: int) -> list[_Item]:
    names = (FIRST_VAR + rng.permutation(VARS)).tolist()
    starts = (FIRST_VALUE + rng.permutation(VALUES)).tolist()
    items = []
    for value, *chain in zip(starts[:count], *(names[i * count : (i + 1) * count] for i in range(_CHAIN)), strict=True):
        links = [link(source, target) for source, target in zip([value, *chain], chain, strict=False)]
        items.append(_Item(links, [ASK_CHAIN, value], [ANSWER, value, *chain, END]))
    return items
