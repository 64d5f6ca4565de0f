"""Tasks in chunks: idle workers help, and results do not depend on the distribution of work."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from native_world import NativeWorld, Request

PAGE_BYTES = 2 * 16 * 32 * 4  # of a tile in NativeWorld
TORCH = 1


def make(
    workers: int, chunk_bytes: int | None, seed: int = 0, lengths: tuple[int, ...] = (900, 60, 2000), **options: object
) -> tuple[NativeWorld, list[Request]]:
    world = NativeWorld(workers=workers, chunk_bytes=chunk_bytes, seed=seed, pages=1200, **options)  # type: ignore[arg-type]
    return world, [world.add(n) for n in lengths]


@pytest.mark.parametrize("blk", [1, 16, 128])
@pytest.mark.parametrize("chunk_bytes", [1, 3 * PAGE_BYTES, 40 * PAGE_BYTES])
def test_chunks_add_up_to_the_whole(chunk_bytes: int, blk: int) -> None:
    """Against float64, from more chunks than allowed (1 byte each) to tasks with a single one."""
    world, requests = make(2, chunk_bytes)
    for _ in range(17):  # the middle grows by a page
        world.begin_step(requests)
        _, q, out = world.begin_layer(requests, 0, world.plan(requests, blk))
        world.engine.layer_finish()
        world.check(out, world.expected(requests, 0, q, world.everything(requests)))


@settings(max_examples=examples(25))
@given(
    seed=st.integers(0, 2**16), pages=st.sampled_from([0, 1, 5, 30]), blk=st.sampled_from([1, 16, 32, 128]),
    budget=st.sampled_from([0.03, 0.3, 1.0]), union=st.booleans(), first=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_the_number_of_workers_changes_no_bit(
    seed: int, pages: int, blk: int, budget: float, union: bool, first: bool, dtype: torch.dtype
) -> None:
    outcomes = []
    for workers in (1, 2, 4):
        world, requests = make(workers, max(1, pages * PAGE_BYTES), seed, attend_union=union, dtype=dtype, group=3)
        for _ in range(2):
            world.begin_step(requests)
            plan = world.plan(requests, blk, budget)
            plan.budget[0, 0] = 0.0
            _, _, out = world.begin_layer(requests, 0, plan, resident_first=first)
            world.engine.layer_finish()
        exact, reads = torch.empty(out.shape), torch.empty(len(requests), world.heads, 2, dtype=torch.int64)
        world.engine.result(exact)
        world.engine.reads(reads)
        outcomes.append((out, exact, reads))
    for outcome in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], outcome, strict=True))


@pytest.mark.parametrize("blk", [1, 16])
def test_where_a_task_is_cut_decides_nothing_but_rounding(blk: int) -> None:
    """The same blocks are selected from the same scores, however the scan is divided."""
    chosen, outs = [], []
    for chunk_bytes in (None, 1, 7 * PAGE_BYTES):
        world, requests = make(2, chunk_bytes, seed=3)
        world.begin_step(requests)
        tasks, _, out = world.begin_layer(requests, 0, world.plan(requests, blk, 0.1))
        chosen.append(world.selections(requests, tasks))
        world.engine.layer_finish()
        outs.append(out)
    assert chosen[0] == chosen[1] == chosen[2]
    assert not torch.equal(outs[0], outs[1]), "nothing was cut: nothing was tested"
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-6)


def test_an_idle_worker_helps_with_the_only_task() -> None:
    world, requests = make(2, 1, heads=1, lengths=(5000,), isa="scalar")
    for _ in range(200):
        world.begin_step(requests)
        world.begin_layer(requests, 0, world.plan(requests))
        world.engine.layer_finish()
        if sum(world.engine.helped_chunks()) > 20:
            break
    stats = world.engine.stats()
    assert sum(world.engine.helped_chunks()) > 20
    assert stats["tasks_cpu"] == stats["tasks"] == stats["layers"], "each task is done once, with helpers or without"
    assert all(ns > 0 for ns in world.engine.worker_ns())


def test_a_worker_alone_gets_no_help() -> None:
    world, requests = make(1, 1)
    world.begin_step(requests)
    assert world.engine.worker_ns() == [0]
    world.begin_layer(requests, 0, world.plan(requests))
    world.engine.layer_finish()
    assert world.engine.helped_chunks() == [0]
    assert world.engine.worker_ns()[0] > 0


class Puller(threading.Thread):
    """A foreign executor that comes, goes and drops its tasks at any moment."""

    def __init__(self, world: NativeWorld, executor: int, seed: int) -> None:
        super().__init__()
        self.world, self.executor, self.pause = world, executor, random.Random(seed)
        self.o, self.lse = torch.full((world.group, world.dim), 7.0), torch.zeros(world.group)
        self.stop = False
        self.delivered = 0
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            while not self.stop:
                claim = self.world.engine.queue_pop(self.executor)
                time.sleep(self.pause.choice([0, 0, 1e-5, 2e-4]))
                if claim >= 0:
                    self.delivered += self.world.engine.task_done(claim, self.o, self.lse, 0)
        except BaseException as error:
            self.error = error


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("foreign", [False, True])
def test_any_schedule(workers: int, foreign: bool) -> None:
    """Many tiny chunks, layers abandoned at any moment, executors that arrive late: finished layers are right, and
    abandoned ones write nothing."""
    world, requests = make(workers, 1, seed=workers, heads=3, lengths=(1700, 300, 1, 700))
    chance = random.Random(workers)
    pullers = [Puller(world, TORCH, seed) for seed in ((1, 2) if foreign else ())]
    finished = 0
    try:
        for _ in range(120):
            for request in requests:  # repeat the same step: an abandoned one may have appended
                request.keys[0], request.values[0] = request.keys[0][:-1], request.values[0][:-1]
            world.begin_step(requests)
            blk = chance.choice([1, 16, 64])
            plan = world.plan(requests, blk)
            _, q, out = world.begin_layer(requests, 0, plan, resident_first=chance.random() < 0.3)
            time.sleep(chance.choice([0, 0, 2e-5, 1e-4, 5e-4]))
            if chance.random() < 0.5:
                world.engine.abandon()
                for memory in (q, out):
                    memory.fill_(torch.nan)
                time.sleep(chance.choice([0, 1e-4]))
                assert bool(out.isnan().all()), "an abandoned layer wrote to its output"
                continue
            world.engine.layer_finish()
            finished += 1
            if not foreign:
                world.check(out, world.expected(requests, 0, q, world.everything(requests)))
            else:
                assert not bool(out.isnan().any())
    finally:
        for puller in pullers:
            puller.stop = True
        for puller in pullers:
            puller.join()
    assert finished > 20
    assert all(puller.error is None for puller in pullers)
    stats = world.engine.stats()
    assert stats["tasks_torch"] == sum(puller.delivered for puller in pullers)
