"""Needle prompts: exact lengths, one right answer, the model's own language, all of it in the middle."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxion_sglang import needle
from fluxion_sglang.needle import TASKS, Task, needle_prompt, score

MODEL = Path(__file__).parents[2] / "models" / "needle"

prompts = st.builds(
    needle_prompt,
    length=st.integers(needle.MIN_LENGTH, 6000),
    seed=st.integers(0, 2**32),
    task=st.sampled_from(TASKS),
)


def answer_by_reading(document: tuple[int, ...], question: tuple[int, ...], size: int) -> list[int]:
    """What the statements say, found by a plain scan of the document."""
    marker, asked = question
    facts = {
        needle.KEY_ASK: needle.KEY_FACT,
        needle.VAR_ASK: needle.VAR_FACT,
        needle.COPY_ASK: needle.COPY_FACT,
    }
    fact = facts[marker]
    said: list[int] = []
    while len(said) < size:
        hits = [i for i in range(len(document) - 1) if document[i] == fact and document[i + 1] == asked]
        assert len(hits) == 1, "a key is stated once"
        if fact != needle.VAR_FACT:
            return list(document[hits[0] + 2 : hits[0] + 2 + size])
        asked = document[hits[0] + 2]
        said.append(asked)
    return said


@settings(max_examples=40, deadline=None)
@given(prompts)
def test_every_question_has_the_answer_the_document_states(prompt: needle.NeedlePrompt) -> None:
    for question in prompt.questions:
        found = answer_by_reading(prompt.document, question.token_ids, len(question.answer_ids))
        assert found == list(question.answer_ids)
        assert prompt.document[question.position + 1] == question.token_ids[1]


@settings(max_examples=40, deadline=None)
@given(st.integers(needle.MIN_LENGTH, 6000), st.integers(0, 2**32), st.sampled_from(TASKS))
def test_length_is_exact_and_statements_lie_in_the_middle(length: int, seed: int, task: Task) -> None:
    prompt = needle_prompt(length, seed=seed, task=task)
    assert prompt.document[0] == needle.BOS
    assert needle.BOS not in prompt.document[1:]
    for i in range(len(prompt.questions)):
        assert len(prompt.token_ids(i)) == length
    sinks, window = prompt.document[1:64], prompt.document[length - 2 - 272 :]
    assert min(sinks + window) >= needle.FIRST_FILLER


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


def test_filler_follows_the_rules_the_model_was_trained_on() -> None:
    """The tables are drawn again here: nine words in ten follow from an earlier one, and few by chance."""
    tables = np.random.default_rng(1234).integers(0, 160, (4, 160, 2))
    words = np.array(needle_prompt(20000, 1, seed=5).document[1:9000])
    words = words[words >= needle.FIRST_FILLER] - needle.FIRST_FILLER
    follows = np.zeros(len(words) - 12, bool)
    for rule, lag in enumerate((1, 2, 4, 12)):
        follows |= (tables[rule][words[12 - lag : len(words) - lag]] == words[12:, None]).any(1)
    assert 0.85 < follows.mean() < 0.95
    shuffled = np.random.default_rng(0).permutation(words)
    by_chance = (tables[0][shuffled[:-1]] == shuffled[1:, None]).any(1)
    assert by_chance.mean() < 0.05


def test_equal_arguments_give_equal_prompts_and_seeds_differ() -> None:
    assert needle_prompt(2000, 8, seed=1) == needle_prompt(2000, 8, seed=1)
    assert needle_prompt(2000, 8, seed=1) != needle_prompt(2000, 8, seed=2)


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_depth_places_the_statement(depth: float) -> None:
    prompt = needle_prompt(4000, 1, seed=9, depth=depth, task="single")
    assert prompt.questions[0].position == pytest.approx(73 + depth * (4000 - 73 - 288 - 6), abs=1)


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
        ({"length": 1000, "keys": 0}, "1 to 192 keys"),
        ({"length": 1000, "keys": 193}, "1 to 192 keys"),
        ({"length": 1000, "keys": 2, "task": "single"}, "1 to 1 keys"),
        ({"length": 1000, "keys": 10, "task": "vartrack"}, "1 to 9 keys"),
        ({"length": 600, "keys": 192}, "crowd a prompt of 600"),
        ({"length": 600, "keys": 12, "task": "copy"}, "crowd a prompt of 600"),
        ({"length": 1000, "keys": 2, "depth": 0.5}, "leave it out"),
        ({"length": 1000, "keys": 1, "depth": 1.5}, "leave it out"),
        ({"length": 1000, "task": "poem"}, "no needle task 'poem'"),
    ],
)
def test_impossible_prompts_are_refused_with_the_reason(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        needle_prompt(**arguments)  # type: ignore[arg-type]
