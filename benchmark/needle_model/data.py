"""Training sequences in the needle model's language.

A sequence is a document with questions and answers, in one of three layouts. *Dense*: phrases and questions
interleaved, which gives a young model many answers to learn from. *Haystack*: phrases spread among words or packed
together, with all questions at the end, as in a benchmark. *Counting*: a list of words and questions for the most
frequent ones. Tasks mix freely inside a sequence; a benchmark's documents are special cases.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Final

import numpy as np

from fluxion_sglang.commands import needle

NONE, WORD, FACT_VALUE, MULTI, CHAIN, COMMON, FREQUENT, ECHO = range(8)
KINDS: Final = ("none", "word", "value", "multivalue", "chain", "common", "frequent", "echo")
"""Kinds of tokens, for the loss and for reports: nothing to predict, a word of an essay, or a part of an answer."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Arrays [B, T]: inputs, next tokens, the kind of each next token (index of KINDS), and RoPE positions."""

    tokens: np.ndarray
    targets: np.ndarray
    kinds: np.ndarray
    positions: np.ndarray


@dataclasses.dataclass(frozen=True)
class Mix:
    """Distribution of the sequences in a stage.

    Attributes:
        dense, counting: shares of sequences with that layout; the others are haystacks.
        pose: share of sequences whose positions skip ahead at random (PoSE, arXiv 2309.10400), so that short
            sequences teach long distances.
        keys: key symbols in use, at most 192; with fewer the task is easier to discover.
        families: concentrations of a Dirichlet distribution for the shares of a sequence that ask for one fact, several
            keys, several values, and chains.
        rare: minimum number of different words beside the ten common ones; with few of them, the common ones stand out.
        rounds: maximum number of questions of a sequence about its list of words; the list grows between them.
        skips: positions also skip in lists of words.
        midway: share of chains whose question starts from one of their variables instead of the value.
        terse: share of sequences with short keys and values of one symbol.
        many: maximum number of keys in a question; values: maximum number of facts for one key.
        long: share of sequences with short keys and with values as long as RULER's uuids.
        lone: share of haystacks that consist almost only of words and have one question, like a benchmark's documents.
        packed: share of haystacks that consist only of facts.
        wide: share of sequences whose keys and values are as long as RULER's uuids.
        span: largest position that skips may reach.
    """

    dense: float
    counting: float
    pose: float
    keys: int = needle.KEYS
    families: tuple[float, float, float, float] = (3.0, 0.8, 0.8, 0.8)
    many: int = 6
    rare: int = needle.WORDS - 10
    rounds: int = 1
    skips: bool = False
    midway: float = 0.0
    terse: float = 0.0
    values: int = 4
    long: float = 0.0
    lone: float = 0.0
    packed: float = 0.35
    wide: float = 0.15
    span: int = 33_000


@dataclasses.dataclass
class _Item:
    phrases: list[list[int]]
    question: list[int]
    kinds: list[int]  # of the question's tokens

    @property
    def size(self) -> int:
        return sum(map(len, self.phrases)) + len(self.question)


