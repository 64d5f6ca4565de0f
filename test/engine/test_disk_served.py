"""KV in files: after a kill, a server finds its prompts again, with the same answers, and rejects corrupt files."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
import pytest
from server import Completion, Server

pytestmark = pytest.mark.full

NEW = 32
PROMPT, OTHER = cases.prompt(5000, 500), cases.prompt(3000, 501)
SPARSE = ("fixed:16:0.2", "sketch")


def start(folder: Path, log: Path, *flags: str, **options: Any) -> Server:
    config = json.dumps({"policy": "full", "disk": str(folder), "sketches": True, "canary": 1.0, **options})
    return Server("--chunked-prefill-size", "1024", *flags, fluxion=config, log=log)


def ask(server: Server, ids: list[int], policy: str = "full", **extra: Any) -> Completion:
    return server.generate(ids, NEW, policy, **extra)


def counted(server: Server, name: str) -> float:
    return sum(value for key, value in server.metrics().items() if key.startswith(f"fluxion_disk_{name}_pages_total"))


def settled(folder: Path) -> int:
    """Number of files, once writing has stopped."""
    count = -1
    while (now := len(pages(folder))) != count:
        count = now
        time.sleep(1)
    return count


def pages(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if len(path.name) == 64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def before(folder: Path, logs: Path) -> dict[str, Completion]:
    """Answers of a server that is then killed."""
    with start(folder, logs / "before.log") as server:
        answers = {policy: ask(server, PROMPT, policy) for policy in ("full", *SPARSE)}
        answers["other"] = ask(server, OTHER)
        answers["salted"] = ask(server, OTHER, extra_key="tenant")
        settled(folder)
        server.assert_clean()
        os.killpg(server.process.pid, signal.SIGKILL)
    assert all(len(answer.tokens) == NEW for answer in answers.values())
    return answers


@pytest.fixture(scope="module")
def server(before: dict[str, Completion], folder: Path, logs: Path) -> Iterator[Server]:
    # The pool cannot hold two of the prompts.
    with start(folder, logs / "after.log", host_tokens=6400) as server:
        yield server
        server.assert_clean()
        server.assert_sound()


def test_a_killed_server_has_its_prompts_again(server: Server, before: dict[str, Completion]) -> None:
    full = ask(server, PROMPT)
    assert full.cached >= 4900 and full.tokens == before["full"].tokens and full.logprobs == before["full"].logprobs
    for policy in SPARSE:
        assert ask(server, PROMPT, policy).tokens == before[policy].tokens, "metadata and sketches are what they were"
    assert counted(server, "read") == full.cached / 16 and counted(server, "refused") == 0


def test_what_had_to_make_room_comes_back(server: Server, before: dict[str, Completion]) -> None:
    for _ in range(2):
        other, full = ask(server, OTHER), ask(server, PROMPT)
        assert other.cached >= 2900 and other.tokens == before["other"].tokens
        assert full.cached >= 4900 and full.tokens == before["full"].tokens


def test_a_flush_empties_the_pool_and_not_the_disk(server: Server, before: dict[str, Completion]) -> None:
    server.flush()
    server.assert_idle()
    again = ask(server, PROMPT)
    assert again.cached >= 4900 and again.tokens == before["full"].tokens


def test_tenants_have_their_own(server: Server, before: dict[str, Completion]) -> None:
    server.flush()
    assert ask(server, OTHER, extra_key="stranger").cached == 0
    salted = ask(server, OTHER, extra_key="tenant")
    assert salted.cached >= 2900 and salted.tokens == before["salted"].tokens


def test_a_corrupt_file_is_computed_again(server: Server, before: dict[str, Completion], folder: Path) -> None:
    settled(folder)
    for path in pages(folder):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    refused = counted(server, "refused")
    server.flush()  # this process also forgets which files it has seen
    answer = ask(server, PROMPT)
    assert answer.cached == 0 and answer.tokens == before["full"].tokens
    assert counted(server, "refused") > refused and "is not what was written; it is computed again" in server.log()
    assert len(ask(server, OTHER).tokens) == NEW
    settled(folder)
    server.flush()
    again = ask(server, PROMPT)
    assert again.cached >= 4900 and again.tokens == before["full"].tokens


def test_two_ranks(logs: Path, tmp_path: Path) -> None:
    """Each rank has files of its own heads; KV that only one of them has is computed again by both."""
    answers = []
    for life in range(2):
        server = Server(
            "--tp", "2", "--chunked-prefill-size", "1024",
            fluxion=json.dumps({"policy": "full", "disk": str(tmp_path)}), log=logs / f"ranks{life}.log",
            env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        )  # fmt: skip
        with server:
            answers.append(ask(server, PROMPT))
            settled(tmp_path)
            if life:
                server.flush()
                for path in sorted(pages(tmp_path))[: len(pages(tmp_path)) // 8]:
                    path.unlink()
                answers.append(ask(server, PROMPT))
            server.assert_clean()
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2
    first, restarted, half = answers
    assert restarted.cached >= 4900 and half.cached < 4900
    assert first.tokens == restarted.tokens == half.tokens
