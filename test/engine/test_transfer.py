"""Plain SGLang prefills a prompt and sends its KV; a server with the flag decodes.

Mooncake transfers over TCP, without GPU and RDMA. It is installed for these tests only; they are skipped if it or
libibverbs is unavailable.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import pytest
import requests
from server import PATIENCE_S, SOUND, Completion, Server, await_health
from test_exact import assert_same
from test_router import Deployment

from fluxion_sglang.commands.serving import free_port

pytestmark = pytest.mark.full

MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
ALL = cases.all_cases()
CONTEXT = 8192
"""Tokens of the longest request, and therefore of the landing zone."""
POOL = 24576


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment in which servers find mooncake."""
    folder = tmp_path_factory.mktemp("mooncake")
    uv = str(Path(sys.executable).with_name("uv"))
    command = [uv, "pip", "install", "--python", sys.executable, "--no-deps", "--target", str(folder), MOONCAKE]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"{MOONCAKE} cannot be installed: {found.stderr.strip()[-300:]}")
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
    probe = [sys.executable, "-c", "import mooncake.engine"]
    found = subprocess.run(probe, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    if found.returncode:
        pytest.skip(f"mooncake does not import (Debian: apt install libibverbs1): {found.stderr.strip()[-300:]}")
    yield environment


@dataclass
class Pair:
    """A prefill server and a decode server."""

    prefill: Server
    decode: Server
    port: int

    def __post_init__(self) -> None:
        self._rooms = itertools.count(1)

    def body(self, ids: list[int], new: int, **more: Any) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        meeting = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": next(self._rooms)}
        return {"input_ids": ids, "sampling_params": params, "return_logprob": True, **meeting, **more}

    def post(self, body: dict[str, Any]) -> requests.Response:
        """The decode server's reply to a request that both servers get."""
        with ThreadPoolExecutor(2) as pool:
            sent = [
                pool.submit(requests.post, server.url + "/generate", json=body, timeout=PATIENCE_S)
                for server in (self.prefill, self.decode)
            ]
        return sent[1].result()

    def generate(self, ids: list[int], new: int, **more: Any) -> Completion:
        reply = self.post(self.body(ids, new, **more))
        assert reply.status_code == 200, (reply.text, self.decode.log()[-3000:])
        return Completion.of(reply.json())

    def flush(self) -> None:
        for server in (self.prefill, self.decode):
            server.flush()


@contextmanager
def paired(
    mooncake: dict[str, str], folder: Path, *words: str, both: tuple[str, ...] = (), **env: str
) -> Iterator[Pair]:
    """words, env: for the decode server only; both: flags of both servers."""
    folder.mkdir()
    port = free_port()
    config = {"policy": "full", "host_tokens": POOL, "sketches": True, "canary": 1.0}
    both = ("--disaggregation-transfer-backend", "mooncake_tcp", "--context-length", str(CONTEXT), *both)
    with ExitStack() as stack:
        prefill = stack.enter_context(
            Server(
                *both, "--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port),
                "--page-size", "16", "--disable-overlap-schedule",
                fluxion=None, env={**mooncake, "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1"},
                log=folder / "prefill.log",
            )
        )  # fmt: skip
        decode = stack.enter_context(
            Server(
                *both, "--disaggregation-mode", "decode", "--max-running-requests", "4", *words,
                fluxion=json.dumps(config), env={**mooncake, **env},
                log=folder / "decode.log",
            )
        )  # fmt: skip
        yield Pair(prefill, decode, port)
        decode.assert_clean()


@pytest.fixture(scope="module")
def pair(mooncake: dict[str, str], logs: Path) -> Iterator[Pair]:
    with paired(mooncake, logs / "pair", SGLANG_TEST_RETRACT="1") as pair:
        yield pair


@pytest.mark.parametrize("length", [50, 300, 2000, 5000])
def test_tokens_are_those_of_one_server(pair: Pair, reference: dict[str, Completion], length: int) -> None:
    assert_same(pair.generate(*ALL[f"length-{length}"]), reference[f"length-{length}"])


def test_what_arrives_is_counted(pair: Pair) -> None:
    before = pair.decode.metrics()
    pair.generate(*ALL["length-2000"])
    after = pair.decode.metrics()
    assert after["fluxion_arrived_tokens_total"] - before["fluxion_arrived_tokens_total"] == 2000
    assert after["fluxion_arrival_copy_seconds_total"] > before["fluxion_arrival_copy_seconds_total"]


def test_many_at_once_wait_for_room(pair: Pair, reference: dict[str, Completion]) -> None:
    """Requests with more tokens in total than the landing zone holds."""
    names = ["length-5000", "length-2000", "length-300"] * 3
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: pair.generate(*ALL[name]), names))
    for name, answer in zip(names, answers, strict=True):
        assert_same(answer, reference[name])


@pytest.mark.parametrize("policy", ["fixed:16:0.9", "sketch"])
def test_a_sparse_policy_answers(pair: Pair, policy: str) -> None:
    ids, new = ALL["length-2000"]
    body = pair.body(ids, new)
    body["sampling_params"] |= {"custom_params": {"fluxion_policy": policy}}
    assert len(pair.post(body).json()["output_ids"]) == new


