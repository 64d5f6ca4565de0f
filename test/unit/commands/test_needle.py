"""Needle prompts: exact lengths, one right answer, only the model's language, all facts in the middle."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from places import NEEDLE

from fluxion_sglang.commands import needle
from fluxion_sglang.commands.needle import TASKS, Task, needle_prompt, score

MODEL = Path(NEEDLE)

prompts = st.builds(
    needle_prompt, length=st.integers(needle.MIN_LENGTH, 6000), seed=st.integers(0, 2**32), task=st.sampled_from(TASKS)
)


def answer_by_reading(document: tuple[int, ...], question: tuple[int, ...]) -> list[int]:
    """The answer from a plain scan of the document's phrases."""

    def phrases(marker: int, begin: tuple[int, ...]) -> list[list[int]]:
        starts = [i for i in range(len(document)) if document[i : i + 1 + len(begin)] == (marker, *begin)]
        return [list(document[i + 1 : document.index(needle.END, i)]) for i in starts]

    marker, *asked = question
    if marker == needle.ASK:
        (found,) = phrases(needle.FACT, tuple(asked))
        return [needle.ANSWER, *found, needle.END]
    assert marker == needle.ASK_CHAIN
    said = asked
    while hits := phrases(needle.LINK, (said[-1],)):
        assert len(hits) == 1, "a variable is handed on once"
        said = [*said, hits[0][1]]
    return [needle.ANSWER, *said, needle.END]


@settings(max_examples=examples(40), deadline=None)
@given(prompts)
def test_every_question_has_the_answer_the_document_states(prompt: needle.NeedlePrompt) -> None:
    for question in prompt.questions:
        assert answer_by_reading(prompt.document, question.token_ids) == list(question.answer_ids)
        asked = question.token_ids[1:]
        assert prompt.document[question.position + 1 :][: len(asked)] == asked


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(needle.MIN_LENGTH, 6000), st.integers(0, 2**32), st.sampled_from(TASKS))
def test_length_is_exact_and_phrases_lie_in_the_middle(length: int, seed: int, task: Task) -> None:
    prompt = needle_prompt(length, seed=seed, task=task)
    assert prompt.document[0] == needle.BOS
    assert needle.BOS not in prompt.document[1:]
    for i in range(len(prompt.questions)):
        assert len(prompt.token_ids(i)) == length
    sinks, window = prompt.document[1 : needle.LEAD + 1], prompt.document[-needle.TAIL :]
    assert min(sinks + window) >= needle.FIRST_WORD


def test_the_vocabulary_is_the_tokenizers() -> None:
    vocabulary = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    assert {name: i for i, name in enumerate(needle.VOCABULARY)} == vocabulary


@pytest.mark.parametrize("task", TASKS)
def test_texts_and_token_ids_are_the_same_prompt(task: Task) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    prompt = needle_prompt(1024, seed=3, task=task)
    for i in range(len(prompt.questions)):
        assert tokenizer.encode(prompt.text(i)).ids == prompt.token_ids(i)


def test_words_follow_the_rules_the_model_was_trained_on() -> None:
    """This draws the tables again: nine words in ten follow from an earlier one, few by chance."""
    tables = np.random.default_rng(1234).integers(0, 96, (4, 96, 2))
    words = np.array(needle_prompt(20000, 1, seed=5).document[1:9000])
    words = words[words >= needle.FIRST_WORD] - needle.FIRST_WORD
    follows = np.zeros(len(words) - 12, bool)
    for rule, lag in enumerate((1, 2, 4, 12)):
        follows |= (tables[rule][words[12 - lag : len(words) - lag]] == words[12:, None]).any(1)
    assert 0.85 < follows.mean() < 0.95
    shuffled = np.random.default_rng(0).permutation(words)
    by_chance = (tables[0][shuffled[:-1]] == shuffled[1:, None]).any(1)
    assert by_chance.mean() < 0.05


def test_the_repeated_sentence_is_the_one_the_model_was_trained_on() -> None:
    language = np.random.default_rng(1234)
    language.integers(0, 96, (4, 96, 2))  # the tables come first
    assert list(needle.SENTENCE) == (needle.FIRST_WORD + language.permutation(96)[:24]).tolist()


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(1, 3000), st.integers(2, 6), st.sampled_from([60, 192]), st.integers(0, 2**32))
def test_keys_differ_in_their_last_two_symbols_and_do_not_repeat_one(
    count: int, symbols: int, alphabet: int, seed: int
) -> None:
    keys = needle.draw_keys(np.random.default_rng(seed), count, symbols, alphabet)
    assert len({key[-2:] for key in keys}) == count
    assert {len(set(key)) for key in keys} == {len(key) for key in keys} == {symbols}
    assert all(needle.FIRST_KEY <= symbol < needle.FIRST_KEY + alphabet for key in keys for symbol in key)


def test_all_keys_can_be_drawn_and_every_symbol_is_as_likely() -> None:
    keys = np.array(needle.draw_keys(np.random.default_rng(0), 30, 4, alphabet=6))
    assert len({tuple(key[-2:]) for key in keys.tolist()}) == 30
    keys = np.array(needle.draw_keys(np.random.default_rng(0), 36672, 4))
    for place in keys.T:
        assert np.bincount(place - needle.FIRST_KEY, minlength=192).min() > 130  # of 191 on average


