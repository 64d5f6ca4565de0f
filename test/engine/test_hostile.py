"""Hostile and careless clients on a real server: what each is told, and that other requests are unaffected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
import pytest
import requests
import tiny_model
from server import PATIENCE_S, Completion, Server

pytestmark = pytest.mark.full

SPARSE = "streaming"
"""The server's policy."""
PROMPT = cases.filler(900, 91)
TURN = cases.filler(30, 92)


@pytest.fixture(scope="module")
def server(logs: Path) -> Iterator[Server]:
    options = {
        "policy": SPARSE,
        "request_policies": ["full", "lfps"],
        "record": str(logs / "hostile-samples"),
        "host_tokens": 20000,
    }
    with Server(
        "--enable-streaming-session", "--chunked-prefill-size", "256",
        model=tiny_model.build(logs / "tiny-model-hostile"), fluxion=json.dumps(options), log=logs / "hostile.log",
    ) as server:  # fmt: skip
        yield server
        server.assert_clean()


def ask(server: Server, ids: list[int], spec: str | None = None, new: int = 8, **extra: Any) -> Completion:
    params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True, "custom_params": extra.pop("custom", {})}
    params["custom_params"] |= {} if spec is None else {"fluxion_policy": spec}
    return server.generate(ids, new, sampling_params=params, **extra)


def refusal(server: Server, status: int, **body: Any) -> str:
    """The message of a refused request; afterwards the server answers others as before."""
    want = ask(server, PROMPT[:50]).tokens
    answer = requests.post(server.url + "/generate", json=body, timeout=PATIENCE_S)
    assert answer.status_code == status, answer.text
    sentence = str(answer.json()["error"]["message"])
    assert sentence.endswith(".") and "\n" not in sentence
    assert ask(server, PROMPT[:50]).tokens == want
    return sentence


@pytest.mark.parametrize(
    "body",
    [{"input_ids": []}, {"input_ids": [[]]}, {"input_ids": [PROMPT[:9], []]}, {"text": ""}, {"text": ["hello", ""]}],
    ids=str,
)
def test_a_prompt_without_a_token(server: Server, body: dict[str, Any]) -> None:
    sentence = refusal(server, 400, **body)
    assert "no tokens" in sentence or body == {"input_ids": []}, "SGLang has a sentence of its own for one of them"


@pytest.mark.parametrize("token", [-1, 32000, 2**31, 2**62])
def test_a_token_that_the_model_does_not_have(server: Server, token: int) -> None:
    assert f"token {token}," in refusal(server, 400, input_ids=[*PROMPT[:9], token])
    assert f"token {token}," in refusal(server, 400, input_ids=[PROMPT[:9], [token]])


@pytest.mark.parametrize("spec", ["psa:0.9999999:16:quest", "hgca:0", "lfps:1:1e-9:1e-9", "nonsense"])
def test_a_policy_that_the_operator_does_not_allow(server: Server, spec: str) -> None:
    params = {"max_new_tokens": 4, "custom_params": {"fluxion_policy": spec}}
    sentence = refusal(server, 400, input_ids=PROMPT[:99], sampling_params=params)
    assert 'use "full", "lfps", or leave it out.' in sentence


@pytest.mark.parametrize("wishes", [3, {"id": 0}, {"id": 0, "samples": [[0, [10**9]]]}], ids=str)
def test_wishes_that_cannot_be_recorded(server: Server, wishes: Any) -> None:
    params = {"max_new_tokens": 4, "custom_params": {"fluxion_record": wishes}}
    assert refusal(server, 400, input_ids=PROMPT[:99], sampling_params=params).startswith("fluxion_record is")


def test_full_is_full_after_a_sparse_answer(server: Server) -> None:
    """The next turn under `full` reuses the prompt only, and answers as without an earlier sparse answer."""
    server.flush()
    answer = ask(server, PROMPT, new=40).tokens
    conversation = PROMPT + answer + TURN
    again = ask(server, conversation, "full")
    assert len(PROMPT) - 16 <= again.cached <= len(PROMPT)
    server.flush()
    fresh = ask(server, conversation, "full")
    assert fresh.cached == 0 and fresh.tokens == again.tokens
    assert again.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)
    # Tokens decoded under `full` are exact, so every policy may reuse them.
    more = ask(server, conversation + fresh.tokens + TURN)
    assert more.cached >= len(conversation) - 16 + len(fresh.tokens) - 1


@pytest.mark.parametrize("second", ["full", None])
def test_a_session_does_not_mix_policies(server: Server, second: str | None) -> None:
    server.flush()
    opened = {"capacity_of_str_len": 100_000, "streaming": True}
    name = requests.post(server.url + "/open_session", json=opened, timeout=PATIENCE_S).json()

    def turn(ids: list[int], spec: str | None) -> Completion:
        return ask(server, ids, spec, 40, session_params={"id": name})

    first = turn(PROMPT, None)
    then = turn(TURN, second)
    requests.post(server.url + "/close_session", json={"session_id": name}, timeout=PATIENCE_S)
    kept = len(PROMPT) + 39
    assert then.cached == kept if second is None else then.cached <= len(PROMPT)
    if second is not None:
        server.flush()
        fresh = ask(server, PROMPT + first.tokens + TURN, second, 40)
        assert fresh.tokens == then.tokens and then.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)


def test_a_wrong_policy_costs_a_session_nothing(server: Server) -> None:
    server.flush()
    opened = {"capacity_of_str_len": 100_000, "streaming": True}
    name = requests.post(server.url + "/open_session", json=opened, timeout=PATIENCE_S).json()
    ask(server, PROMPT, None, 40, session_params={"id": name})
    params = {"max_new_tokens": 4, "custom_params": {"fluxion_policy": "ful"}}
    body = {"input_ids": TURN, "sampling_params": params, "session_params": {"id": name}}
    assert '"ful"' in refusal(server, 400, **body)
    then = ask(server, TURN, None, 8, session_params={"id": name})
    requests.post(server.url + "/close_session", json={"session_id": name}, timeout=PATIENCE_S)
    assert then.cached == len(PROMPT) + 39


def test_a_prompt_that_is_refused_is_computed_no_further(server: Server) -> None:
    server.flush()
    before = len(server.log())
    params = {"max_new_tokens": 4, "custom_params": {"fluxion_record": 3}}
    refusal(server, 400, input_ids=cases.filler(5000, 93), sampling_params=params)
    assert server.log()[before:].count("Prefill batch") <= 2 + 2, "of twenty, and of the two small prompts beside it"