def test_what_is_retracted_goes_on_where_it_was(pair: Pair) -> None:
    """No server would prefill it again: its decoded KV returns unchanged, into other pages."""
    prompts, new = [cases.filler(700, 80 + i) for i in range(4)], 120
    alone = [pair.generate(prompt, new) for prompt in prompts]
    before = len(pair.decode.log())
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: pair.generate(prompt, new), prompts))
    assert re.search(r"Testing retraction|Retract requests", pair.decode.log()[before:]), "nothing was retracted"
    for got, want in zip(together, alone, strict=True):
        assert_same(got, want)


def test_what_is_aborted_in_line_holds_nobody_up(pair: Pair, reference: dict[str, Completion]) -> None:
    ids = ALL["length-5000"][0]
    bodies = {rid: pair.body(ids, 600, rid=rid) for rid in ("has the zone", "in line")}
    with ThreadPoolExecutor(3) as pool:
        # The first prefills for a while; the second waits for room behind it.
        sent = {rid: pool.submit(pair.post, body) for rid, body in bodies.items()}
        time.sleep(1)
        for server in (pair.prefill, pair.decode):
            requests.post(server.url + "/abort_request", json={"rid": "in line"}, timeout=PATIENCE_S).raise_for_status()
        start = time.monotonic()
        assert_same(pair.generate(*ALL["length-300"]), reference["length-300"])
        assert time.monotonic() - start < 25, "it waited for an acknowledgement that does not come"
        assert sent["in line"].result().json().get("object") == "error" or (
            sent["in line"].result().json()["meta_info"]["finish_reason"]["type"] == "abort"
        )
        assert len(sent["has the zone"].result().json()["output_ids"]) == 600
    assert_same(pair.generate(*ALL["length-5000"]), reference["length-5000"])


def test_a_prefill_server_that_is_not_there(pair: Pair, reference: dict[str, Completion]) -> None:
    body = pair.body(ALL["length-300"][0], 4) | {"bootstrap_port": free_port()}
    reply = requests.post(pair.decode.url + "/generate", json=body, timeout=PATIENCE_S)
    assert reply.status_code >= 500
    assert_same(pair.generate(*ALL["length-300"]), reference["length-300"])


def test_the_pool_is_sound(pair: Pair) -> None:
    """After everything that arrived, was retracted or was aborted."""
    body = pair.body(*ALL["length-50"])
    body["sampling_params"] |= {"custom_params": {"fluxion_check": True}}
    assert "output_ids" in pair.post(body).json()
    assert SOUND.search(pair.decode.log())


def test_each_rank_gets_its_heads(mooncake: dict[str, str], reference: dict[str, Completion], logs: Path) -> None:
    """Both servers have two ranks. If the numbers differ, SGLang sends each token's heads separately, which are too
    many pieces for mooncake's TCP."""
    ranks, cores = ("--tp", "2", "--mem-fraction-static", "0.7"), {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with paired(mooncake | cores, logs / "pair-tp2", both=ranks) as pair:
        for name in ("length-300", "length-5000"):
            assert_same(pair.generate(*ALL[name]), reference[name])
        names = [name for name in ALL if name.startswith("family-")]
        with ThreadPoolExecutor(len(names)) as pool:
            found = list(pool.map(lambda name: pair.generate(*ALL[name]), names))
        for name, got in zip(names, found, strict=True):
            assert_same(got, reference[name])


def test_what_the_decode_server_has_is_not_sent(
    mooncake: dict[str, str], reference: dict[str, Completion], logs: Path
) -> None:
    """The decode server has its own radix cache: only the part of a prompt after a known prefix arrives."""
    with paired(mooncake, logs / "pair-radix", "--disaggregation-decode-enable-radix-cache") as pair:
        sent = []
        for name in ("family-0", "family-1", "family-4", "family-5", "family-0"):
            before = pair.decode.metrics()["fluxion_arrived_tokens_total"]
            assert_same(pair.generate(*ALL[name]), reference[name])
            sent.append(pair.decode.metrics()["fluxion_arrived_tokens_total"] - before)
        assert sent[0] == len(ALL["family-0"][0]), sent
        known = [1040, 1040, 1391, len(ALL["family-0"][0])]
        for name, count, shared in zip(("family-1", "family-4", "family-5", "family-0"), sent[1:], known, strict=True):
            assert 0 <= count - (len(ALL[name][0]) - shared) <= 2 * 16, (name, sent)
        pair.flush()
        assert_same(pair.generate(*ALL["family-0"]), reference["family-0"])


def test_a_router_asks_both(
    mooncake: dict[str, str], reference: dict[str, Completion], logs: Path, router: list[str]
) -> None:
    with paired(mooncake, logs / "pair-router") as pair:
        url = f"http://127.0.0.1:{(port := free_port())}"
        command = [
            *router, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
            "--pd-disaggregation", "--prefill", pair.prefill.url, str(pair.port), "--decode", pair.decode.url,
        ]  # fmt: skip
        log = logs / "router.log"
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            await_health(url, process, log)
            Deployment(url, [pair.prefill, pair.decode], log).await_servers()
            names = ("length-300", "length-5000", "family-3")

            def ask(name: str) -> Completion:
                ids, new = ALL[name]
                body = {"input_ids": ids, "return_logprob": True}
                body["sampling_params"] = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
                return Completion.of(requests.post(url + "/generate", json=body, timeout=PATIENCE_S).json())

            with ThreadPoolExecutor(len(names)) as pool:
                for name, got in zip(names, pool.map(ask, names), strict=True):
                    assert_same(got, reference[name])
        finally:
            os.killpg(process.pid, signal.SIGKILL)