class Generator:
    """Makes batches; equal seeds give equal batches.

    Args:
        essay: words for essays; long enough that slices rarely overlap.
    """

    def __init__(self, seed: int, essay: int = 300_000) -> None:
        self.rng = np.random.default_rng(seed)
        self._essay = needle.essay(self.rng, essay)

    def state(self) -> dict[str, object]:
        """State for `restore`, which continues with the next batch."""
        return dict(self.rng.bit_generator.state)

    def restore(self, state: dict[str, object]) -> None:
        self.rng.bit_generator.state = state

    def batch(self, size: int, length: int, mix: Mix) -> Batch:
        """The next `size` sequences of `length` tokens."""
        rows = [self._sequence(length + 1, mix) for _ in range(size)]
        tokens, kinds, positions = (np.array(part, dtype=np.int64) for part in zip(*rows, strict=True))
        targets, kinds = tokens[:, 1:], kinds[:, 1:]
        return Batch(tokens[:, :-1], targets, kinds, positions[:, :-1])

    def _sequence(self, length: int, mix: Mix) -> tuple[list[int], list[int], np.ndarray]:
        layout = self.rng.random()
        if layout < mix.counting:
            tokens, kinds, breaks = self._counting(length, mix)
        elif layout < mix.counting + mix.dense:
            tokens, kinds, breaks = self._dense(length, mix)
        else:
            tokens, kinds, breaks = self._haystack(length, mix)
        positions = np.arange(length)
        breaks = [at for at in breaks if at < length]
        if len(breaks) > 4 and self.rng.random() < mix.pose:
            cuts = self.rng.choice(breaks, int(self.rng.integers(1, 5)))
            total = (mix.span - length) * self.rng.random()
            for cut, skip in zip(cuts, (self.rng.dirichlet(np.ones(len(cuts))) * total).astype(int), strict=True):
                positions[cut:] += skip
        return tokens[:length], kinds[:length], positions

    def _words(self, size: int) -> tuple[list[int], list[int]]:
        start = int(self.rng.integers(0, len(self._essay) - size))
        return self._essay[start : start + size], [NONE] * min(size, 12) + [WORD] * (size - 12)

    def _noise(self, size: int) -> tuple[list[int], list[int]]:
        start = int(self.rng.integers(0, len(needle.SENTENCE)))
        sentence = needle.SENTENCE[start:] + needle.SENTENCE * (size // len(needle.SENTENCE) + 1)
        return list(sentence[:size]), [NONE] * size

    def _items(self, budget: int, mix: Mix, asked: float) -> list[_Item]:
        """Items to state and ask for, in at most `budget` tokens; a share `asked` of the facts has a question."""
        rng = self.rng
        items: list[_Item] = []
        # Only some sequences have long keys and values (RULER's uuids), so that number and order of facts vary.
        width = int(rng.choice([needle.WORD_KEY, needle.UUID_KEY], p=[0.8, 0.2]))
        size = int(rng.choice([1, 2, needle.NUMBER, 5, needle.UUID], p=[0.15, 0.15, 0.4, 0.15, 0.15]))
        if rng.random() < mix.wide:
            width, size = needle.UUID_KEY, needle.UUID
        elif mix.terse and rng.random() < mix.terse:
            width, size = needle.WORD_KEY, 1
        elif mix.long and rng.random() < mix.long:
            width, size = needle.WORD_KEY, needle.UUID
        shares = rng.dirichlet(mix.families)
        keys = needle.draw_keys(rng, min(2048, mix.keys * (mix.keys - 1)), width, mix.keys)
        names = (needle.FIRST_VAR + rng.permutation(needle.VARS)).tolist()
        starts = (needle.FIRST_VALUE + rng.permutation(needle.VALUES)).tolist()
        while budget > 12 and len(keys) > mix.many + 2:
            family = int(rng.choice(4, p=shares))
            if family == 3 and (len(names) < 6 or not starts):
                family = 0
            if family == 3:
                item = self._chain(names, starts, mix.midway)
            else:
                count = 1 if family == 0 else int(rng.integers(2, (mix.many if family == 1 else mix.values) + 1))
                own = [keys.pop() for _ in range(count if family == 1 else 1)]
                values = needle.draw_values(rng, count, size, apart=family == 2)
                pairs = list(zip(own if family == 1 else own * count, values, strict=True))
                phrases = [needle.fact(key, value) for key, value in pairs]
                kind = MULTI if family == 2 else FACT_VALUE
                question = needle.ask(own)
                if rng.random() < asked:
                    kinds = [NONE] * len(question) + [ECHO]
                    kinds += ([ECHO] * width + [kind] * size + [ECHO]) * count
                    item = _Item(phrases, question + needle.answer(pairs), kinds)
                else:
                    item = _Item(phrases, [], [])
            budget -= item.size
            if budget >= 0:
                items.append(item)
        return items

    def _chain(self, names: list[int], starts: list[int], midway: float) -> _Item:
        hops = int(self.rng.integers(2, 6))
        value, chain = starts.pop(), [names.pop() for _ in range(min(hops, len(names)))]
        links = [needle.link(source, target) for source, target in zip([value, *chain], chain, strict=False)]
        if midway and len(chain) > 1 and self.rng.random() < midway:
            first = int(self.rng.integers(0, len(chain) - 1))
            value, chain = chain[first], chain[first + 1 :]
        question = [needle.ASK_CHAIN, value, needle.ANSWER, value, *chain, needle.END]
        return _Item(links, question, [NONE, NONE, ECHO, ECHO, *[CHAIN] * len(chain), ECHO])

    def _dense(self, length: int, mix: Mix) -> tuple[list[int], list[int], list[int]]:
        rng = self.rng
        gap = float(rng.choice([0, 0, 1, 4]))
        events: list[tuple[float, list[int], list[int]]] = []
        for item in self._items(int(length / (1 + gap / 6)), mix, asked=1.0):
            times = rng.random(len(item.phrases)) * 0.9
            events += [(t, phrase, [NONE] * len(phrase)) for t, phrase in zip(times, item.phrases, strict=True)]
            events.append((times.max() + (1 - times.max()) * rng.random() ** 2, item.question, item.kinds))
        events.sort(key=lambda event: event[0])
        return self._join(length, [event[1:] for event in events], rng.geometric(1 / (1 + gap), len(events) + 1) - 1)

    def _haystack(self, length: int, mix: Mix) -> tuple[list[int], list[int], list[int]]:
        rng = self.rng
        packed = rng.random() < mix.packed
        share = rng.uniform(0.8, 1.0) if packed else rng.uniform(0.05, 0.7)
        lone = bool(mix.lone) and rng.random() < mix.lone
        if lone:
            share = min(0.7, rng.uniform(60, 200) / length)
        # Facts without a question are distractors.
        items = self._items(int((length - 1) * share), mix, asked=rng.uniform(0.2, 1.0) if not packed else 0.4)
        phrases = [(phrase, [NONE] * len(phrase)) for item in items for phrase in item.phrases]
        questions = [(item.question, item.kinds) for item in items if item.question]
        phrases = [phrases[i] for i in rng.permutation(len(phrases))]
        questions = [questions[i] for i in rng.permutation(len(questions))]
        if lone:
            questions = questions[:1]
        used = sum(len(tokens) for tokens, _ in phrases + questions)
        room = max(0, length - 1 - used)
        cuts = np.sort(rng.integers(0, room + 1, len(phrases)))
        gaps = np.concatenate([np.diff(cuts, prepend=0, append=room), np.zeros(len(questions), int)])
        return self._join(length, phrases + questions, gaps, noise=rng.random() < (0.4 if lone else 0.2))

    def _counting(self, length: int, mix: Mix) -> tuple[list[int], list[int], list[int]]:
        """A list of words with a question for the frequent ones; the question may come again after the list has
        grown."""
        rng = self.rng
        common = rng.random() < 0.5
        order = rng.permutation(needle.WORDS)
        top = 10 if common else 4
        if common:
            weights = np.ones(needle.WORDS)
            weights[:top] = 10.0 if rng.random() < 0.7 else 20.0
            if mix.rare < needle.WORDS - top:
                weights[top + int(rng.integers(mix.rare, needle.WORDS - top + 1)) :] = 0.0
        else:
            weights = 1.0 / np.arange(1, needle.WORDS + 1) ** 2.0
        names = needle.FIRST_WORD + order
        asked = names[:10] if common else names[1:4]
        if not common:
            names[0] = needle.DOTS
        rounds = int(rng.integers(1, mix.rounds + 1))
        size = (length - 1) // rounds - (13 if common else 6)
        tokens, kinds, breaks = [needle.BOS], [NONE], []
        for _ in range(rounds):
            breaks += [len(tokens)] if not mix.skips else (len(tokens) + rng.integers(0, size, 8)).tolist()
            tokens += self._shuffled(names, self._counts(weights, size, top), asked)
            kinds += [NONE] * size
            if common:
                tokens += [needle.ASK_COMMON, needle.ANSWER, *sorted(asked.tolist()), needle.END]
                kinds += [NONE, ECHO, *[COMMON] * 10, ECHO]
            else:
                tokens += [needle.ASK_FREQUENT, needle.ANSWER, *sorted(asked.tolist()), needle.END]
                kinds += [NONE, ECHO, *[FREQUENT] * 3, ECHO]
        words, word_kinds = self._words(max(0, length - len(tokens)))
        return tokens + words, kinds + word_kinds, breaks

    def _counts(self, weights: np.ndarray, size: int, top: int) -> np.ndarray:
        """Count of every word by its weight; the first `top` words occur more often than all others."""
        counts = np.floor(weights * size / weights.sum()).astype(int)
        if top == 4:
            # In short lists, the shares of neighbours would round to equal counts.
            counts[1:top] = np.maximum(counts[1:top], 2)
            counts[top:] = np.minimum(counts[top:], counts[top - 1] - 1)
            counts[0] = max(0, size - counts[1:].sum())
            return counts
        rest = np.flatnonzero(weights[top:]) + top
        if len(rest) == 0:
            rest = np.arange(top)
        extra = size - counts.sum()
        each, more = divmod(extra, len(rest))
        counts[rest] += each
        counts[self.rng.permutation(rest)[:more]] += 1
        return counts

    def _shuffled(self, names: np.ndarray, counts: np.ndarray, asked: np.ndarray) -> list[int]:
        """Each word as often as `counts` says. In half of the long lists, no asked word stands at the ends, as in the
        benchmark."""
        if counts.sum() > 2 * (needle.LEAD + needle.TAIL) and self.rng.random() < 0.5:
            seen = {int(name): int(count) for name, count in zip(names, counts, strict=True) if count}
            with contextlib.suppress(ValueError):  # too few other words
                return needle.word_list(self.rng, seen, asked.tolist())
        return self.rng.permutation(np.repeat(names, counts)).tolist()

    def _join(
        self, length: int, events: list[tuple[list[int], list[int]]], gaps: np.ndarray, noise: bool = False
    ) -> tuple[list[int], list[int], list[int]]:
        """Events with `gaps` words before each, padded with words to `length`."""
        filler = self._noise if noise else self._words
        tokens, kinds, breaks = [needle.BOS], [NONE], []
        for (phrase, phrase_kinds), gap in zip(events, gaps, strict=False):
            if gap:
                words, word_kinds = filler(int(gap))
                tokens += words
                kinds += word_kinds[: len(words)]
            breaks.append(len(tokens))
            tokens += phrase
            kinds += phrase_kinds
            if len(tokens) >= length:
                break
        if len(tokens) < length:
            words, word_kinds = filler(length - len(tokens))
            tokens += words
            kinds += word_kinds[: len(words)]
        return tokens, kinds, breaks
