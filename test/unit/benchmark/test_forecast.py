"""The forecast of decode steps: checks of its layer simulation and of its inputs."""

from __future__ import annotations

import heapq
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import forecast.__main__ as program
import pytest
from effort import examples
from forecast import hardware, layer, work
from forecast.hardware import Domain, Machine
from forecast.layer import TIME, Kernel, Layer, Stage
from forecast.step import Rates, forecast
from forecast.work import ATTEND, ATTEND_BLOCKS, SCAN, Model, Reading, layer_work
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from fluxion_sglang.executor.workers import share_of_machine
from fluxion_sglang.native import topology

LLAMA = Model(layers=32, hidden=4096, inner=14336, q_heads=32, kv_heads=8, head_dim=128, vocabulary=128256)
KERNELS = {ATTEND: Kernel(16, 2), ATTEND_BLOCKS: Kernel(16, 2, 0.9), SCAN: Kernel(20, 2)}
RATES = Rates(
    workers=2,
    streamed=36,
    alone=22,
    kernels={f"G={group} D=128": KERNELS for group in (2, 4)},
    select_ns=0.5,
    linear={1: Kernel(20, 3), 4: Kernel(16, 3), 32: Kernel(4, 3)},
    launch_us=3,
    step_us=(500, 20),
    layer_us=(20, 2),
    reduce_us=(150, 0.3),
)
PLENTY = 1e9
"""GB/s of a memory that is never the limit."""


def run(tasks: list[list[Stage]], domain: Domain, items: list[list[Stage]] | None = None) -> layer.Outcome:
    return Layer(items or [], tasks, domain, KERNELS).run()


# --- one layer ---


def test_chunks_are_the_engines() -> None:
    header, scratch = ((ROOT / "csrc/engine" / name).read_text() for name in ("layer.h", "scratch.h"))
    (kib,) = re.findall(r"kChunkBytes = (\d+) << 10;", header)
    (most,) = re.findall(r"kMaxChunks = (\d+);", scratch)
    assert (int(kib) << 10, int(most)) == (layer.CHUNK_BYTES, layer.MAX_CHUNKS)


def test_one_worker_does_one_task_at_the_kernels_rate() -> None:
    found = run([[Stage(ATTEND, 1e6), Stage(TIME, 500)]], Domain(1, PLENTY, PLENTY, hop_ns=100))
    assert found.ns == pytest.approx(100 + 1e6 / 16 + 500)
    assert found.nbytes == 1e6


@settings(max_examples=examples(60))
@given(st.lists(st.integers(1, 500_000), min_size=1, max_size=40), st.integers(1, 9))
def test_tasks_of_one_chunk_go_as_a_list_of_jobs_goes(sizes: list[int], workers: int) -> None:
    """Compare with the greedy list schedule, without memory limit and without chunks to share."""
    free = [0.0] * workers
    for nbytes in sizes:
        heapq.heappush(free, heapq.heappop(free) + nbytes / 16)
    found = run([[Stage(ATTEND, n)] for n in sizes], Domain(workers, PLENTY, PLENTY, hop_ns=1e-6))
    assert found.ns == pytest.approx(max(free), rel=1e-3)


@settings(max_examples=examples(60))
@given(
    st.lists(st.lists(st.floats(1, 5e7), min_size=1, max_size=3), min_size=1, max_size=12),
    st.integers(1, 12),
    st.floats(1, 400),
)
def test_no_schedule_beats_the_memory_and_none_loses_to_one_worker(
    tasks: list[list[float]], workers: int, streamed: float
) -> None:
    domain = Domain(workers, streamed, 22)
    staged = [[Stage((SCAN, ATTEND, ATTEND_BLOCKS)[i], n) for i, n in enumerate(stages)] for stages in tasks]
    found = run(staged, domain)
    total = sum(map(sum, tasks))
    assert found.nbytes == pytest.approx(total)
    assert found.ns >= total / streamed * (1 - 1e-9)
    alone = run(staged, replace(domain, workers=1))
    crowded = min(1.0, domain.offered(workers) / domain.offered(1))  # rate of a worker when all of them read
    assert found.ns <= alone.ns / crowded * 1.01 + workers * domain.hop_ns


