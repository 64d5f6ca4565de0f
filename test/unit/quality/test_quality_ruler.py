"""RULER as a suite: its tasks in both languages, seeds, scores."""

from __future__ import annotations

import hashlib
import json

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from places import python
from quality_tokenizer import TextCodec

from fluxion_quality import suite_named
from fluxion_quality.base import Codec, Sample, Task
from fluxion_quality.ruler import Ruler
from fluxion_quality.ruler_definitions import DEFINITIONS, DEPTHS, Draw
from fluxion_sglang.commands.codec import SymbolicCodec

LANGUAGES: list[Codec] = [SymbolicCodec(), TextCodec()]
TASKS = [(codec, task) for codec in LANGUAGES for task in Ruler().tasks(codec, None) if not task.name.startswith("qa")]


def fingerprint() -> str:
    """Digest of samples of every task in both languages."""
    samples = [task.samples(codec, 1500, 2, seed=7) for codec, task in TASKS]
    return hashlib.sha256(repr(samples).encode()).hexdigest()


def test_the_suite_has_thirteen_tasks_and_eleven_in_symbols() -> None:
    suite = suite_named("ruler")
    assert (suite.name, suite.lengths) == ("ruler", True)
    symbolic, text = ([task.name for task in suite.tasks(codec, None)] for codec in LANGUAGES)
    assert text == list(DEFINITIONS)
    assert len(text) == 13
    assert symbolic == text[:11]
    assert text[11:] == ["qa_1", "qa_2"]


def test_there_are_forty_depths_from_end_to_end() -> None:
    assert len(set(DEPTHS)) == len(DEPTHS) == 40
    assert (min(DEPTHS), max(DEPTHS)) == (0, 100)


@settings(max_examples=examples(30))
@given(st.sampled_from(TASKS), st.integers(0, 2**40), st.integers(1, 3))
def test_equal_arguments_give_equal_samples_and_others_give_others(
    pair: tuple[Codec, Task], seed: int, count: int
) -> None:
    codec, task = pair
    samples = task.samples(codec, 1500, count, seed)
    assert len(samples) == count
    assert samples == task.samples(codec, 1500, count, seed)
    assert samples == task.samples(codec, 1500, count + 1, seed)[:count], "more samples leave the first as they are"
    prompts = {sample.prompt for sample in samples}
    assert len(prompts) == len({sample.id for sample in samples}) == count
    assert prompts.isdisjoint(sample.prompt for sample in task.samples(codec, 1500, count, seed + 1))


def test_another_process_makes_the_same_samples() -> None:
    code = "import test_quality_ruler as t; print(t.fingerprint())"
    assert python("-c", code, env={"PYTHONHASHSEED": "12345"}).stdout.strip() == fingerprint()


def test_facts_about_a_sample_are_json() -> None:
    for codec, task in TASKS:
        (sample,) = task.samples(codec, 1500, 1, 0)
        assert json.loads(json.dumps(dict(sample.meta)))["length"] == 1500


@pytest.mark.parametrize(
    ("output", "score"),
    [
        ("= k1 k2 v3 v80 v7 ; k1 k2 v1 v2 v3 ;", 1.0),
        ("v1 v2 v3 v80 v7", 1.0),  # a symbol may match two references
        ("= k1 k2 v3 v80 v7 ;", 0.5),
        ("= k1 k2 v3 v80 v70 ;", 0.0),
        ("v3 v80", 0.0),
        ("v13 v80 v7", 0.0),
        ("v3 ; v80 v7", 0.0),
        ("", 0.0),
    ],
)
def test_symbolic_references_are_runs_of_whole_symbols(output: str, score: float) -> None:
    task = next(task for codec, task in TASKS if codec.symbolic and task.name == "niah_multivalue")
    sample = Sample("0", (1,), ("v3 v80 v7", "v1 v2 v3"), 25)
    assert task.score(sample, output) == score


def test_turns_go_round_a_shuffle_that_lengths_share() -> None:
    turns = [Draw(3, "qa_1", length, index).turn(20) for length in (1000, 2000) for index in range(40)]
    assert turns[:40] == turns[40:]
    assert sorted(turns[:20]) == list(range(20)) == sorted(turns[20:40])
    assert turns[:20] != list(range(20))