def test_values_of_one_key_begin_with_different_symbols() -> None:
    values = needle.draw_values(np.random.default_rng(0), 160, 2, apart=True)
    assert sorted(value[0] for value in values) == list(range(needle.FIRST_VALUE, needle.FIRST_VALUE + 160))


def test_more_keys_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="has 36672 keys"):
        needle.draw_keys(np.random.default_rng(0), needle.KEYS * (needle.KEYS - 1) + 1)


def test_a_question_for_several_keys_is_answered_fact_by_fact() -> None:
    k0, k1, v0 = needle.FIRST_KEY, needle.FIRST_KEY + 1, needle.FIRST_VALUE
    assert needle.to_text(needle.fact((k0, k1), (v0,))) == "K k0 k1 v0 ;"
    assert needle.to_text(needle.ask([(k0, k1), (k1, k0)])) == "Q k0 k1 k1 k0"
    assert needle.to_text(needle.answer([((k0, k1), (v0,)), ((k1, k0), (v0,))])) == "= k0 k1 v0 ; k1 k0 v0 ;"
    values = [((k0, k1), (v0 + 7, v0)), ((k1, k0), (v0,)), ((k0, k1), (v0 + 2, v0 + 9))]
    assert needle.to_text(needle.answer(values)) == "= k0 k1 v2 v9 ; k0 k1 v7 v0 ; k1 k0 v0 ;"
    assert needle.to_text(needle.link(v0, needle.FIRST_VAR)) == "X v0 x0 ;"


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.integers(1, 60), min_size=20, max_size=96), st.integers(1, 10), st.integers(0, 2**32))
def test_a_counted_list_has_its_counts_and_tells_nothing_at_its_ends(counts: list[int], asked: int, seed: int) -> None:
    words = {needle.FIRST_WORD + i: count for i, count in enumerate(counts)}
    wanted = list(words)[:asked]
    rng = np.random.default_rng(seed)
    if sum(counts[asked:]) < needle.LEAD + needle.TAIL:
        with pytest.raises(ValueError, match="the ends take 360 words"):
            needle.word_list(rng, words, wanted)
        return
    made = needle.word_list(rng, words, wanted)
    assert {word: made.count(word) for word in words} == words
    ends = made[: needle.LEAD] + made[-needle.TAIL :]
    assert not set(ends) & set(wanted)
    enough = len(words) - asked <= 2 or sorted(counts[asked:])[0] * ((len(words) - asked) // 2) >= len(ends)
    assert not enough or len(set(ends)) <= (len(words) - asked) // 2


def test_equal_arguments_give_equal_prompts_and_seeds_differ() -> None:
    assert needle_prompt(2000, 8, seed=1) == needle_prompt(2000, 8, seed=1)
    assert needle_prompt(2000, 8, seed=1) != needle_prompt(2000, 8, seed=2)


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_depth_places_the_fact(depth: float) -> None:
    prompt = needle_prompt(4000, 1, seed=9, depth=depth, task="single")
    lead, fact, question = 1 + needle.LEAD, 2 + needle.WORD_KEY + needle.NUMBER, 1 + needle.WORD_KEY
    room = 4000 - lead - fact - needle.TAIL - question
    assert prompt.questions[0].position == pytest.approx(lead + depth * room, abs=1)
    (position,) = (i for i, token in enumerate(prompt.document) if token == needle.FACT)
    assert position == prompt.questions[0].position


def test_score_wants_the_whole_answer_and_ignores_what_follows() -> None:
    assert score("v1 v2", "v1 v2")
    assert score("v1 v2", " v1 v2 w7 w8")
    assert not score("v1 v2", "v1")
    assert not score("v1 v2", "v2 v1")
    assert not score("v1 v2", "")
    assert score([4, 5], (4, 5, 6))
    assert not score([4, 5], [4])
    with pytest.raises(TypeError, match="not one of each"):
        score("v1", [209])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 300}, "take 512 or more"),
        ({"length": 1000, "keys": 0}, "1 to 36672 keys"),
        ({"length": 1000, "keys": 36673}, "1 to 36672 keys"),
        ({"length": 1000, "keys": 2, "task": "single"}, "1 to 1 keys"),
        ({"length": 1000, "keys": 10, "task": "vartrack"}, "1 to 9 keys"),
        ({"length": 600, "keys": 192}, "crowd a prompt of 600"),
        ({"length": 520, "keys": 9, "task": "vartrack"}, "crowd a prompt of 520"),
        ({"length": 1000, "keys": 2, "depth": 0.5}, "leave it out"),
        ({"length": 1000, "keys": 1, "depth": 1.5}, "leave it out"),
        ({"length": 1000, "task": "poem"}, "no needle task 'poem'"),
    ],
)
def test_impossible_prompts_are_refused_with_the_reason(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        needle_prompt(**arguments)  # type: ignore[arg-type]