@pytest.mark.parametrize(("workers", "faster"), [(2, 2), (8, 8), (64, 64), (200, 64)])
def test_idle_workers_help_chunk_by_chunk(workers: int, faster: float) -> None:
    task = [[Stage(ATTEND, 64.0 * layer.CHUNK_BYTES)]]
    one, many = (run(task, Domain(n, PLENTY, PLENTY, hop_ns=1)) for n in (1, workers))
    assert one.ns / many.ns == pytest.approx(faster, rel=0.01)


def test_a_stage_that_cannot_be_cut_is_one_workers() -> None:
    task = [[Stage(TIME, 1e6)]]
    one, many = (run(task, Domain(n, PLENTY, PLENTY)) for n in (1, 8))
    assert one.ns == many.ns


def test_workers_share_the_memory() -> None:
    tasks = [[Stage(ATTEND, 4e5)] for _ in range(64)]
    found = run(tasks, Domain(64, 64.0, 22))  # 1 GB/s each, far below what they can compute
    assert found.ns == pytest.approx(4e5, rel=0.02)


# --- rates ---


@settings(max_examples=examples(60))
@given(st.floats(1, 100), st.floats(1, 15), st.floats(0.3, 200))
def test_a_rate_is_below_both_of_its_limits(near: float, overlap: float, offered: float) -> None:
    rate = Kernel(near, overlap).rate(offered)
    assert 0 < rate <= min(near, offered)
    assert rate >= near * offered / (near + offered) * (1 - 1e-9)  # nothing hidden


def test_linear_time_grows_between_what_was_measured() -> None:
    assert RATES.linear_of(4) == RATES.linear[4]
    assert 1 / RATES.linear_of(18).near == pytest.approx((1 / 16 + 1 / 4) / 2)
    with pytest.raises(ValueError, match="more than 32 requests cannot be forecast"):
        RATES.linear_of(33)


@pytest.mark.parametrize(
    "row", json.loads(program.RATES.read_text())["rows"], ids=lambda row: f"{row['model']} {row['spec']}"
)
def test_measured_steps_are_foretold(row: dict[str, Any]) -> None:
    """On the machine of the rates; its speed differed by up to 14% from that during their measurement."""
    rates = Rates.from_json(json.loads(program.RATES.read_text())["rates"])
    model, sparse = Model.of(checkpoints.config(row["model"])), row["spec"] != "full"
    reading = Reading(16, row["tiles"]) if sparse else Reading(0, 1.0)
    found = forecast(model, rates.here, rates, row["batch"], row["depth"], reading)
    assert found.ms == pytest.approx(row["ms"], rel=0.1)


# --- what there is to do ---


def test_tasks_read_the_middle() -> None:
    context = 16 * 1024
    items, tasks = layer_work(LLAMA, 3, context, Reading(0, 1.0), 0.5)
    assert len(items) == len(tasks) == 3 * 8
    read = sum(stage.nbytes for stage in (*items[0], *tasks[0]))
    assert read == context * 2 * 128 * 2  # every token's key and value


def test_a_short_request_has_no_tasks() -> None:
    items, tasks = layer_work(LLAMA, 2, 100, Reading(0, 1.0), 0.5)
    assert tasks == [] and items[0][0].nbytes == 100 * 512


def test_a_sparse_task_scans_chooses_and_reads() -> None:
    _, (task, *_) = layer_work(LLAMA, 1, 65536 + work.SINKS + work.WINDOW, Reading.of("fixed:16:0.05", 4), 0.5)
    scan, choose, attend = task
    assert scan == Stage(SCAN, 4096 * 512)
    assert choose == Stage(TIME, 4096 * 4 * 0.5)
    assert attend.nbytes == pytest.approx(65536 * 512 * (1 - 0.95**4))


@pytest.mark.parametrize("spec", ["fluxion", "fixed", "fixed:17:0.1", "fixed:16:0", "full:1"])
def test_a_policy_that_cannot_be_forecast(spec: str) -> None:
    with pytest.raises(ValueError, match="cannot be forecast; say full or fixed"):
        Reading.of(spec, 4)


