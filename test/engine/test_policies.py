"""Policies of requests through the server: one batch mixes them, an illegal one fails only its own request, and the
audit file records what each read."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import requests
import tiny_model
from server import PATIENCE_S, Completion, Server

from fluxion_sglang.scoring import audit_file as audit

pytestmark = pytest.mark.full

LENGTH, NEW = 1800, 48
SPECS = [
    None, "fixed:16:0.1", "oracle:0.05", "streaming", "oracle:1", "fixed:64:1", "hgca:0.5", "hgca:0", "psa", "lfps:0.1",
]  # fmt: skip


def sampling(policy: Any, new: int = NEW) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    return params if policy is None else {**params, "custom_params": {"fluxion_policy": policy}}


def ask(server: Server, ids: list[int], policy: Any, new: int = NEW) -> Completion:
    return server.generate(ids, new, sampling_params=sampling(policy, new))


def ask_together(server: Server, questions: list[tuple[list[int], Any]]) -> list[Completion]:
    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(lambda question: ask(server, *question), questions))


@pytest.fixture(scope="module")
def model(logs: Path) -> str:
    return tiny_model.build(logs / "tiny-model-policies")


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return cases.filler(LENGTH, 5)


class TestOwnPolicies:
    """The server's policy is `full`, and it keeps an audit."""

    @pytest.fixture(scope="class")
    def log(self, logs: Path) -> Path:
        return logs / "audit.npy"

    @pytest.fixture(scope="class")
    def server(self, model: str, logs: Path, log: Path) -> Iterator[Server]:
        with Server(
            "--chunked-prefill-size", "1024", model=model,
            fluxion=f'{{"policy": "full", "host_tokens": 40000, "audit": "{log}"}}', log=logs / "policies.log",
        ) as server:  # fmt: skip
            yield server
            server.assert_clean()

    @pytest.fixture(scope="class")
    def alone(self, server: Server, prompt: list[int]) -> dict[str | None, list[int]]:
        """The answer of each policy on an otherwise idle server."""
        return {spec: ask(server, prompt, spec).tokens for spec in SPECS}

    def test_policies_differ_and_agree_as_they_should(self, alone: dict[str | None, list[int]]) -> None:
        assert all(len(tokens) == NEW for tokens in alone.values())
        assert alone["oracle:1"] == alone["fixed:64:1"] == alone["hgca:0"] == alone[None]
        # The first token comes from the prefill, which is exact under every policy.
        assert {tokens[0] for tokens in alone.values()} == {alone[None][0]}
        assert alone["streaming"] != alone[None]

    def test_a_batch_of_all_of_them(
        self, server: Server, prompt: list[int], alone: dict[str | None, list[int]]
    ) -> None:
        for _ in range(2):
            together = ask_together(server, [(prompt, spec) for spec in SPECS])
            assert [c.tokens for c in together] == [alone[spec] for spec in SPECS]
            assert all(c.cached >= LENGTH - 16 for c in together), "one prefill serves all policies"

    @pytest.mark.parametrize("wrong", ["fixed:16", 7])
    def test_an_illegal_one_ends_its_request_alone(
        self, server: Server, prompt: list[int], alone: dict[str | None, list[int]], wrong: Any
    ) -> None:
        specs = [None, wrong, "streaming", "oracle:0.05"]
        # Another document, so that the refused request has a chunked prefill of its own.
        others = cases.filler(LENGTH, 6)
        got = ask_together(server, [(others if spec == wrong else prompt, spec) for spec in specs])
        for spec, completion in zip(specs, got, strict=True):
            if spec != wrong:
                assert completion.tokens == alone[spec]
        assert not got[1].tokens
        message = got[1].raw["error"]["message"]
        assert "policy" in message and message.endswith(".") and "\n" not in message

        answer = requests.post(
            server.url + "/generate", json={"input_ids": others, "sampling_params": sampling(wrong)}, timeout=PATIENCE_S
        )
        assert answer.status_code == 400
        assert ask(server, others, "oracle:1").tokens == ask(server, others, None).tokens

    def test_what_a_policy_decoded_is_nobody_elses_prefix(
        self, server: Server, prompt: list[int], alone: dict[str | None, list[int]]
    ) -> None:
        server.flush()
        ask(server, prompt, "streaming")
        assert ask(server, prompt + alone["streaming"], None, 1).cached <= LENGTH
        server.flush()
        ask(server, prompt, None)
        assert ask(server, prompt + alone[None], None, 1).cached > LENGTH, "the server's own policy goes on as ever"

    def test_not_even_its_first_token_is(self, server: Server, prompt: list[int]) -> None:
        """The first decoded token completes a page. With overlap scheduling it is decoded before the prompt is in the
        tree, and may be the last one by length or by a stop token."""
        head = prompt[:799]
        (first, *_) = answer = ask(server, head, None, 3).tokens
        ends: list[dict[str, Any]] = [sampling("streaming", new) for new in (1, 2, 3)]
        ends.append({**sampling("streaming", 8), "ignore_eos": False, "stop_token_ids": [first]})
        for params in ends:
            server.flush()
            ended = server.generate(head, 0, sampling_params=params)
            assert ended.tokens[:1] == [first]
            assert ask(server, head + ended.tokens + prompt, None, 1).cached <= len(head), params
        server.flush()
        ask(server, head, None, 3)
        assert ask(server, head + answer + prompt, None, 1).cached > len(head)

    def test_openai_endpoints_carry_it(
        self, server: Server, prompt: list[int], alone: dict[str | None, list[int]]
    ) -> None:
        def complete(policy: Any) -> requests.Response:
            body = {"model": "m", "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
            body["custom_params"] = {"fluxion_policy": policy}
            return requests.post(server.url + "/v1/completions", json=body, timeout=PATIENCE_S)

        texts = {spec: complete(spec).json()["choices"][0]["text"] for spec in ("full", "streaming")}
        assert texts["full"] == ask(server, prompt, None).raw["text"]
        assert texts["streaming"] == ask(server, prompt, "streaming").raw["text"]
        refused = complete("x")
        assert refused.status_code == 400 and "policy 'x' is not one" in refused.text

    def test_the_audit_says_what_was_read(self, server: Server, prompt: list[int], log: Path) -> None:
        _, offset = audit.read(log)
        read = server.metrics()
        ask_together(server, [(prompt, spec) for spec in SPECS])
        steps, after = audit.read(log, offset)
        assert after == log.stat().st_size
        assert max(len(set(step["policy"])) for step in steps) >= 3, "no batch mixed them"
        records = np.concatenate(steps)
        pair, heads = 2 * 32 * 4, 4  # the model: one KV head of 32 elements, float32; four query heads
        assert (records["kv_bytes"] == records["middle"].astype(np.int64) * pair).all()
        fractions = {}
        for spec in SPECS:
            mine = records[records["policy"] == (spec or "full").encode()]
            # One decode step for each token but the first; SGLang may run one more and discard it.
            assert NEW - 1 <= len(mine[mine["layer"] == 0]) <= NEW + 1
            assert len(mine[mine["layer"] == 0]) == len(mine[mine["layer"] == 1])
            assert sorted(set(mine["length"]))[: NEW - 1] == list(range(LENGTH + 1, LENGTH + NEW))
            fractions[spec] = mine["tile_bytes"] / mine["kv_bytes"]
            if spec in (None, "oracle:1", "fixed:64:1", "hgca:0"):
                assert (fractions[spec] == 1).all() and mine["error"].max() < 1e-5
            else:
                assert mine["error"].max() > 1e-3
        assert (fractions["streaming"] == 0).all()
        assert (fractions["oracle:0.05"] <= heads * (0.05 + 1 / 1300)).all() and (fractions["oracle:0.05"] > 0.05).all()
        assert (fractions["fixed:16:0.1"] > 0.1).all() and (fractions["fixed:16:0.1"] < 0.5).all()
        scanned = {spec.decode() for spec in set(records["policy"][records["metadata_bytes"] > 0])}
        assert scanned == {"fixed:16:0.1", "psa"}, "exact scores need no metadata, and neither does reading everything"
        now = server.metrics()
        names = ("fluxion_tile_bytes_total", "fluxion_shared_tile_bytes_total", "fluxion_shared_tasks_total")
        tiles, shared, together = (now[name] - read[name] for name in names)
        assert tiles + shared == records["tile_bytes"].sum(), "the counters leave out what only the audit read"
        assert together > 0, "requests with one prompt read it together"


class TestTensorParallel:
    """Two ranks agree on the policies, and both end the same requests."""

    @pytest.fixture(scope="class")
    def server(self, logs: Path) -> Iterator[Server]:
        model = tiny_model.build(logs / "tiny-model-tp2", kv_heads=2)
        with Server(
            "--tp", "2", "--chunked-prefill-size", "1024", model=model,
            fluxion='{"host_tokens": 20000, "workers": 1, "policy": "fixed:16:0.05"}',
            env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, log=logs / "policies-tp2.log",
        ) as server:  # fmt: skip
            yield server
            server.assert_clean()

    def test_policies_mix_and_illegal_ones_end(self, server: Server, prompt: list[int]) -> None:
        specs = ["full", "fixed:64:1", "streaming", "y", None]
        alone = {spec: ask(server, prompt, spec).tokens for spec in specs}
        assert alone["full"] == alone["fixed:64:1"] != alone["streaming"] and alone["y"] == []
        together = ask_together(server, [(prompt, spec) for spec in specs])
        assert [c.tokens for c in together] == [alone[spec] for spec in specs]
        assert "policy 'y' is not one" in together[3].raw["error"]["message"]
