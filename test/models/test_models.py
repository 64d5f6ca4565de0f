"""Families of models, and what SGLang can do with one besides greedy text: the same answers with the flag as without.

Not part of `make test`, as every test starts SGLang twice: `make test-models`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo
from program import MARK

PROGRAM = Path(__file__).with_name("program.py")
# A pool that holds everything, chunks that cut prompts anywhere but at their ends.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_running_requests": 8,
    "max_total_tokens": 16384,
    "chunked_prefill_size": 1024,
    "mem_fraction_static": 0.4,
    "log_level": "error",
}
GREEDY = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
Rounds = list[list[dict[str, Any]]]
Answers = list[dict[str, Any]]


def prompt(length: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 259, length)]


DOCUMENT = prompt(2600, 1)
PROMPTS = [prompt(40, 2), DOCUMENT[:1500] + prompt(100, 3), DOCUMENT[:1500] + prompt(37, 4)]
CONVERSATIONS: Rounds = [
    [{"input_ids": ids, "sampling_params": GREEDY} for ids in PROMPTS],
    [{"input_ids": DOCUMENT, "sampling_params": GREEDY}],
]
"""Three prompts of which two share a document, then one that finds most of it in the radix tree."""


def answers(options: dict[str, Any], rounds: Rounds) -> tuple[str, Answers]:
    """The attention backend that was used, and what it answered, all rounds in one list."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps({"options": options, "rounds": rounds}),
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert MARK in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.split(MARK)[1].splitlines()[0])
    return found["backend"], found["answers"]


def check_same(model: str, rounds: Rounds, **more: Any) -> Answers:
    """Asks plain SGLang and Fluxion, in two processes at once; returns what both answered."""
    plain = {**OPTIONS, "model_path": model, **more}
    fluxion = {**plain, "enable_fluxion": True, "fluxion_config": '{"policy": "full"}'}
    with ThreadPoolExecutor(2) as pool:
        (theirs, want), (ours, got) = pool.map(answers, (plain, fluxion), (rounds, rounds))
    assert (theirs, ours) == ("torch_native", "fluxion")
    for one, other in zip(got, want, strict=True):
        assert one["ids"] == other["ids"] and one["text"] == other["text"]
        assert max(abs(a - b) for a, b in zip(one["logprobs"], other["logprobs"], strict=True)) < 1e-3
    return got


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_family(family: str, tmp_path: Path) -> None:
    found = check_same(zoo.build(family, tmp_path), CONVERSATIONS)
    assert all(len(set(one["ids"])) > 4 for one in found), "an answer that repeats itself shows little"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return zoo.build("llama", tmp_path_factory.mktemp("llama"))


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_grammars(llama: str, backend: str) -> None:
    ways = [{"json_schema": json.dumps(SCHEMA)}, {"regex": "(ab|cd){20}"}, {}]
    asked = [
        {"input_ids": ids, "sampling_params": {**GREEDY, "ignore_eos": False, "max_new_tokens": 64, **way}}
        for ids, way in zip(PROMPTS, ways, strict=True)
    ]
    found = check_same(llama, [asked], grammar_backend=backend)
    assert len(found[1]["text"]) == 40 and set(found[1]["text"]) <= set("abcd")


def test_sampling(llama: str) -> None:
    """Penalties, a bias, stop words: what comes after attention sees the same logits."""
    ways = [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3, "min_new_tokens": 20},
        {"logit_bias": {"40": 5.0}, "stop": ["!!"]},
    ]
    asked = [
        {"input_ids": ids, "sampling_params": {**GREEDY, "ignore_eos": False, **way}}
        for ids, way in zip(PROMPTS, ways, strict=True)
    ]
    check_same(llama, [asked], sampling_backend="pytorch")
