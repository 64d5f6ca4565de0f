"""A server with the option `canary` ends requests that read corrupt host memory, and only those, with a message.

The policy `rot` of a request (`test/plugins`) flips a bit of the request's own KV while it decodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cases
import pytest
from policy_example import search_path
from server import PLUGINS, Completion, Server

pytestmark = pytest.mark.full

NEW = 32
ROTTEN = cases.prompt(1200, 400)
SOUND = [cases.prompt(1100, 401), cases.prompt(900, 402)]
SENTENCE = "KV in host memory is not what was written there (layer 1, KV head 0, page "


@pytest.fixture(scope="module")
def server(logs: Path) -> Iterator[Server]:
    with Server(
        fluxion=json.dumps({"policy": "full", "canary": 1.0}),
        env={"PYTHONPATH": search_path(PLUGINS)}, log=logs / "canary.log",
    ) as server:  # fmt: skip
        yield server
        server.assert_idle()


def ask(server: Server, ids: list[int], new: int = NEW, **custom: Any) -> Completion:
    params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True, "custom_params": custom}
    return server.generate(ids, new, sampling_params=params)


def reason(answer: Completion) -> str:
    """The reason of its end, in any of SGLang's forms."""
    return json.dumps(answer.raw)


def counted(server: Server, name: str) -> float:
    return sum(value for key, value in server.metrics().items() if key.startswith(f"fluxion_{name}_total"))


def test_who_reads_it_ends_and_the_others_go_on(server: Server) -> None:
    wanted = [ask(server, ids).tokens for ids in SOUND]
    rotten = ask(server, ROTTEN).tokens
    assert len(rotten) == NEW and counted(server, "canary_checks") > 1000
    assert counted(server, "canary_mismatches") == 0
    assert len(ask(server, cases.filler(20, 1), 1, fluxion_check=True).tokens) == 1, "all is as it was written"
    server.flush()
    with ThreadPoolExecutor(3) as pool:
        failing = pool.submit(ask, server, ROTTEN, fluxion_policy="rot")
        answers = list(pool.map(lambda ids: ask(server, ids), SOUND))
    assert [answer.tokens for answer in answers] == wanted
    assert SENTENCE in reason(failing.result()) and counted(server, "canary_mismatches") >= 1
    # The corrupt page stays in the tree with the prompt. Every request that reads it is ended, until the cache is
    # emptied.
    assert SENTENCE in reason(ask(server, ROTTEN))
    whole = reason(ask(server, cases.filler(20, 1), 1, fluxion_check=True))
    assert SENTENCE in whole
    server.flush()
    assert ask(server, ROTTEN).tokens == rotten
    assert [ask(server, ids).tokens for ids in SOUND] == wanted
