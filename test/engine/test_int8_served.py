"""A server whose host pool stores KV in 8 bits: the bundled model still answers its questions, also under eviction and
retraction. `full` is exact with respect to the stored KV, so a cache hit reads the same KV as the request that wrote
it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import cases
import pytest
from server import Completion, Server

from fluxion_sglang.commands.needle import needle_prompt

pytestmark = pytest.mark.full


def asked(length: int, count: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Prompts about one document with their right answers."""
    prompt = needle_prompt(length, 16, seed)
    return [([*prompt.document, *q.token_ids], list(q.answer_ids)) for q in prompt.questions[:count]]


def answers(server: Server, questions: list[tuple[list[int], list[int]]]) -> list[Completion]:
    """Ask all at once, each for as many tokens as the right answer has."""
    return server.generate_many([(ids, len(answer)) for ids, answer in questions])


def wrong(got: list[Completion], questions: list[tuple[list[int], list[int]]]) -> int:
    return sum(done.tokens != answer for done, (_, answer) in zip(got, questions, strict=True))


class TestAServer:
    @pytest.fixture(scope="class")
    def server(self, logs: Path) -> Iterator[Server]:
        config = {"policy": "full", "host_tokens": 65536, "kv_dtype": "int8", "canary": 1.0}
        with Server(
            "--chunked-prefill-size", "1024", fluxion=json.dumps(config), dtype="bfloat16", log=logs / "int8.log"
        ) as server:
            yield server
            server.assert_clean()

    def test_less_memory_holds_as_many_tokens(self, server: Server) -> None:
        line = re.search(r"Fluxion: host pool of (\d+) tokens, ([\d.]+) GiB", server.log())
        # In bfloat16 the pool takes 0.18 GiB: 4 layers of 2 heads of 64.
        assert line and line[1] == "65536" and float(line[2]) < 0.14

    @pytest.mark.parametrize("length", [600, 4000])
    def test_questions_are_answered(self, server: Server, length: int) -> None:
        questions = asked(length, 8)
        server.flush()
        assert wrong(answers(server, questions), questions) <= 1  # the model itself may miss one
        # Repeat, with the whole document from the cache.
        again = answers(server, questions)
        assert min(done.cached for done in again) > length - 100
        assert wrong(again, questions) <= 1

    def test_a_policy_of_a_request(self, server: Server) -> None:
        questions = asked(4000, 4, seed=1)
        for spec in ("fixed:16:0.25", "streaming"):
            for ids, _ in questions:
                assert len(server.generate(ids, 8, spec).tokens) == 8
        assert server.metrics().get("fluxion_canary_mismatches_total", 0) == 0

    def test_a_long_generation(self, server: Server) -> None:
        assert len(server.generate(cases.prompt(600, 3), 500).tokens) == 500


class TestPressure:
    """A host pool of 2,400 tokens with forced retractions: prefixes are evicted, and requests restart from the tree."""

    @pytest.fixture(scope="class")
    def server(self, logs: Path) -> Iterator[Server]:
        config = {"policy": "full", "host_tokens": 2400, "kv_dtype": "int8", "canary": 1.0}
        with Server(
            "--chunked-prefill-size", "256", "--enable-mixed-chunk", fluxion=json.dumps(config), dtype="bfloat16",
            env={"SGLANG_TEST_RETRACT": "1"}, log=logs / "int8-pressure.log",
        ) as server:  # fmt: skip
            yield server
            server.assert_clean()

    def test_eviction_and_retraction(self, server: Server) -> None:
        groups = [asked(620, 3, seed) for seed in range(5)]
        questions = [question for group in groups for question in group]
        for _ in range(2):
            assert wrong(answers(server, questions), questions) <= 1
            assert all(len(done.tokens) == 40 for done in server.generate_many(cases.crowd()))
        assert re.search(r"Testing retraction|Retract requests", server.log()), "nothing was retracted"
        metrics = server.metrics()
        assert sum(value for name, value in metrics.items() if "evicted_tokens_total" in name) > 0
        assert sum(value for name, value in metrics.items() if name.startswith("fluxion_canary_mismatches")) == 0
