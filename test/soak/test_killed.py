"""Processes of a server are killed, stopped and asked to end, under twenty streams.

Clients get an error or an end within seconds, no process is left, and /health is right as far as SGLang knows: its
scheduler answers /health without the detokenizer. If only the detokenizer dies, SGLang waits a minute for core dumps of
CUDA before it ends; the servers here skip that wait.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import requests
from engine import cases, tiny_model
from engine.server import PATIENCE_S, Server
from soak.watch import title

pytestmark = pytest.mark.full

STREAMS = 20
SHORT, LONG = 400, 4000
"""Tokens of an answer that should end, and of one that should not. The pool has room for all of them at once."""
SECONDS = 20
"""Seconds until clients know and processes are gone. SGLang checks its processes once a second."""
HEALTH_S = 45
"""Seconds until /health has an answer: SGLang waits 20 seconds for a sign of life."""
PROCESSES = ("main", "sglang::scheduler", "sglang::detokenizer")


class Stream(threading.Thread):
    """A client that reads an answer token by token.

    Attributes:
        pieces: number received. end: the finish reason of the server, or the exception.
    """

    def __init__(self, url: str, seed: int, new: int) -> None:
        super().__init__(daemon=True)
        self.pieces, self.end, self._url = 0, "", url
        params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        self._body = {"input_ids": cases.filler(400, seed), "sampling_params": params, "stream": True}
        self.start()

    def run(self) -> None:
        last = "nothing"
        try:
            with requests.post(self._url + "/generate", json=self._body, stream=True, timeout=PATIENCE_S) as reply:
                for line in reply.iter_lines():
                    if line.startswith(b"data: {"):
                        data = json.loads(line.removeprefix(b"data: "))
                        self.pieces += 1
                        last = str(data.get("meta_info", {}).get("finish_reason") or data.get("error"))
            self.end = last
        except (requests.RequestException, ValueError) as error:
            self.end = type(error).__name__


@contextmanager
def served(folder: Path, name: str, fluxion: str | None = '{"host_tokens": 131072}') -> Iterator[Server]:
    model = tiny_model.build(folder / "model", kv_heads=2)
    log = folder / f"{name}.log"
    env = {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
    with Server("--max-running-requests", "24", model=model, fluxion=fluxion, env=env, log=log, spawn=True) as server:
        yield server


def streams(server: Server, new: int) -> list[Stream]:
    """Twenty streams that have begun."""
    found = [Stream(server.url, 100 + i, new) for i in range(STREAMS)]
    deadline = time.monotonic() + PATIENCE_S
    while not all(stream.pieces >= 2 for stream in found):
        assert time.monotonic() < deadline and not any(stream.end for stream in found), [s.end for s in found]
        time.sleep(0.05)
    return found


def processes(server: Server) -> dict[str, psutil.Process]:
    main = psutil.Process(server.process.pid)
    return {"main": main} | {title(child): child for child in main.children(recursive=True)}


def group_is_gone(server: Server, within: float) -> bool:
    """Whether no process of the server's group is left; zombies do not count."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        server.process.poll()
        left = [p for p in psutil.process_iter(["status"]) if _group(p.pid) == server.process.pid]
        if not [p for p in left if p.info["status"] != psutil.STATUS_ZOMBIE]:
            return True
        time.sleep(0.1)
    return False


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def ended(found: list[Stream], within: float) -> list[str]:
    deadline = time.monotonic() + within
    for stream in found:
        stream.join(max(deadline - time.monotonic(), 0))
    return [stream.end for stream in found]


def health(server: Server, timeout: float = HEALTH_S) -> int | None:
    """Status of /health; None if there is no answer."""
    try:
        return requests.get(server.url + "/health", timeout=timeout).status_code
    except requests.RequestException:
        return None


@pytest.mark.parametrize(
    ("name", "number"),
    [(name, signal.SIGKILL) for name in PROCESSES] + [(name, signal.SIGTERM) for name in PROCESSES[1:]],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else str(value).removeprefix("sglang::"),
)
def test_a_process_is_lost(tmp_path: Path, name: str, number: signal.Signals) -> None:
    """The server ends: the remaining processes cannot answer requests."""
    with served(tmp_path, "lost") as server:
        found = streams(server, LONG)
        processes(server)[name].send_signal(number)
        start = time.monotonic()
        ends = ended(found, SECONDS)
        known = time.monotonic() - start
        assert all(ends) and not any("'length'" in end for end in ends), ends
        assert group_is_gone(server, SECONDS), processes(server)
        assert health(server) is None
        print(f"{number.name} of {name}: clients knew after {known:.1f} s, {sorted(set(ends))}")


def test_a_process_sleeps_and_wakes(tmp_path: Path) -> None:
    """Streams stop, /health does not report healthy, and all streams continue. Then the server is asked to end."""
    with served(tmp_path, "sleeps") as server:
        for name in PROCESSES:
            found = streams(server, SHORT)
            process = processes(server)[name]
            process.suspend()
            try:
                time.sleep(1)
                before = [stream.pieces for stream in found]
                said = health(server, timeout=30)
                assert said != 200 or name == "sglang::detokenizer", f"{name} sleeps, and /health says {said}"
                assert sum(stream.pieces for stream in found) - sum(before) <= STREAMS
            finally:
                process.resume()
            ends = ended(found, PATIENCE_S)
            assert all("'length'" in end for end in ends), (name, ends)
            assert health(server) == 200
        server.assert_clean()
        _asked_to_end(server)


def _asked_to_end(server: Server) -> None:
    """SIGTERM to the server: running requests end, /health reports unhealthy, and all processes are gone."""
    found = streams(server, SHORT)
    server.process.terminate()
    time.sleep(0.5)
    assert health(server) in (503, None)
    ends = ended(found, PATIENCE_S)
    assert all("'length'" in end for end in ends), ends
    assert group_is_gone(server, 3 * SECONDS), processes(server)
    assert server.process.wait(SECONDS) == 0
