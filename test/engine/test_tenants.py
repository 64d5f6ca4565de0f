"""Tenants of one server give their requests a salt or a key; with the same prompts they share nothing.

Sharing goes by page: cached KV, its metadata, and families of requests that are read together
(`test/unit/native/test_families.py`). Without cache hits and shared tasks, no page belongs to another tenant. Memory of
policies goes by row; here requests of several tenants constantly reuse one another's rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cases
import pytest
from server import Completion, Server

pytestmark = pytest.mark.full

NEW = 48
PROMPT = cases.prompt(1500, 300)
OTHER = cases.prompt(900, 301)
ROWS = 4


@pytest.fixture(scope="module")
def server(logs: Path) -> Iterator[Server]:
    flags = ("--max-running-requests", str(ROWS))
    with Server(*flags, fluxion=json.dumps({"policy": "anchor"}), log=logs / "tenants.log") as server:
        yield server
        server.assert_clean()


def together(server: Server, *requests: dict[str, Any], ids: list[int] = PROMPT) -> list[Completion]:
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda extra: server.generate(ids, NEW, **extra), requests))


def shared(server: Server) -> float:
    found = [value for name, value in server.metrics().items() if name.startswith("fluxion_shared_tasks")]
    assert found
    return sum(found)


def test_another_key_shares_nothing_and_the_same_one_does(server: Server) -> None:
    before = shared(server)
    tenants = [{"extra_key": "a"}, {"extra_key": "b"}, {"cache_salt": "a"}, {}]
    answers = together(server, *tenants)
    assert [answer.cached for answer in answers] == [0, 0, 0, 0] and shared(server) == before
    assert len({tuple(answer.tokens) for answer in answers}) == 1 and len(answers[0].tokens) == NEW
    # Repeat: each finds its own prefix, and no task reads two tenants together.
    again = together(server, *tenants)
    assert all(answer.cached > 1000 for answer in again) and shared(server) == before
    for tenant in tenants[0], tenants[2]:
        together(server, tenant, tenant)
        assert shared(server) > before, "without which the test would say nothing"
        before = shared(server)


def test_rows_go_from_tenant_to_tenant(server: Server) -> None:
    """An anchor is measured for a row's request. There are more tenants than rows, with other prompts in between."""
    server.flush()
    want = server.generate(PROMPT, NEW).tokens
    other = server.generate(OTHER, NEW).tokens
    with ThreadPoolExecutor(6) as pool:
        asked = [(PROMPT, want) if i % 2 else (OTHER, other) for i in range(18)]
        got = list(pool.map(lambda i: server.generate(asked[i][0], NEW, extra_key=f"tenant {i}"), range(18)))
    for (_, expected), answer in zip(asked, got, strict=True):
        assert answer.cached == 0 and answer.tokens == expected
