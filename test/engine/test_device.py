"""A real SGLang server whose passes run on the simulated device: the GPU code, on a CPU.

One server runs under pressure: mixed chunks, a host pool for few of the prompts, and a request retracted in every third
step with more than one. One pass fails, and later one whose CPU half exceeds the device's wait. The server's policy
reads everything, so tokens equal those of plain SGLang. SGLang's leak check stays on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cases
import pytest
from policy_example import search_path
from server import PLUGINS, Completion, Server
from test_exact import PASSES, assert_same, check_group, check_pressure

ALL = cases.all_cases()
CHUNK, POOL = 256, 6400
FAULT = 20
"""Decode step of the first request that fails."""
TIMEOUT_S = 8


@pytest.fixture(scope="module")
def failed() -> list[Completion]:
    """Holds the answer of the request that failed."""
    return []


@pytest.fixture(scope="module")
def server(reference: dict[str, Completion], logs: Path, failed: list[Completion]) -> Iterator[Server]:
    with Server(
        "--chunked-prefill-size", str(CHUNK), "--enable-mixed-chunk",
        fluxion=f'{{"policy": "faulty:{FAULT}", "host_tokens": {POOL}}}',
        env={
            "FLUXION_DEVICE": "sim", "FLUXION_TASK_TIMEOUT_S": str(TIMEOUT_S), "SGLANG_TEST_RETRACT": "1",
            "PYTHONPATH": search_path(PLUGINS),
        },
        log=logs / "device.log",
    ) as server:  # fmt: skip
        failed.append(server.generate(*ALL["length-2000"]))
        yield server
        server.assert_idle()
        # Two passes failed on purpose.
        assert len(re.findall("the pass failed, and", server.log())) <= 2
        assert "Scheduler hit an exception" not in server.log()


def test_passes_run_on_the_device(server: Server) -> None:
    assert re.search(r"Fluxion: .*simulated", server.log())


def test_a_pass_that_fails_ends_its_request_and_no_other(
    server: Server, reference: dict[str, Completion], failed: list[Completion]
) -> None:
    assert "injected fault" in str(failed[0].finish), failed[0].finish
    ids, new = ALL["length-2000"]
    # Tokens decoded before the fault are not in the tree.
    conversation = ids + reference["length-2000"].tokens
    assert server.generate(conversation, 1).cached <= len(ids)
    assert_same(server.generate(ids, new), reference["length-2000"])


@pytest.mark.parametrize(
    "length", [300, 2000, pytest.param(50, marks=pytest.mark.full), pytest.param(5000, marks=pytest.mark.full)]
)
def test_lengths(server: Server, reference: dict[str, Completion], length: int) -> None:
    server.flush()
    got = server.generate(*ALL[f"length-{length}"])
    assert got.cached == 0
    assert_same(got, reference[f"length-{length}"])


def test_radix_hit_on_a_host_only_prefix(server: Server, reference: dict[str, Completion]) -> None:
    server.flush()
    ids, new = ALL["length-2000"]
    first = server.generate(ids, new)
    server.generate_many([(cases.prompt(200, 300 + i), 4) for i in range(8)])  # take the row
    again = server.generate(ids, new)
    assert again.cached >= 1900
    assert_same(again, reference["length-2000"])
    turn = server.generate(cases.second_turn(ids, first.tokens), cases.TURN_NEW)
    assert turn.cached >= 2048
    assert_same(turn, reference["second-turn"])


@pytest.mark.full
def test_eviction_and_retraction(server: Server, reference: dict[str, Completion]) -> None:
    check_pressure(server, reference)
    check_group(server, reference, "family")
    evicted = [value for name, value in server.metrics().items() if "evicted_tokens_total" in name]
    assert sum(evicted) > 0, "nothing was evicted"


@pytest.mark.parametrize("when", [pytest.param("prefill", marks=pytest.mark.full), "decode"])
def test_abort(server: Server, reference: dict[str, Completion], when: str) -> None:
    server.flush()
    ids = cases.prompt(6000, 77) if when == "prefill" else ALL["length-2000"][0]
    got = server.aborted(ids, 3000 if when == "decode" else 20, PASSES[when], f"abort-{when}")
    assert bool(got.tokens) == (when == "decode")
    assert_same(server.generate(*ALL["length-300"]), reference["length-300"])


@pytest.mark.full
def test_requests_of_many_policies_at_once(server: Server, reference: dict[str, Completion]) -> None:
    """Policies that read everything answer as plain SGLang; the others read less."""
    server.flush()
    ids, new = ALL["length-2000"]
    before = server.metrics()
    specs = ["fixed:16:0.05", "full", "anchor", "psa", "streaming", "fixed:16:1.0"]
    with ThreadPoolExecutor(len(specs)) as pool:
        got = dict(zip(specs, pool.map(lambda spec: server.generate(ids, new, spec), specs), strict=True))
    assert all(len(got[spec].tokens) == new for spec in specs), got
    for spec in ("full", "fixed:16:1.0"):
        assert_same(got[spec], reference["length-2000"])
    after = server.metrics()
    grown: Any = {name: after[name] - before.get(name, 0) for name in after if name.startswith("fluxion_")}
    assert 0 < grown["fluxion_read_tokens_total"] < grown["fluxion_middle_tokens_total"]


@pytest.mark.full
def test_a_cpu_that_keeps_the_device_waiting(server: Server, reference: dict[str, Completion]) -> None:
    ids, new = ALL["length-300"][0] * 2, 8
    late = server.generate(ids, new, f"sleeper:{TIMEOUT_S + 4}")
    assert "waited too long" in str(late.finish), late.finish
    for _ in range(2):
        assert_same(server.generate(*ALL["length-2000"]), reference["length-2000"])
