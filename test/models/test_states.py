"""A model with states on a real server: forks, aborts, retraction, eviction, flush; warm answers equal cold ones.

Three layers of the gated delta rule alternate with one of attention (Qwen 3.5). SGLang keeps a prefix's state at the
end of each chunk of 64 tokens, and every 256 tokens of an answer. Its leak check counts states like KV.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
import zoo
from engine.server import Completion, Server
from program import MARK
from test_models import DOCUMENT, GREEDY, OPTIONS, PROGRAM, prompt

pytestmark = pytest.mark.full

NEW = 40
POOL = 4096
LONG = 600
"""Tokens of an answer that crosses two positions where SGLang keeps its state."""
CUTS = (64, 777, 1024, 1027, 1300)
FORKS = [DOCUMENT[:cut] + prompt(60 + cut % 7, cut) for cut in CUTS]
"""Forks leave the document at the end of a chunk of states, inside one, at the end of a pass, and inside pages."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return zoo.build("qwen3.5", tmp_path_factory.mktemp("qwen3.5"))


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(
        "--chunked-prefill-size", "256", model=model, fluxion=json.dumps({"policy": "full", "host_tokens": POOL}),
        env={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"},
        log=tmp_path_factory.mktemp("logs") / "states.log",
    ) as server:  # fmt: skip
        yield server
        server.assert_clean()


@pytest.fixture(scope="module")
def cold(server: Server) -> list[Completion]:
    """The answers of an empty server."""
    found = []
    for ids in FORKS:
        server.flush()
        found.append(server.generate(ids, NEW))
        assert found[-1].cached == 0 and len(set(found[-1].tokens)) > 4
    return found


def assert_same(got: Completion, want: Completion) -> None:
    assert got.tokens == want.tokens, got.finish
    assert max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True)) < 1e-4


def test_warm_answers_equal_cold_ones(server: Server, cold: list[Completion]) -> None:
    server.flush()
    server.generate(DOCUMENT[:1400], 4)
    for cut, ids, want in zip(CUTS, FORKS, cold, strict=True):
        got = server.generate(ids, NEW)
        assert got.cached > 0 or cut < 256, "a state is there at the end of each pass"
        assert_same(got, want)


def test_together_with_retraction_and_eviction(server: Server, cold: list[Completion]) -> None:
    before = len(server.log())
    for _ in range(3):
        for got, want in zip(server.generate_many([(ids, NEW) for ids in FORKS]), cold, strict=True):
            assert_same(got, want)
    assert re.search(r"Testing retraction|Retract requests", server.log()[before:]), "nothing was retracted"


def test_a_second_turn_finds_the_first(server: Server, cold: list[Completion]) -> None:
    """The state comes from the decode of the first answer, after 1,024 tokens."""
    beginning = FORKS[1] + cold[1].tokens
    server.flush()
    first = server.generate(beginning, 300)
    assert len(beginning) < 1024 < len(beginning) + len(first.tokens)
    turn = beginning + first.tokens + prompt(100, 9)
    got = server.generate(turn, NEW)
    assert got.cached >= 1024
    server.flush()
    assert_same(got, server.generate(turn, NEW))


@pytest.mark.parametrize("when", [r"Prefill batch.*#pending-token: [1-9]", "Decode batch"])
def test_abort(server: Server, cold: list[Completion], when: str) -> None:
    server.flush()
    server.aborted(DOCUMENT, 400, when, f"abort-{when[:6]}")
    for ids, want in zip(FORKS[:2], cold, strict=False):
        assert_same(server.generate(ids, NEW), want)


def test_a_sparse_policy_answers(server: Server) -> None:
    assert len(server.generate(DOCUMENT, NEW, "fixed:16:0.25").tokens) == NEW


def test_a_long_answer_is_transformers(model: str) -> None:
    import torch

    asked = [{"input_ids": ids, "sampling_params": {**GREEDY, "max_new_tokens": LONG}} for ids in FORKS[:3]]
    options = {**OPTIONS, "model_path": model, "enable_fluxion": True}
    done = forked.run(str(PROGRAM), given=json.dumps({"options": options, "rounds": [asked]}))
    assert MARK in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.split(MARK)[1].splitlines()[0])["answers"]
    theirs = zoo.auto_class("qwen3.5").from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    for ids, one in zip(FORKS, found, strict=False):
        with torch.no_grad():
            want = theirs.generate(
                torch.tensor([ids]), max_new_tokens=LONG, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert one["ids"] == want[0, len(ids) :].tolist()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--fluxion-config", '{"disk": "DIR"}'], "disk does not work with this model"),
        (["--speculative-algorithm", "NGRAM"], "which does not go with speculative decoding"),
        (["--mamba-ssm-dtype", "bfloat16"], "leave --mamba-ssm-dtype out"),
    ],
    ids=["disk", "drafts", "types"],
)
def test_refusals_are_one_sentence(model: str, tmp_path: Path, words: list[str], says: str) -> None:
    words = [word.replace("DIR", str(tmp_path)) for word in words]
    command = ["-m", "sglang.launch_server", "--model-path", model, "--device", "cpu", "--enable-fluxion"]
    done = forked.run(*command, "--dtype", "float32", "--mem-fraction-static", "0.4", *words)
    assert done.returncode != 0 and says in done.stderr + done.stdout and "Traceback" not in done.stderr