def test_a_model_has_its_parameters() -> None:
    assert LLAMA.layers * sum(LLAMA.matrices()) + 2 * LLAMA.head_bytes() == pytest.approx(2 * 8.03e9, rel=0.001)
    assert 1.3 < LLAMA.pool_bytes(1_000_000) / (1_000_000 * 131072) < 1.4, "with metadata and moments"
    half = LLAMA.rank(2)
    assert half.group == LLAMA.group and 2 * sum(half.matrices()) == sum(LLAMA.matrices())
    with pytest.raises(ValueError, match="3 ranks cannot divide 8 KV heads"):
        LLAMA.rank(3)


# --- machines ---


def test_a_server_of_the_file_is_forecast(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--server", "2 x EPYC 9654, DDR5-4800", "--context", "1000000"]
    monkeypatch.setattr(sys, "argv", ["forecast", *options, "--batch", "8"])
    program.main()
    assert "8 x 1,000,000 full: 1532.1 ms a token" in capsys.readouterr().out, "1,532 in forecast_machines.json"
    for wrong, says in (("10", "the KV takes 1,679 GiB"), ("0", "--ranks, --batch and --context are 1 or more")):
        monkeypatch.setattr(sys, "argv", ["forecast", *options, "--batch", wrong])
        with pytest.raises(SystemExit, match=says):
            program.main()


def test_a_rank_has_the_cores_of_a_node(tmp_path: Path) -> None:
    """The forecast's assumption holds for the /sys files of such a machine."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1600000000 kB\nMemAvailable: 1500000000 kB\n")
    for machine in hardware.machines().values():
        cores = machine.cores
        for node in range(machine.nodes):
            folder = tmp_path / f"sys/devices/system/node/node{node}"
            folder.mkdir(parents=True, exist_ok=True)
            threads = (f"{first}-{first + cores - 1}" for first in (node * cores, (machine.nodes + node) * cores))
            (folder / "cpulist").write_text(",".join(threads) + "\n")
        for core in range(2 * machine.nodes * cores):  # two hardware threads a core
            folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
            folder.mkdir(parents=True, exist_ok=True)
            first = core % (machine.nodes * cores)
            (folder / "thread_siblings_list").write_text(f"{first},{first + machine.nodes * cores}\n")
        seen = topology(str(tmp_path), range(2 * machine.nodes * cores))
        for rank in range(machine.nodes):
            mine = list(share_of_machine(seen, rank, machine.nodes, tmp_path))
            workers = machine.domain(machine.nodes, 20.0).workers
            assert mine[:workers] == list(range(rank * cores, (rank + 1) * cores))


def test_the_link_limits_one_process_on_two_nodes() -> None:
    machine = Machine("m", nodes=2, cores=10, peak_gb_per_s=100, link_gb_per_s=20, memory_gib=1, source="")
    assert machine.domain(1, 50).streamed == pytest.approx(2 * hardware.LINKED * 20 / 0.5)
    wide = replace(machine, link_gb_per_s=1000)
    assert wide.domain(1, 50).streamed == pytest.approx(2 * wide.domain(2, 50).streamed)
    with pytest.raises(ValueError, match="3 ranks on 2 nodes"):
        machine.domain(3, 50)


@pytest.mark.parametrize("machine", hardware.machines().values(), ids=lambda machine: machine.name)
def test_a_step_is_within_what_the_machine_can(machine: Machine) -> None:
    found = {
        (ranks, spec): forecast(
            LLAMA, machine.domain(ranks, RATES.alone), RATES, 8, 100_000, Reading.of(spec, LLAMA.group), ranks
        )
        for ranks in (1, machine.nodes)
        for spec in ("full", "fixed:16:0.05")
    }
    for one in found.values():
        assert one.ms == pytest.approx(one.matrices_ms + one.attention_ms + one.reduce_ms + one.rest_ms)
        assert one.gb_per_s < machine.nodes * machine.peak_gb_per_s * hardware.STREAMED
    for ranks in (1, machine.nodes):
        assert found[ranks, "full"].attention_ms > 2 * found[ranks, "fixed:16:0.05"].attention_ms
    assert found[1, "full"].reduce_ms == 0 < found[machine.nodes, "full"].reduce_ms
