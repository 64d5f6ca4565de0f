"""Workers that throw and allocations that fail: the pass fails with one message, and the next one is right."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi
from native_world import NativeWorld, attention, layer_begin, take
from places import python

from fluxion_sglang.native import NativeEngine, NativeLayers, NativePlan, library

LIBRARIES = Path(os.environ["FLUXION_DEVICE_LIBRARIES"])
FAILING = 2
"""Block size of the groups that the failing kind takes (`test/native/faults.cc`)."""


@cache
def faults() -> Any:
    library()  # its objects are of the same types
    return tvm_ffi.load_module(LIBRARIES / "libfluxion_faults.so")


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_whoever_waits_gets_what_a_worker_threw(threads: int) -> None:
    for thrower in range(threads):
        for _ in range(20):
            assert faults().get_function("failing_workers")(threads, thrower) == 3


def failing_layer(world: NativeWorld, requests: list[Any], what: str, chunks: int) -> str:
    """Run a layer in which one group fails; return the failure's message."""
    plan = world.plan(requests)
    plan.blk[0, 1] = FAILING
    kind = faults().get_function("failing_kind")(what, chunks)
    batch = len(requests)
    q = world.randn(batch, world.q_heads, world.dim)
    k, v = (world.randn(batch, world.heads, world.dim) for _ in range(2))
    world.begin_step(requests)
    native = NativePlan(plan.blk, plan.budget, plan.value, None, [kind])
    world.engine.layer_begin(native, world.at(), q, k, v, torch.empty_like(q))
    with pytest.raises(RuntimeError) as error:
        world.engine.layer_finish()
    with pytest.raises(RuntimeError, match="no result"):
        world.engine.result(torch.empty(batch, world.q_heads, world.dim))
    take(requests, 0, k, v)  # the token is written, so the step is repeated
    return str(error.value)


@pytest.mark.parametrize("chunks", [0, 2, 7])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_task_that_throws_fails_its_layer_and_no_other(workers: int, chunks: int) -> None:
    """In the task itself, and in chunks that helpers take."""
    world = NativeWorld(workers=workers)
    requests = [world.add(n) for n in (300, 401)]
    sentences = {
        "error": "This was to happen.",
        "memory": "Memory ran out (std::bad_alloc); lower host_tokens or host_memory_gb",
        "number": "no std::exception",
    }
    for round_ in range(4):
        for what, sentence in sentences.items():
            said = failing_layer(world, requests, what, chunks)
            assert said.startswith("Layer 0: Request 0, KV head 1 could not be computed: ") and sentence in said
        assert world.engine.stats()["failed_tasks"] == 3 * (round_ + 1)
        plan = world.plan(requests)
        world.begin_step(requests)
        _, q, out = world.begin_layer(requests, 0, plan)
        world.engine.layer_finish()
        world.check(out, world.expected(requests, 0, q, world.everything(requests)))


NO_MEMORY = r"""
import ctypes, sys, torch
from test_faults import passes
torch.set_num_threads(1)
arm = ctypes.CDLL(sys.argv[2]).hostile_arm
for name, (attempt, check) in passes(int(sys.argv[1])).items():
    arm(0)
    attempt()
    check()
    allocations = arm(0)
    failed = 0
    for nth in range(1, allocations + 50):
        arm(nth)
        try:
            attempt()
        except (RuntimeError, MemoryError) as error:
            failed += 1
            assert "Memory ran out" in str(error) or "bad_alloc" in str(error), error
        finally:
            arm(0)
        attempt()
        check()
    print(name, allocations, failed)
"""


def passes(workers: int) -> dict[str, Any]:
    """For each kind of pass, a function that repeats it, and one that checks the last result."""
    world = NativeWorld(workers=workers, share_prefixes=True)
    parent = world.add(330)
    requests = [parent, world.add(400, parent, 320), world.add(500, parent, 320)]
    result: dict[str, Any] = {}

    def decode(blk: int, budget: float) -> None:
        # A new engine, which must allocate.
        world.engine = NativeEngine(
            world.pool.workers, world.pool, q_heads=world.q_heads, sinks=world.placement.sinks,
            window=world.placement.window, max_requests=1, max_pages=1, attend_union=True,
            chunk_bytes=1 << 14, share_prefixes=True, cached_bytes=0,
        )  # fmt: skip
        rows = torch.tensor([r.row for r in requests], dtype=torch.int32)
        lengths = torch.tensor([r.length for r in requests], dtype=torch.int32)
        world.engine.step(rows, lengths, world.table(requests))
        q = torch.ones(len(requests), world.q_heads, world.dim)
        k, v = (torch.stack([getattr(r, name)[0][-1] for r in requests]) for name in ("keys", "values"))
        parts = torch.empty(len(requests), world.q_heads, 5)
        world.engine.layer_resident(world.at(), q, k, v, parts)
        plan = world.plan(requests, blk, budget)
        plan.owner = torch.zeros_like(plan.blk)
        out = torch.full_like(q, torch.nan)
        layer_begin(world.engine, 0, q, None, None, None, plan, world.scale, out)
        world.engine.layer_finish()
        result["q"], result["out"] = q, out

    def check_decode() -> None:
        world.check(result["out"], world.expected(requests, 0, result["q"], world.everything(requests)))

    last = requests[-1]
    pages = torch.tensor(last.pages, dtype=torch.int32)

    def prefill(budget: float) -> None:
        start, tokens = 100, last.length - 100
        q = torch.ones(tokens, world.q_heads, world.dim)
        result["prompt"] = torch.full_like(q, torch.nan)
        world.pool.append(0, pages, start, last.keys[0][start:], last.values[0][start:])
        world.pool.attend_chunk(0, pages, start, q, world.scale, result["prompt"], budget)

    def check_prefill() -> None:
        for t in (0, 17, -1):
            n = 100 + range(last.length - 100)[t] + 1
            keys, values = last.keys[0][:n, 0], last.values[0][:n, 0]
            want, _ = attention(torch.ones(world.dim), keys, values, world.scale)
            torch.testing.assert_close(result["prompt"][t, 0].double(), want, atol=1e-4, rtol=1e-4)

    x, weights = torch.randn(4, 300), torch.randn(700, 300)

    def linear() -> None:
        layers = NativeLayers(world.pool.workers)
        result["linear"] = layers.linear(x, weights)

    def check_linear() -> None:
        torch.testing.assert_close(result["linear"], x @ weights.T, atol=1e-3, rtol=1e-3)

    return {
        "blocks": (lambda: decode(16, 1.0), check_decode),
        "tokens": (lambda: decode(1, 1.0), check_decode),
        "sparse": (lambda: decode(16, 0.2), lambda: None),
        "prefill": (lambda: prefill(1.0), check_prefill),
        "sparse prefill": (lambda: prefill(0.3), lambda: None),
        "linear": (linear, check_linear),
    }


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 3])
def test_every_allocation_that_can_fail(workers: int) -> None:
    """In successive passes, the first, the second, ... allocation fails: the process survives, and the pass after each
    is right."""
    hostile = LIBRARIES / "libfluxion_hostile.so"
    environment = {"LD_PRELOAD": str(hostile), "OMP_NUM_THREADS": "1"}
    done = python("-c", NO_MEMORY, str(workers), str(hostile), env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = [line.rsplit(" ", 2) for line in done.stdout.splitlines()]
    assert len(lines) == 6
    for name, allocations, failed in lines:
        assert 0 < int(failed) <= int(allocations), (name, allocations, failed)
