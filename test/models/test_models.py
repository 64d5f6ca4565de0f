"""Families of models, and SGLang's features besides greedy text: the same answers with and without the flag.

The models have no predictor, so the flag alone is exact. Every test starts SGLang twice.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import zoo
from program import MARK

pytestmark = pytest.mark.full

PROGRAM = Path(__file__).with_name("program.py")
# A pool that holds everything, and chunks shorter than long prompts.
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_running_requests": 8, "max_total_tokens": 16384,
    "chunked_prefill_size": 1024, "mem_fraction_static": 0.4, "log_level": "error",
}  # fmt: skip
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
"""Three prompts, two of which share 1,500 tokens of a document; then the document, which finds those cached."""
SMALL: dict[str, Any] = {**OPTIONS, "max_total_tokens": 4096}
PRESSURE: Rounds = [
    [{"input_ids": prompt(700, seed), "sampling_params": {**GREEDY, "max_new_tokens": 100}} for seed in range(10, 15)]
]
"""More than a small pool holds, so that cached prefixes are evicted."""
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "25"}
"""SGLang retracts a request in every 25th pass."""


def answers(options: dict[str, Any], rounds: Rounds, **env: str) -> tuple[str, Answers]:
    """The attention backend in use, and the answers of all rounds in one list."""
    done = forked.run(str(PROGRAM), given=json.dumps({"options": options, "rounds": rounds}), **env)
    assert MARK in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    assert "run without graphs" not in done.stderr, done.stderr[-4000:]
    found = json.loads(done.stdout.split(MARK)[1].splitlines()[0])
    return found["backend"], found["answers"]


def check_same(model: str, rounds: Rounds, **more: Any) -> Answers:
    """Ask plain SGLang and Fluxion, in two processes at once; return the common answers."""
    plain = {**OPTIONS, "model_path": model, **more}
    fluxion = {**plain, "enable_fluxion": True}
    with ThreadPoolExecutor(2) as pool:
        (theirs, want), (ours, got) = pool.map(answers, (plain, fluxion), (rounds, rounds))
    assert (theirs, ours) == ("torch_native", "fluxion")
    for one, other in zip(got, want, strict=True):
        assert one["ids"] == other["ids"] and one["text"] == other["text"]
        assert all(abs(a - b) < 1e-3 for a, b in zip(one["logprobs"], other["logprobs"], strict=True))
    return got


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_family(family: str, tmp_path: Path) -> None:
    found = check_same(zoo.build(family, tmp_path), CONVERSATIONS)
    assert all(len(set(one["ids"])) > 4 for one in found), "an answer that repeats itself shows little"
    assert found[-1]["cached"] == 1500 // 16 * 16


@pytest.mark.parametrize("family", [*zoo.BY_TRANSFORMERS, *zoo.VISION_LANGUAGE])
def test_family_that_plain_sglang_does_not_serve(family: str, tmp_path: Path) -> None:
    import torch

    folder = zoo.build(family, tmp_path)
    rounds = CONVERSATIONS + PRESSURE + CONVERSATIONS[1:]
    # Gemma 2's Python code creates a tensor in every step.
    log = {} if family == "gemma2" else {"log_level": "info"}
    backend, found = answers({**SMALL, **log, "model_path": folder, "enable_fluxion": True}, rounds, **RETRACT)
    assert backend == "fluxion" and found[3]["cached"] == 1500 // 16 * 16
    assert sum(one["retractions"] for one in found) > 0 and found[-1]["cached"] < 1488
    model = zoo.auto_class(family).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for asked, one in zip([request for requests in rounds for request in requests], found, strict=True):
        ids, new = torch.tensor([asked["input_ids"]]), asked["sampling_params"]["max_new_tokens"]
        with torch.no_grad():
            want = model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert one["ids"] == want[0, ids.shape[1] :].tolist()
        assert len(set(one["ids"])) > 4, "an answer that repeats itself shows little"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return zoo.build("llama", tmp_path_factory.mktemp("llama"))


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,9}$"}, "age": {"enum": [7, 42]}},
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
    assert found[0]["text"].split()[0].startswith("{"), "the model may write more space than its answer has room for"
    assert len(found[1]["text"]) == 40 and set(found[1]["text"]) <= set("abcd")
    assert found[2]["finish"] == {"type": "length", "length": 64}, "no grammar, no end"


def test_sampling(llama: str) -> None:
    """Penalties, a bias and stop words see the same logits.

    With overlapped schedules SGLang's penalties count a token of the answer late, at a time that depends on the passes.
    """
    f = 40  # the letter F in the tokenizer of bytes
    ways = [{"repetition_penalty": 1.3}, {"frequency_penalty": 0.7}, {"logit_bias": {f: 100.0}, "stop": ["FFF"]}]
    asked, plain = (
        [
            {"input_ids": PROMPTS[i], "sampling_params": {**GREEDY, **(way if options else {})}}
            for i, way in enumerate(ways)
        ]
        for options in (True, False)
    )
    found = check_same(llama, [asked, plain], sampling_backend="pytorch", disable_overlap_schedule=True)
    assert found[2]["ids"] == [f] * 3 and found[2]["finish"] == {"type": "stop", "matched": "FFF"}
    assert any(found[i]["ids"] != found[i + 3]["ids"] for i in range(2)), "penalties that change nothing show nothing"
