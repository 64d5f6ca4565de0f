"""One queue for native workers and foreign executors: each task is executed exactly once, in any interleaving."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from native_world import CLAIM_INDEX_MASK, NativeWorld, Request

from fluxion_sglang.native import NativeEngine

CPU, TORCH, ANY = 0, 1, 2


def make(workers: int, seed: int, layers: int = 1) -> tuple[NativeWorld, list[Request]]:
    # The slowest kernels: tasks take long enough that other executors get some.
    world = NativeWorld(workers=workers, seed=seed, layers=layers, heads=4, pages=600, isa="scalar")
    lengths = random.Random(seed).choices([60, 200, 500, 900, 1500], k=5)
    return world, [world.add(n) for n in lengths]


def want(world: NativeWorld, requests: list[Request], layer: int, q: torch.Tensor) -> torch.Tensor:
    return world.expected(requests, layer, q, world.everything(requests, layer))


class Puller(threading.Thread):
    """A foreign executor with its own thread, as slow and irregular as `pause` makes it.

    `claim`: a task that the caller claimed for it, because the native workers may finish before a Python thread starts.
    """

    def __init__(
        self, world: NativeWorld, requests: list[Request], q: torch.Tensor, executor: int, claim: int,
        pause: random.Random,
    ) -> None:  # fmt: skip
        super().__init__()
        self.world, self.requests, self.q = world, requests, q
        self.executor, self.claim, self.pause = executor, claim, pause
        self.done: list[int] = []
        self.error: BaseException | None = None
        self.start()

    def pop(self) -> int:
        claim, self.claim = self.claim, -1
        return claim if claim >= 0 else self.world.engine.queue_pop(self.executor)

    def run(self) -> None:
        try:
            while (claim := self.pop()) >= 0:
                o, lse, tokens = self.world.compute(self.requests, 0, self.q, claim)
                time.sleep(self.pause.choice([0, 0, 1e-4, 1e-3]))
                assert self.world.engine.task_done(claim, o, lse, tokens)
                assert not self.world.engine.task_done(claim, o, lse, tokens), "a claim is delivered once"
                self.done.append(claim & CLAIM_INDEX_MASK)
        except BaseException as error:
            self.error = error


def mixed_step(
    world: NativeWorld, requests: list[Request], seed: int, executors: list[int], lanes: tuple[int, ...] = (ANY,)
) -> list[int]:
    """One layer with pullers beside the workers; its tasks are for random lanes of `lanes`. Returns the owners."""
    world.begin_step(requests)
    plan = world.plan(requests)
    plan.value = world.randn(len(requests), world.heads).float()
    pause = random.Random(seed)
    owner = torch.tensor(pause.choices(lanes, k=plan.blk.numel()), dtype=torch.int32).view_as(plan.blk)
    plan.owner = None if lanes == (ANY,) else owner
    tasks, q, out = world.begin_layer(requests, 0, plan)
    # Claim at once: the workers may finish soon.
    claims = [world.engine.queue_pop(executor) if pause.random() < 0.7 else -1 for executor in executors]
    allowed = [int(owner.flatten()[world.engine.task(i)]) for i in range(tasks)]
    pullers = [
        Puller(world, requests, q, executor, claim, random.Random(pause.random()))
        for executor, claim in zip(executors, claims, strict=True)
    ]
    time.sleep(pause.choice([0, 0, 1e-3]))
    world.engine.layer_finish()
    for puller in pullers:
        puller.join()
        assert puller.error is None, puller.error
    owners: list[int] = world.engine.owners().tolist()
    assert len(owners) == tasks
    assert -1 not in owners
    delivered = [i for puller in pullers for i in puller.done]
    assert len(set(delivered)) == len(delivered)
    assert sorted(delivered) == [i for i, owner in enumerate(owners) if owner != CPU]
    for puller in pullers:
        assert all(owners[i] in executors for i in puller.done)
    assert all(lane in (ANY, took) for lane, took in zip(allowed, owners, strict=True))
    world.check(out, want(world, requests, 0, q))
    return owners


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_each_task_is_done_once_by_somebody(workers: int) -> None:
    shared = 0
    # Eight worlds, or more until both executors work in one step. If there are more workers than cores, the other
    # executor may get no task in any number of worlds.
    alone = workers > len(os.sched_getaffinity(0))
    for seed in range(64):
        if seed >= 8 and (shared > 0 or alone):
            break
        world, requests = make(workers, seed)
        before = world.engine.stats()
        counts = [0, 0]
        for step in range(5):
            owners = mixed_step(world, requests, seed * 100 + step, [TORCH] * (1 + (seed + step) % 2))
            shared += len(set(owners)) > 1
            for owner in owners:
                counts[owner] += 1
        after = world.engine.stats()
        assert [after[f"tasks_{name}"] - before[f"tasks_{name}"] for name in ("cpu", "torch")] == counts
        assert after["tasks"] - before["tasks"] == sum(counts)
        assert after["failed_tasks"] == before["failed_tasks"]
    assert shared > 0 or alone, "no schedule had both executors at work: nothing was tested"


@pytest.mark.parametrize("foreign", [0, 1, 7, 1000])
def test_one_thread_can_do_everything(foreign: int) -> None:
    """With one worker nothing runs before finish(): the test controls the split, and priority decides the order."""
    world, requests = make(1, 3)
    world.begin_step(requests)
    plan = world.plan(requests)
    plan.value = world.randn(len(requests), world.heads).float()
    tasks, q, out = world.begin_layer(requests, 0, plan)
    done = world.drain_foreign(requests, 0, q, TORCH, foreign)
    world.engine.layer_finish()
    assert done == list(range(min(foreign, tasks)))
    assert world.engine.owners().tolist() == [TORCH] * len(done) + [CPU] * (tasks - len(done))
    world.check(out, want(world, requests, 0, q))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_task_for_one_executor_is_done_by_that_one(workers: int) -> None:
    lanes = [(CPU, TORCH), (CPU, TORCH, ANY), (TORCH, ANY), (CPU, ANY), (TORCH,), (CPU,)]
    for seed in range(4):
        world, requests = make(workers, seed)
        for step, mix in enumerate(lanes):
            executors = [TORCH] * (1 + seed % 2) if TORCH in mix else []
            mixed_step(world, requests, seed * 100 + step, executors, mix)


@settings(max_examples=examples(30))
@given(
    owner=st.lists(st.sampled_from([CPU, TORCH, ANY]), min_size=20, max_size=20),
    value=st.lists(st.integers(0, 4), min_size=20, max_size=20),
    turns=st.integers(0, 24),
)
def test_lanes_are_emptied_in_their_order_own_tasks_first(owner: list[int], value: list[int], turns: int) -> None:
    """With one worker nothing runs before finish(): the test controls the pops."""
    world, requests = make(1, 3)
    world.begin_step(requests)
    plan = world.plan(requests)
    plan.value = torch.tensor(value, dtype=torch.float32).view_as(plan.blk)
    plan.owner = torch.tensor(owner, dtype=torch.int32).view_as(plan.blk)
    tasks, q, out = world.begin_layer(requests, 0, plan)
    groups = [world.engine.task(i) for i in range(tasks)]
    queues = {
        lane: sorted((g for g in groups if owner[g] == lane), key=lambda g: (-value[g], g))
        for lane in (CPU, TORCH, ANY)
    }
    took = {}
    for _ in range(len(queues[TORCH]) + turns):  # the engine waits for tasks of the torch lane
        lane = queues[TORCH] or queues[ANY]
        claim = world.engine.queue_pop(TORCH)
        if not lane:
            assert claim == -1
            continue
        group = world.engine.task(claim)
        assert group == lane.pop(0)
        took[group] = TORCH
        assert world.engine.task_done(claim, *world.compute(requests, 0, q, claim))
    world.engine.layer_finish()
    assert world.engine.owners().tolist() == [took.get(group, CPU) for group in groups]
    world.check(out, want(world, requests, 0, q))


@pytest.mark.parametrize("workers", [1, 2])
def test_what_waits_for_an_executor_that_never_comes_is_an_error(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world, requests = make(workers, 2)
    with_timeout(world, monkeypatch, "0.05")
    world.begin_step(requests)
    plan = world.plan(requests)
    plan.owner = torch.full_like(plan.blk, CPU)
    plan.owner[-1, 2] = TORCH
    tasks, _, _ = world.begin_layer(requests, 0, plan)
    where = f"request {len(requests) - 1}, KV head 2"
    with pytest.raises(RuntimeError, match=rf'{where}\) belongs to the executor "torch" .* within 0.05 s'):
        world.engine.layer_finish()
    assert sorted(world.engine.owners().tolist()) == [-1] + [CPU] * (tasks - 1)
    assert world.engine.queue_pop(TORCH) == -1
    world.begin_step(requests)
    _, q, out = world.begin_layer(requests, 0, plan)
    assert world.drain_foreign(requests, 0, q, TORCH) == [tasks - 1]
    world.engine.layer_finish()
    world.check(out, want(world, requests, 0, q))


def test_an_owner_that_is_no_executor_fails_the_layer() -> None:
    world, requests = make(2, 0)
    world.begin_step(requests)
    plan = world.plan(requests)
    for owner in (-1, 3):
        plan.owner = torch.full_like(plan.blk, ANY)
        plan.owner[1, 1] = owner
        world.begin_layer(requests, 0, plan)
        with pytest.raises(RuntimeError, match=f"Request 1, KV head 1 has the owner {owner};"):
            world.engine.layer_finish()
        world.begin_step(requests)
    plan.owner = plan.owner.long()
    with pytest.raises(ValueError, match="owner"):
        world.begin_layer(requests, 0, plan)


def test_nothing_can_be_pulled_outside_a_layer() -> None:
    world, requests = make(2, 0)
    assert world.engine.queue_pop(TORCH) == -1
    world.begin_step(requests)
    assert world.engine.queue_pop(TORCH) == -1
    world.begin_layer(requests, 0, world.plan(requests))
    world.engine.layer_finish()
    assert world.engine.queue_pop(TORCH) == -1
    for executor in (-1, 0, 2, 3):
        with pytest.raises(ValueError, match="no foreign executor"):
            world.engine.queue_pop(executor)


def test_a_failed_task_fails_its_layer_only() -> None:
    world, requests = make(1, 1)
    world.begin_step(requests)
    world.begin_layer(requests, 0, world.plan(requests))
    claim = world.engine.queue_pop(TORCH)
    b, h = divmod(world.engine.task(claim), world.heads)
    assert world.engine.task_failed(claim, "it ran out of memory")
    assert not world.engine.task_failed(claim, "twice")
    second = world.engine.queue_pop(TORCH)
    assert world.engine.task_failed(second, "a later failure")
    with pytest.raises(RuntimeError, match=f"Layer 0: .*torch.* request {b}, KV head {h}: it ran out of memory$"):
        world.engine.layer_finish()
    assert world.engine.stats()["failed_tasks"] == 2
    mixed_step(world, requests, 0, [TORCH])


def with_timeout(world: NativeWorld, monkeypatch: pytest.MonkeyPatch, seconds: str) -> None:
    monkeypatch.setenv("FLUXION_TASK_TIMEOUT_S", seconds)
    world.engine = NativeEngine(
        world.pool.workers, world.pool, q_heads=world.q_heads, sinks=world.placement.sinks,
        window=world.placement.window, max_requests=8, max_pages=128, attend_union=True, share_prefixes=False,
    )  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_nobody_delivers_is_an_error_and_comes_too_late_for_ever(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, requests = make(workers, 2)
    with_timeout(world, monkeypatch, "0.05")
    late: list[int] = []
    while not late:  # the workers may be faster
        world.begin_step(requests)
        world.begin_layer(requests, 0, world.plan(requests))
        late = [claim for claim in (world.engine.queue_pop(TORCH), world.engine.queue_pop(TORCH)) if claim >= 0]
        start = time.monotonic()
        if late:
            b, h = divmod(world.engine.task(late[0]), world.heads)
            where = f"request {b}, KV head {h}"
            with pytest.raises(RuntimeError, match=rf'{where}\).* "torch" .* within 0.05 s.*FLUXION_TASK_TIMEOUT_S'):
                world.engine.layer_finish()
            assert 0.05 <= time.monotonic() - start < 30
        else:
            world.engine.layer_finish()
    assert world.engine.stats()["failed_tasks"] == len(late)
    assert world.engine.owners().tolist().count(-1) == len(late)
    poison = torch.full((world.group, world.dim), torch.nan)
    nan = torch.full((world.group,), torch.nan)
    assert not world.engine.task_done(late[0], poison, nan, 0)
    # Repeat while the next layer is open, with the same tasks, some of them held by the same executor.
    world.begin_step(requests)
    _, q, out = world.begin_layer(requests, 0, world.plan(requests))
    claims = [claim for claim in (world.engine.queue_pop(TORCH), world.engine.queue_pop(TORCH)) if claim >= 0]
    for claim in late:
        assert not world.engine.task_done(claim, poison, nan, 0)
        assert not world.engine.task_failed(claim, "too late")
        with pytest.raises(RuntimeError, match="There is no task"):
            world.engine.task(claim)
    for claim in claims:
        assert world.engine.task_done(claim, *world.compute(requests, 0, q, claim))
    world.engine.layer_finish()
    world.check(out, want(world, requests, 0, q))


def test_a_slow_delivery_within_the_time_is_waited_for() -> None:
    world, requests = make(1, 4)
    world.begin_step(requests)
    _, q, out = world.begin_layer(requests, 0, world.plan(requests))
    claim = world.engine.queue_pop(TORCH)
    result = world.compute(requests, 0, q, claim)
    timer = threading.Timer(0.1, lambda: world.engine.task_done(claim, *result))
    start = time.monotonic()
    timer.start()
    world.engine.layer_finish()
    assert time.monotonic() - start >= 0.1
    timer.join()
    world.check(out, want(world, requests, 0, q))


@pytest.mark.parametrize("text", ["0", "-1", "soon", "5s", "inf", "nan", "0x10", "1e7"])
def test_a_bad_timeout_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = make(1, 0)
    with pytest.raises(ValueError, match="FLUXION_TASK_TIMEOUT_S"):
        with_timeout(world, monkeypatch, text)


def test_claims_that_never_were_are_refused() -> None:
    world, requests = make(1, 0)
    world.begin_step(requests)
    world.begin_layer(requests, 0, world.plan(requests))
    o, lse = torch.zeros(world.group, world.dim), torch.zeros(world.group)
    for claim in (-1, 0, 5, 1 << 40, (1 << 62) + 3):
        assert not world.engine.task_done(claim, o, lse, 0)
    with pytest.raises(ValueError, match="o has the shape"):
        world.engine.task_done(world.engine.queue_pop(TORCH), o[:1], lse, 0)


def test_the_pool_may_be_used_while_a_layer_is_open() -> None:
    """The workers are busy, so the caller copies alone."""
    world, requests = make(2, 6)
    world.begin_step(requests)
    _, q, out = world.begin_layer(requests, 0, world.plan(requests))
    pages = torch.tensor(requests[0].pages[:2], dtype=torch.int32)
    k, _ = world.pool.gather(0, pages)
    assert torch.equal(k, requests[0].keys[0][:32].transpose(0, 1))
    other, _ = make(2, 6)
    world.engine.layer_finish()
    world.check(out, want(world, requests, 0, q))
    assert other.engine.stats()["layers"] == 0
