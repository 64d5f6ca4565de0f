"""RULER in the symbolic language, against the paper's definition: every prompt is parsed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxion_quality.base import Sample, Task
from fluxion_quality.ruler import Ruler
from fluxion_quality.ruler_symbolic import shares
from fluxion_sglang.commands import needle
from fluxion_sglang.commands.codec import SymbolicCodec

CODEC = SymbolicCodec()
TASKS = {task.name: task for task in Ruler().tasks(CODEC, None)}
NEEDLES = [name for name in TASKS if name.startswith("niah")]
WORD_COUNTS = ["cwe", "fwe"]
SHORTEST = {"cwe": 800}

# haystack, symbols of a key and of a value, keys, values per key, keys per question: the paper's table of tasks, in the
# sizes of the language.
SHAPES = {
    "niah_single_1": ("repeat", 2, 3, 1, 1, 1),
    "niah_single_2": ("essay", 2, 3, 1, 1, 1),
    "niah_single_3": ("essay", 2, 8, 1, 1, 1),
    "niah_multikey_1": ("essay", 2, 3, 4, 1, 1),
    "niah_multikey_2": ("needle", 2, 3, None, 1, 1),
    "niah_multikey_3": ("needle", 4, 8, None, 1, 1),
    "niah_multivalue": ("essay", 2, 3, 1, 4, 1),
    "niah_multiquery": ("essay", 2, 3, 4, 1, 4),
}

lengths = st.integers(needle.MIN_LENGTH, 6000)
seeds = st.integers(0, 2**40)


@dataclass
class Parsed:
    """A prompt, parsed without knowledge of its generation."""

    words: list[int] = field(default_factory=list)
    facts: list[tuple[list[int], int]] = field(default_factory=list)  # what is between K and ;, and where K is
    links: list[tuple[int, int, int]] = field(default_factory=list)  # source, target, where X is
    marker: int = 0
    asked: list[int] = field(default_factory=list)
    document: int = 0  # tokens


def parse(prompt: Sequence[int]) -> Parsed:
    parsed = Parsed()
    assert prompt[0] == needle.BOS
    i = 1
    while i < len(prompt):
        token = prompt[i]
        if token in (needle.FACT, needle.LINK):
            end = prompt.index(needle.END, i)
            if token == needle.FACT:
                parsed.facts.append((list(prompt[i + 1 : end]), i))
            else:
                assert end == i + 3
                parsed.links.append((prompt[i + 1], prompt[i + 2], i))
            i = end + 1
        elif token in (needle.ASK, needle.ASK_CHAIN, needle.ASK_COMMON, needle.ASK_FREQUENT):
            parsed.marker, parsed.asked, parsed.document = token, list(prompt[i + 1 :]), i
            return parsed
        else:
            assert needle.FIRST_WORD <= token < needle.FIRST_WORD + needle.WORDS or token == needle.DOTS
            parsed.words.append(token)
            i += 1
    raise AssertionError("a prompt ends in a question")


def one(name: str, length: int, seed: int) -> Sample:
    """A sample. For cwe, the length is at least the minimum that leaves room for other words at both ends."""
    (sample,) = TASKS[name].samples(CODEC, max(length, SHORTEST.get(name, 0)), 1, seed)
    return sample


def right_answer(sample: Sample) -> str:
    return str(sample.meta["answer"])


def test_all_tasks_but_those_with_documents_exist() -> None:
    assert list(TASKS) == [*SHAPES, "vt", "cwe", "fwe"]


@settings(max_examples=examples(60))
@given(st.sampled_from(list(TASKS)), lengths, seeds)
def test_prompt_and_answer_have_the_wanted_length_and_the_answer_the_languages_form(
    name: str, length: int, seed: int
) -> None:
    sample = one(name, length, seed)
    answer = right_answer(sample).split()
    assert len(sample.prompt) + sample.max_new_tokens == max(length, SHORTEST.get(name, 0))
    assert sample.max_new_tokens == len(answer)
    assert answer[0] == "=" and answer[-1] == ";"
    assert TASKS[name].score(sample, right_answer(sample)) == 1
    assert TASKS[name].score(sample, "=") == 0
    assert sample.document == ""


@settings(max_examples=examples(80))
@given(st.sampled_from(NEEDLES), lengths, seeds)
def test_needles_are_as_many_and_as_large_as_defined(name: str, length: int, seed: int) -> None:
    haystack, key_size, value_size, keys, values, queries = SHAPES[name]
    sample = one(name, length, seed)
    parsed = parse(sample.prompt)
    assert {len(fact) for fact, _ in parsed.facts} == {key_size + value_size}
    counts = Counter(tuple(fact[:key_size]) for fact, _ in parsed.facts)
    assert set(counts.values()) == {values}
    if keys is None:
        assert len(parsed.words) < key_size + value_size + 2, "no filler, but for less than a fact"
        assert len(counts) == (parsed.document - 1) // (key_size + value_size + 2)
    else:
        assert len(counts) == keys
    assert len({tuple(fact[key_size:]) for fact, _ in parsed.facts}) == len(parsed.facts)
    assert sample.meta["haystack"] == haystack
    if haystack == "repeat":
        assert parsed.words == [needle.SENTENCE[i % 24] for i in range(len(parsed.words))]

    assert parsed.marker == needle.ASK
    asked = [tuple(parsed.asked[i : i + key_size]) for i in range(0, len(parsed.asked), key_size)]
    assert len(asked) == len(set(asked)) == queries
    said = [fact for key in asked for fact, _ in sorted(parsed.facts) if tuple(fact[:key_size]) == key]
    assert len({fact[key_size] for fact in said}) == len(said) or values == 1
    assert all(len(set(key)) == key_size for key in counts)
    assert sample.references == tuple(needle.to_text(fact[key_size:]) for fact in said)
    assert len(set(sample.references)) == queries * values
    assert right_answer(sample) == needle.to_text([needle.ANSWER, *(s for fact in said for s in (*fact, needle.END))])
    places = {tuple(fact): at for fact, at in parsed.facts}
    assert sample.meta["positions"] == [places[tuple(fact)] for fact in said]


@settings(max_examples=examples(60))
@given(st.sampled_from([name for name in TASKS if name not in WORD_COUNTS]), lengths, seeds)
def test_what_is_asked_for_is_in_neither_sinks_nor_window(name: str, length: int, seed: int) -> None:
    sample = one(name, length, seed)
    parsed = parse(sample.prompt)
    # A haystack of facts covers the ends; only the fact in question matters.
    wanted = set(sample.meta["positions"])
    sizes = [(at, len(fact) + 2) for fact, at in parsed.facts] + [(at, 4) for *_, at in parsed.links]
    assert wanted <= {at for at, _ in sizes}
    for at, size in sizes:
        if at in wanted or SHAPES.get(name, ("",))[0] != "needle":
            assert at > needle.LEAD
            assert at + size <= parsed.document - needle.TAIL


@settings(max_examples=examples(40))
@given(lengths, seeds)
def test_a_chain_has_four_hops_in_order_among_the_repeated_sentence(length: int, seed: int) -> None:
    sample = one("vt", length, seed)
    parsed = parse(sample.prompt)
    assert parsed.marker == needle.ASK_CHAIN and not parsed.facts
    assert parsed.words == [needle.SENTENCE[i % 24] for i in range(len(parsed.words))]
    value, *variables = [parsed.links[0][0], *(target for _, target, _ in parsed.links)]
    assert [source for source, _, _ in parsed.links] == [value, *variables[:-1]]
    assert parsed.asked == [value] and needle.FIRST_VALUE <= value < needle.FIRST_VALUE + needle.VALUES
    assert len(set(variables)) == len(variables) == 5
    assert sample.references == tuple(needle.VOCABULARY[i] for i in variables)
    assert right_answer(sample) == needle.to_text([needle.ANSWER, value, *variables, needle.END])


@settings(max_examples=examples(40))
@given(lengths, seeds)
def test_ten_words_are_ten_times_as_common_as_the_others(length: int, seed: int) -> None:
    sample = one("cwe", length, seed)
    parsed = parse(sample.prompt)
    assert (parsed.marker, parsed.asked) == (needle.ASK_COMMON, [])
    counts = Counter(parsed.words)
    assert len(counts) == needle.WORDS
    common = {word for word, _ in counts.most_common(10)}
    assert tuple(needle.VOCABULARY[word] for word in sorted(common)) == sample.references
    assert len({counts[word] for word in common}) == 1, "no common word is rarer than another"
    others = [counts[word] for word in counts if word not in common]
    assert max(others) - min(others) <= 1
    expected = 10 * sum(others) / len(others)
    assert abs(counts[common.pop()] - expected) <= 1 + 0.05 * expected


@settings(max_examples=examples(40))
@given(lengths, seeds)
def test_word_frequencies_follow_zeta_and_the_first_is_dots(length: int, seed: int) -> None:
    sample = one("fwe", length, seed)
    parsed = parse(sample.prompt)
    assert (parsed.marker, parsed.asked) == (needle.ASK_FREQUENT, [])
    (first, most), *ranks = Counter(parsed.words).most_common(5)
    assert first == needle.DOTS
    assert tuple(needle.VOCABULARY[word] for word in sorted(word for word, _ in ranks[:3])) == sample.references
    counts = [most, *(count for _, count in ranks)]
    assert sorted(set(counts), reverse=True) == counts, "no ties that would leave the answer open"
    weights = 1 / np.arange(1, needle.WORDS + 1) ** 2.0
    assert np.allclose(counts, len(parsed.words) * weights[:5] / weights.sum(), atol=1)


@settings(max_examples=examples(60))
@given(st.sampled_from(WORD_COUNTS), lengths, seeds)
def test_words_that_are_asked_for_stand_in_the_middle_only(name: str, length: int, seed: int) -> None:
    sample = one(name, length, seed)
    document = parse(sample.prompt)
    asked = set(sample.references)
    ends = document.words[: needle.LEAD] + document.words[-needle.TAIL :]
    assert not asked & set(needle.to_text(ends).split())
    middle = needle.to_text(document.words[needle.LEAD : -needle.TAIL]).split()
    assert asked <= set(middle)


@pytest.mark.parametrize("name", WORD_COUNTS)
@pytest.mark.parametrize("length", [1024, 4096, 16384])
def test_sinks_and_window_do_not_tell_the_answer(name: str, length: int) -> None:
    """Count the words that a policy without a middle sees: RULER's words are everywhere, which gives almost all
    answers."""
    task = TASKS[name]
    samples = task.samples(CODEC, length, 20, seed=0)

    def score(sample: Sample, seen: Sequence[int]) -> float:
        counts = Counter(word for word in seen if word >= needle.FIRST_WORD)
        best = counts.most_common(len(sample.references))
        return task.score(sample, needle.to_text([needle.ANSWER, *(word for word, _ in best), needle.END]))

    assert np.mean([score(sample, sample.prompt[:64] + sample.prompt[-271:]) for sample in samples]) == 0
    assert np.mean([score(sample, sample.prompt) for sample in samples]) == 1

    def unseen(sample: Sample, seen: Sequence[int]) -> float:
        others = sorted({*range(needle.FIRST_WORD, needle.FIRST_WORD + needle.WORDS)} - set(seen))
        guess = np.random.default_rng(0).permutation(others)[: len(sample.references)].tolist()
        return task.score(sample, needle.to_text([needle.ANSWER, *guess, needle.END]))

    # Here, absence is informative: a word that is invisible at the ends is more likely one of the answer's.
    guessed = float(np.mean([unseen(sample, sample.prompt[:64] + sample.prompt[-271:]) for sample in samples]))
    assert guessed < {"cwe": 0.4, "fwe": 0.1}[name]


@given(st.integers(0, 100_000), st.integers(1, 300), st.floats(0.1, 4))
def test_shares_add_up_and_never_increase(total: int, ranks: int, alpha: float) -> None:
    counts = shares(total, ranks, alpha)
    assert sum(counts) == total and len(counts) == ranks
    assert counts == sorted(counts, reverse=True)


def task_with(questions: int, name: str) -> Task:
    return next(task for task in Ruler(questions=questions).tasks(CODEC, None) if task.name == name)


@pytest.mark.parametrize("name", ["niah_multikey_1", "niah_multikey_2", "niah_multikey_3"])
def test_questions_about_one_document_share_all_but_the_question(name: str) -> None:
    samples = task_with(3, name).samples(CODEC, 1200, 7, seed=5)
    assert len({sample.id for sample in samples}) == 7
    assert [len([s for s in samples if s.document == d]) for d in dict.fromkeys(s.document for s in samples)] == [
        3,
        3,
        1,
    ]
    by_document: dict[str, set[tuple[int, ...]]] = {}
    for sample in samples:
        assert sample.document
        assert len(sample.prompt) + sample.max_new_tokens == 1200
        by_document.setdefault(sample.document, set()).add(sample.prompt[: parse(sample.prompt).document])
    assert all(len(documents) == 1 for documents in by_document.values())
    first = [sample for sample in samples if sample.document == samples[0].document]
    assert len({tuple(sample.meta["keys"]) for sample in first}) == 3


@pytest.mark.parametrize("name", [name for name in TASKS if "multikey" not in name])
def test_other_documents_have_one_question(name: str) -> None:
    samples = task_with(4, name).samples(CODEC, 1200, 3, seed=5)
    assert {sample.document for sample in samples} == {""}
    assert len({sample.prompt for sample in samples}) == 3


def test_depths_cover_the_document() -> None:
    samples = TASKS["niah_single_2"].samples(CODEC, 2000, 200, seed=0)
    positions = [sample.meta["positions"][0] for sample in samples]
    assert len(set(positions)) == 40
    assert min(positions) == 1 + needle.LEAD
    assert max(positions) == 2000 - 7 - 3 - needle.TAIL - 7


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match="niah_single_1 needs a length of 512 tokens or more, not 511"):
        one("niah_single_1", 511, 0)
    with pytest.raises(ValueError, match=r"cwe does not fit into 700 tokens: the ends take 360 words .* only 316"):
        TASKS["cwe"].samples(CODEC, 700, 1, 0)
    with pytest.raises(ValueError, match="needs a length"):
        TASKS["vt"].samples(CODEC, None, 1, 0)
    with pytest.raises(ValueError, match="1 question or more, not 0"):
        Ruler(questions=0)
