"""Two requests with the same id on two tokenizer processes, which do not know of each other."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cases
import pytest
import requests
from server import PATIENCE_S, Server

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def server(logs: Path) -> Iterator[Server]:
    config = '{"policy": "full", "host_tokens": 20000}'
    with Server("--tokenizer-worker-num", "2", fluxion=config, log=logs / "twins.log") as server:
        yield server
        server.assert_clean()


def post(server: Server, rid: str, seed: int) -> requests.Response:
    params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    body: dict[str, Any] = {"rid": rid, "input_ids": cases.filler(60, seed), "sampling_params": params}
    with requests.Session() as session:  # a separate connection, which either process may accept
        return session.post(server.url + "/generate", json=body, timeout=PATIENCE_S)


def test_each_gets_an_answer_and_others_their_own(server: Server) -> None:
    want = [post(server, uuid.uuid4().hex, seed).json()["text"] for seed in range(4)]
    for attempt in range(4):
        names = [f"twin-{attempt}"] * 8 + [uuid.uuid4().hex for _ in range(4)]
        with ThreadPoolExecutor(len(names)) as pool:
            answers = list(pool.map(post, [server] * len(names), names, [0, 1, 2, 3] * 3))
        assert {answer.status_code for answer in answers[:8]} <= {200, 400, 500}
        assert [answer.json()["text"] for answer in answers[8:]] == want
    assert [post(server, uuid.uuid4().hex, seed).json()["text"] for seed in range(4)] == want
