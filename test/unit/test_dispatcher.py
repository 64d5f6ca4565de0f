"""The GPU executor's thread beside the native workers, on a device with random delays, failures and hangs."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from native_world import NativeWorld, Plan, Request
from rogue import Rogue, call
from world import World

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.device.chunks import chunk_pages
from fluxion_sglang.device.dispatcher import Dispatcher, DispatcherOptions, GpuExecutor, create
from fluxion_sglang.device.library import DeviceError, DeviceLibrary, load
from fluxion_sglang.device.pinned import Pinned
from fluxion_sglang.device.rates import SIMULATED, Rates
from fluxion_sglang.executor.base import ExecutorId, executors_of
from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.executor.schedule import by_priority
from fluxion_sglang.native import NativeEngine, NativePool
from fluxion_sglang.policy.base import LISTED, Listed

CPU, TORCH, GPU, ANY = 0, 1, 2, 3
ALL = replace(SIMULATED, cpu=1.0)  # the CPU is so slow that the device should take everything
SMALL = DispatcherOptions(streams=2, tasks=4, entries=128, batch_bytes=1 << 15)


class Run:
    """A world whose engine has a dispatcher; its layers are checked against attention in float64."""

    def __init__(
        self,
        world: NativeWorld,
        rogue: Rogue | DeviceLibrary,
        options: DispatcherOptions = SMALL,
        rates: Rates = ALL,
        timeout: str | None = None,
    ) -> None:
        self.world, self.rogue = world, rogue
        if timeout is not None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("FLUXION_TASK_TIMEOUT_S", timeout)
                world.engine = NativeEngine(
                    world.pool.workers, world.pool, q_heads=world.q_heads, sinks=world.placement.sinks,
                    window=world.placement.window, max_requests=1, max_pages=1, attend_union=world.attend_union,
                    chunk_bytes=world.chunk_bytes, share_prefixes=False,
                )  # fmt: skip
        self.dispatcher = Dispatcher(world.engine, rogue.api(), rates, options)

    def layer(self, requests: list[Request], plan: Plan, layer: int = 0) -> list[int]:
        """One layer; the owners of its tasks."""
        world = self.world
        tasks, q, out = world.begin_layer(requests, layer, plan)
        chosen = world.selections(requests, tasks)
        world.engine.layer_finish()
        owners: list[int] = world.engine.owners().tolist()
        assert len(owners) == tasks and -1 not in owners
        world.check(out, world.expected(requests, layer, q, chosen))
        return owners

    def step(self, requests: list[Request], plan: Plan, layer: int = 0) -> list[int]:
        self.world.begin_step(requests)
        return self.layer(requests, plan, layer)

    def failing_step(self, requests: list[Request], plan: Plan, match: str) -> None:
        self.world.begin_step(requests)
        self.world.begin_layer(requests, 0, plan)
        with pytest.raises(RuntimeError, match=match):
            self.world.engine.layer_finish()

    def plan(self, requests: list[Request], owner: int = ANY, blk: int = 16, budget: float = 1.0) -> Plan:
        plan = self.world.plan(requests, blk, budget)
        plan.owner = torch.full_like(plan.blk, owner)
        return plan


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Lists stay as they are while a batch is on its way."""
    yield
    rogue = Rogue()
    assert rogue.changed == 0


def make(seed: int = 0, workers: int = 2, lengths: tuple[int, ...] = (500, 900, 60), **more: object) -> NativeWorld:
    world = NativeWorld(**{"workers": workers, "seed": seed, "heads": 4, "pages": 600, "isa": "scalar", **more})
    world.requests = [world.add(n) for n in lengths]  # type: ignore[attr-defined]
    return world


def requests_of(world: NativeWorld) -> list[Request]:
    return world.requests  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("device", ["rogue", "sim"])
@settings(max_examples=examples(15))
@given(data=st.data())
def test_random_layers_are_what_attention_says(device: str, data: st.DataObject) -> None:
    """Any mix of block sizes, budgets, owners and shapes, shared prefixes, with and without the union."""
    seed = data.draw(st.integers(0, 2**16))
    delay = data.draw(st.sampled_from([0, 50, 1000]))
    rogue = Rogue(seed, delay) if device == "rogue" else load("sim")
    heads, group = data.draw(st.sampled_from([(1, 1), (2, 3), (4, 2), (2, 7)]))
    world = NativeWorld(
        layers=2, heads=heads, group=group, dim=data.draw(st.sampled_from([32, 48, 64])), pages=700, rows=8, seed=seed,
        workers=data.draw(st.integers(1, 3)), attend_union=data.draw(st.booleans()),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )  # fmt: skip
    dice = random.Random(seed)
    requests = [world.add(dice.choice([5, 80, 96, 300, 500, 900])) for _ in range(dice.randint(1, 4))]
    longest = max(requests, key=lambda r: r.length)
    if longest.length >= 300:
        requests.append(world.add(longest.length - 100, parent=longest, shared=160))
    hot = data.draw(st.sampled_from([0, 8, 200])) * world.pool.tensor("tiles", 0)[0, 0].nbytes
    stage = data.draw(st.sampled_from([0, 3, 60])) * world.pool.tensor("tiles", 0)[0, 0].nbytes
    options = replace(SMALL, streams=dice.randint(1, 3), hot_bytes=hot, touches=dice.randint(1, 2))
    options = replace(options, stage_bytes=stage, stage_from=dice.choice([0, 9000]))
    run = Run(world, rogue, options, dice.choice([ALL, SIMULATED]))
    warm = 0 if isinstance(rogue, DeviceLibrary) else rogue.tasks
    before = world.engine.stats()
    counts = [0] * 3
    for _ in range(3):
        world.begin_step(requests)
        for layer in range(world.layers):
            plan = world.plan(requests)
            plan.blk = torch.tensor(dice.choices([0, 16, 32, 64, 128], k=plan.blk.numel())).view_as(plan.blk).int()
            plan.budget = torch.rand(plan.budget.shape) * torch.tensor(dice.choice([0.0, 0.3, 2.0]))
            plan.value = torch.rand(plan.value.shape)
            if dice.random() < 0.5:
                owner = dice.choices([CPU, GPU, ANY, ANY], k=plan.blk.numel())
                plan.owner = torch.tensor(owner, dtype=torch.int32).view_as(plan.blk)
            for owner in run.layer(requests, plan, layer):
                counts[owner] += 1
    run.dispatcher.stop()
    after = world.engine.stats()
    assert [after[f"tasks_{name}"] - before[f"tasks_{name}"] for name in ("cpu", "torch", "gpu")] == counts
    assert run.dispatcher.stats()["tasks"] == counts[GPU]
    assert isinstance(rogue, DeviceLibrary) or rogue.tasks - warm == counts[GPU]
    assert run.dispatcher.stats()["failed_tasks"] == 0 and run.dispatcher.lost == ""


@pytest.mark.parametrize("device", ["rogue", "sim"])
@pytest.mark.parametrize("blk, budget", [(16, 1.0), (32, 0.3)])
def test_a_stage_changes_no_bit(device: str, blk: int, budget: float) -> None:
    """Read in place, from a stage with room for all, for a few, and beside hot tiles."""
    results, moved = [], []
    for tiles, hot in ((0, 0), (500, 0), (3, 0), (500, 40)):
        world = make(seed=7, layers=2, lengths=(500, 900))
        requests = requests_of(world)
        requests.append(world.add(800, parent=requests[1], shared=640))
        bytes_ = world.pool.tensor("tiles", 0)[0, 0].nbytes
        options = DispatcherOptions(  # a layer's tasks are one batch
            tasks=16, entries=1024, batch_bytes=1 << 24, stage_bytes=tiles * bytes_, stage_from=0,
            hot_bytes=hot * bytes_, touches=1,
        )  # fmt: skip
        run = Run(world, Rogue(3, 200) if device == "rogue" else load("sim"), options)
        outs = []
        for _ in range(3):
            world.begin_step(requests)
            for layer in range(world.layers):
                count, q, out = world.begin_layer(requests, layer, run.plan(requests, GPU, blk, budget))
                chosen = world.selections(requests, count)
                world.engine.layer_finish()
                world.check(out, world.expected(requests, layer, q, chosen))
                outs.append(out.clone())
        run.dispatcher.stop()
        stats = run.dispatcher.stats()
        results.append(torch.stack(outs))
        moved.append((stats["tile_bytes"] // bytes_, stats["link_bytes"] // bytes_, stats["staged_tiles"], hot))
    assert all(torch.equal(results[0], other) for other in results[1:])
    (read, crossed, staged, _), whole, few, _ = moved
    assert read == crossed > staged == 0
    assert 0 < whole[1] == whole[2] < read, "each tile of a batch once, though two requests have it"
    assert few[2] > 0 and whole[1] < few[1] <= read


def test_a_stage_belongs_to_its_batch_until_it_has_ended() -> None:
    """The first batch hangs with its tiles staged, while others are staged and end."""
    world, rogue = make(workers=1, chunk_bytes=None), Rogue()
    tile_bytes = world.pool.tensor("tiles", 0)[0, 0].nbytes
    options = replace(SMALL, tasks=1, stage_bytes=64 * tile_bytes, stage_from=0)
    run = Run(world, rogue, options, timeout="0.3")
    requests = requests_of(world)
    rogue.hang()
    run.failing_step(requests, run.plan(requests, GPU), "within 0.3 s|did not finish a batch in time")
    wait_for(run, "quarantined_streams", 1)
    for _ in range(3):
        assert GPU in run.step(requests, run.plan(requests, GPU))
    rogue.release()
    run.dispatcher.stop()
    assert rogue.changed == 0 and run.dispatcher.stats()["staged_tiles"] > 0


def test_a_gather_that_is_refused_loses_the_device() -> None:
    world, rogue = make(), Rogue()
    run = Run(world, rogue, replace(SMALL, stage_bytes=1 << 20, stage_from=0))
    requests = requests_of(world)
    rogue.fail("copy")
    run.failing_step(requests, run.plan(requests, GPU), "the device could not gather the tiles of a batch")
    assert set(run.step(requests, run.plan(requests))) == {CPU}
    run.dispatcher.stop()


def test_the_rates_say_whether_tiles_are_staged() -> None:
    for stage, used in ((0.0, False), (0.5e9, False), (4e9, True)):
        world = make()
        run = Run(world, Rogue(), rates=replace(ALL, stage=stage))
        run.step(requests_of(world), run.plan(requests_of(world), GPU))
        run.dispatcher.stop()
        assert (run.dispatcher.stats()["staged_tiles"] > 0) == used


def test_batches_say_when_they_were_on_their_way() -> None:
    world = make()
    run = Run(world, Rogue(1, 300))
    requests = requests_of(world)
    before = time.monotonic_ns()
    for _ in range(3):
        run.step(requests, run.plan(requests, GPU))
    run.dispatcher.stop()
    times, stats = run.dispatcher.times(), run.dispatcher.stats()
    assert len(times) == stats["batches"] > 0 and len(run.dispatcher.times()) == 0
    submitted, done, tasks, bytes_ = times.unbind(1)
    assert bool((submitted >= before).all()) and bool((done >= submitted).all())
    assert bool((done.diff() >= 0).all()) and int(done.max()) <= time.monotonic_ns()
    assert int(tasks.sum()) == stats["tasks"] and int(bytes_.sum()) == stats["tile_bytes"]


def test_reads_are_counted_as_the_cpu_counts_them() -> None:
    stats = []
    for owner in (CPU, GPU):
        world = make(attend_union=False)
        run = Run(world, Rogue())
        for _ in range(3):
            assert set(run.step(requests_of(world), run.plan(requests_of(world), owner, 32, 0.3))) == {owner}
        run.dispatcher.stop()
        stats.append({n: v for n, v in world.engine.stats().items() if n not in ("tasks_cpu", "tasks_gpu")})
        if owner == GPU:
            assert (
                run.dispatcher.stats()["tile_bytes"] == run.dispatcher.stats()["link_bytes"] == stats[0]["tile_bytes"]
            )
    assert stats[0] == stats[1]


def test_what_a_device_would_do_badly_stays_with_the_cpu() -> None:
    world = make()
    run = Run(world, Rogue())
    requests = requests_of(world)
    plan = run.plan(requests, GPU, 1, 0.1)
    assert set(run.step(requests, plan)) == {CPU}
    world.begin_step(requests)
    plan = run.plan(requests, ANY, LISTED)
    pages = list(range(world.placement.sink_pages, world.placement.sink_pages + 3))
    offsets = torch.tensor([0] + [3] * plan.blk.numel())
    masks = torch.full((3, world.group), 0x0F0F, dtype=torch.int32).to(torch.uint16)
    plan.listed = Listed(offsets, torch.tensor(pages, dtype=torch.int32), masks)
    assert run.layer(requests, plan) == [CPU]
    run.dispatcher.stop()
    assert run.step(requests, run.plan(requests, ANY, 1, 0.1)).count(CPU) > 0


def test_the_rates_say_who_reads() -> None:
    for rates, owner in ((ALL, GPU), (replace(SIMULATED, link=1e-9, hot=1e-9), CPU), (replace(ALL, link=0.0), CPU)):
        world = make(lengths=(900, 900))
        run = Run(world, Rogue(), rates=rates)
        assert set(run.step(requests_of(world), run.plan(requests_of(world)))) == {owner}
        assert set(run.step(requests_of(world), run.plan(requests_of(world), CPU))) == {CPU}
        run.dispatcher.stop()


@pytest.mark.parametrize("spin", ["0", "1000"])
def test_an_idle_dispatcher_ends(monkeypatch: pytest.MonkeyPatch, spin: str) -> None:
    """Whenever it is told to: while it looks, and while it sleeps."""
    monkeypatch.setenv("FLUXION_SPIN_US", spin)
    world = make()
    for turn in range(40):
        run = Run(world, Rogue())
        if turn % 2:
            run.step(requests_of(world), run.plan(requests_of(world), GPU))
        time.sleep(random.Random(turn).choice([0, 1e-5, 2e-3]))
        run.dispatcher.stop()


def test_a_worker_waits_for_room_no_longer_than_for_a_task() -> None:
    world = make(lengths=(500,) * 30, heads=8, rows=32, pages=1200)
    rogue = Rogue()
    run = Run(world, rogue, replace(SMALL, streams=1, tasks=1), timeout="0.3")
    rogue.hang()
    start = time.monotonic()
    run.failing_step(
        requests_of(world), run.plan(requests_of(world), GPU), "did not finish a batch in time|within 0.3 s"
    )
    assert time.monotonic() - start < 30
    rogue.release()
    run.dispatcher.stop()


def test_tasks_for_the_device_alone_leave_the_others_share_as_it_is() -> None:
    """What the plan gave to the device counts as work that it has, and not as a part of what is divided."""
    world = make(lengths=(900, 900))
    requests = requests_of(world)
    run = Run(world, Rogue(), rates=replace(ALL, cpu=1.0))
    plan = run.plan(requests)
    plan.owner = torch.tensor([GPU, ANY, GPU, ANY, ANY, ANY, CPU, ANY], dtype=torch.int32).view_as(plan.blk)
    owners = run.step(requests, plan)
    assert owners.count(GPU) == 7 and owners.count(CPU) == 1
    run.dispatcher.stop()


def test_a_task_for_the_device_waits_for_room() -> None:
    """More of them than there can be offers and batches."""
    world = make(lengths=(500,) * 30, heads=8, rows=32, pages=1200)
    run = Run(world, Rogue(delay_us=300), replace(SMALL, streams=1, tasks=1))
    assert set(run.step(requests_of(world), run.plan(requests_of(world), GPU))) == {GPU}
    run.dispatcher.stop()


@pytest.mark.parametrize(
    "more, flash, by_flashinfer",
    [
        pytest.param({}, True, True, id="staged"),
        pytest.param({}, False, False, id="the option says no"),
        pytest.param({"attend_union": False}, True, False, id="masks"),
        pytest.param({"dtype": torch.float32}, True, False, id="float32"),
    ],
)
def test_flashinfer_attends_to_batches_that_are_all_in_device_memory(
    more: dict[str, object], flash: bool, by_flashinfer: bool
) -> None:
    world = make(**{"dim": 64, "dtype": torch.bfloat16, **more})
    run = Run(world, load("sim"), replace(SMALL, stage_from=0, flash=flash))
    requests = requests_of(world)
    run.step(requests, run.plan(requests, GPU, budget=0.4))
    run.dispatcher.stop()
    stats = run.dispatcher.stats()
    assert stats["failed_tasks"] == 0 and stats["staged_tiles"] > 0
    assert stats["flashinfer_batches"] == (stats["batches"] if by_flashinfer else 0)


@pytest.mark.parametrize("stage, batches", [(1 << 20, 2), (0, 1)])
def test_all_kernels_run_before_the_first_layer(stage: int, batches: int) -> None:
    """Those for tiles in host memory, and those for tiles that are all on the device, where there can be any."""
    world, rogue = make(), Rogue()
    dispatcher = Dispatcher(world.engine, rogue.api(), ALL, replace(SMALL, stage_bytes=stage, stage_from=0))
    assert rogue.calls("attend") == batches * SMALL.streams
    assert (rogue.hot_reads > 0) == (batches == 2)
    dispatcher.stop()


def test_a_middle_longer_than_a_batch_stays_with_the_cpu() -> None:
    world = make()
    run = Run(world, Rogue(), replace(SMALL, entries=16))
    requests = requests_of(world)
    assert set(run.step(requests, run.plan(requests))) == {CPU}
    assert set(run.step(requests, run.plan(requests, GPU))) == {CPU}
    run.dispatcher.stop()


@pytest.mark.parametrize("what", ["attend", "signal", "copy"])
def test_a_device_that_refuses_work_is_lost_and_the_engine_goes_on(what: str) -> None:
    world = make()
    rogue = Rogue(delay_us=200)
    run = Run(world, rogue, replace(SMALL, hot_bytes=1 << 20, touches=1))
    requests = requests_of(world)
    assert set(run.step(requests, run.plan(requests, GPU))) == {GPU}
    rogue.fail(what)
    if what == "copy":
        for request in requests:  # what is hot already makes no copy
            world.free_rows.append(request.row)
        requests = [world.add(700)]
    run.failing_step(requests, run.plan(requests, GPU), 'executor "gpu" failed on .* the device could not .*asked for')
    assert "the test asked for a failure" in run.dispatcher.lost
    assert set(run.step(requests, run.plan(requests))) == {CPU}
    assert set(run.step(requests, run.plan(requests, GPU))) == {CPU}, "what was the device's is the CPU's now"
    assert set(run.step(requests, run.plan(requests, CPU))) == {CPU}
    run.dispatcher.stop()
    assert run.dispatcher.stats()["failed_tasks"] > 0


def test_a_device_that_is_lost_on_the_way_fails_what_it_has() -> None:
    """Nothing is launched after the loss: it shows when somebody asks about a batch that does not end."""
    world = make()
    rogue = Rogue(delay_us=50_000)
    run = Run(world, rogue)
    requests = requests_of(world)
    launched = rogue.calls("attend")
    world.begin_step(requests)
    world.begin_layer(requests, 0, run.plan(requests, GPU))
    while rogue.calls("attend") == launched:
        time.sleep(1e-4)
    rogue.drop()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="fell off the bus"):
        world.engine.layer_finish()
    assert time.monotonic() - start < 30, "it waited for the time-out of a minute"
    assert set(run.step(requests, run.plan(requests))) == {CPU}
    run.dispatcher.stop()


def wait_for(run: Run, stat: str, value: int) -> None:
    deadline = time.monotonic() + 30
    while run.dispatcher.stats()[stat] != value:
        assert time.monotonic() < deadline, f"{stat} is {run.dispatcher.stats()[stat]}"
        time.sleep(1e-3)


def recover(run: Run) -> None:
    """Layers until every stream works again: the dispatcher looks when it is awake."""
    requests, deadline = requests_of(run.world), time.monotonic() + 30
    while run.dispatcher.stats()["quarantined_streams"]:
        run.step(requests, run.plan(requests))
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_a_batch_that_hangs_fails_its_layer_and_keeps_its_buffers() -> None:
    world = make()
    rogue = Rogue()
    run = Run(world, rogue, timeout="0.5")
    requests = requests_of(world)
    assert set(run.step(requests, run.plan(requests, GPU))) == {GPU}
    rogue.hang()
    run.failing_step(requests, run.plan(requests, GPU), "within 0.5 s|did not finish a batch in time")
    wait_for(run, "quarantined_streams", 1)
    assert run.dispatcher.stats()["late_batches"] >= 1
    for _ in range(4):
        assert set(run.step(requests, run.plan(requests, GPU))) == {GPU}, "the other stream works"
    rogue.release()
    recover(run)
    for _ in range(4):
        assert set(run.step(requests, run.plan(requests, GPU))) == {GPU}
    run.dispatcher.stop()
    assert run.dispatcher.lost == ""


def test_with_every_stream_hanging_the_cpu_does_everything() -> None:
    world = make()
    rogue = Rogue()
    run = Run(world, rogue, replace(SMALL, streams=1), timeout="0.5")
    requests = requests_of(world)
    rogue.hang()
    run.failing_step(requests, run.plan(requests, GPU), "within 0.5 s|did not finish a batch in time")
    wait_for(run, "quarantined_streams", 1)
    for _ in range(3):
        assert set(run.step(requests, run.plan(requests))) == {CPU}
    time.sleep(0.05)
    used = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - used < 0.2, "the dispatcher sleeps while nothing can be done"
    rogue.release()
    recover(run)
    assert set(run.step(requests, run.plan(requests, GPU))) == {GPU}
    run.dispatcher.stop()


@pytest.mark.parametrize("seed", range(3))
def test_batches_that_end_about_when_time_is_up(seed: int) -> None:
    """A layer is right or an error, whoever was first: the engine that revokes, the thread that gives up, or the
    device."""
    world = make(seed)
    rogue = Rogue(seed, delay_us=40_000)
    options = replace(SMALL, tasks=1, batch_bytes=1, streams=3, hot_bytes=1 << 18, touches=1)
    run = Run(world, rogue, options, timeout="0.06")
    requests, ends = requests_of(world), {True: 0, False: 0}
    for step in range(200):
        # Where the machine is busy, the CPU may do many layers alone before the device is late for one.
        if step >= 12 and ends[False]:
            break
        world.begin_step(requests)
        plan = run.plan(requests, random.Random(seed).choice([GPU, ANY]))
        tasks, q, out = world.begin_layer(requests, 0, plan)
        chosen = world.selections(requests, tasks)
        try:
            world.engine.layer_finish()
        except RuntimeError as error:
            assert "within 0.06 s" in str(error) or "did not finish a batch in time" in str(error)
            ends[False] += 1
        else:
            world.check(out, world.expected(requests, 0, q, chosen))
            ends[True] += 1
    rogue.release()
    run.dispatcher.stop()
    assert ends[False] > 0
    assert run.dispatcher.lost == ""


def test_stop_does_not_wait_for_ever_and_gives_nothing_back_that_is_in_use() -> None:
    world = make()
    rogue = Rogue()
    run = Run(world, rogue, timeout="0.5")
    before = rogue.held
    rogue.hang()
    requests = requests_of(world)
    run.failing_step(requests, run.plan(requests, GPU), "within 0.5 s|did not finish a batch in time")
    start = time.monotonic()
    run.dispatcher.stop()
    assert time.monotonic() - start < 10
    assert rogue.held == before, "the hanging batch may still write"
    rogue.release()
    assert set(run.step(requests, run.plan(requests, CPU))) == {CPU}


def test_stop_gives_everything_back() -> None:
    rogue = Rogue()
    before = rogue.held
    world = make()
    run = Run(world, rogue, replace(SMALL, hot_bytes=1 << 20))
    assert rogue.held > before
    run.step(requests_of(world), run.plan(requests_of(world), GPU))
    run.dispatcher.stop()
    run.dispatcher.stop()
    assert rogue.held == before
    run.step(requests_of(world), run.plan(requests_of(world)))


@pytest.mark.parametrize("what", ["allocate", "stream", "attend", "signal"])
def test_a_device_that_cannot_work_is_an_error_at_once(what: str) -> None:
    world = make()
    for n in range(1, 3):
        rogue = Rogue()
        before = rogue.held
        rogue.fail(what, n)
        with pytest.raises(RuntimeError, match=r"the device could not .*the test asked for a failure"):
            Dispatcher(world.engine, rogue.api(), ALL, SMALL)
        assert rogue.held == before


def test_what_cannot_be_is_refused() -> None:
    world = make()
    for bad in ({"streams": 0}, {"tasks": 0}, {"entries": 0}, {"hot_bytes": -1}, {"touches": 3}):
        with pytest.raises(ValueError, match="at least one stream"):
            Dispatcher(world.engine, Rogue().api(), ALL, replace(SMALL, **bad))
    with pytest.raises(ValueError, match="API version 4"):
        Dispatcher(world.engine, call("rogue_foreign_api"), ALL, SMALL)
    with pytest.raises(ValueError, match="address"):
        Dispatcher(world.engine, 0, ALL, SMALL)


@pytest.mark.parametrize("touches", [1, 2])
def test_hot_tiles_are_read_where_they_are_copied_to(touches: int) -> None:
    world = make(workers=1)
    rogue = Rogue(delay_us=100)
    run = Run(world, rogue, replace(SMALL, hot_bytes=1 << 22, touches=touches))
    requests, warm = requests_of(world), rogue.hot_reads
    for _ in range(8):
        run.step(requests, run.plan(requests, GPU, 16, 0.3))
        time.sleep(5e-3)  # copies arrive
    stats = run.dispatcher.stats()
    assert stats["hot_hits"] == rogue.hot_reads - warm > 0
    tile = world.pool.tensor("tiles", 0)[0, 0].nbytes
    assert stats["tile_bytes"] - stats["link_bytes"] == stats["hot_hits"] * tile
    assert stats["hot_hits"] + stats["hot_misses"] == stats["tile_bytes"] // tile
    run.dispatcher.stop()


def written_by_a_device(pool: NativePool) -> Pinned:
    """From now on `pool.append` is a device's: its kernel writes, and the host adopts."""
    library, pinned = load("sim"), Pinned(load("sim"), pool.tensor("memory", 0))

    def append(layer: int, pages: torch.Tensor, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        chunk = chunk_pages(ExtendRequest(0, start, start + len(k), 0, pages))
        tensors = (pool.tensor(name, layer) for name in ("tiles", "meta0", "moments"))
        library.write_pages(0, *tensors, chunk, k, v)
        pool.adopt(layer, pages, start, len(k))

    pool.append = append  # type: ignore[method-assign]
    return pinned


@pytest.mark.parametrize("writer", ["host", "device"])
@pytest.mark.parametrize("slots", [4, 1000])
def test_a_page_that_is_somebody_elses_now_is_not_served_from_its_copy(slots: int, writer: str) -> None:
    world = make(workers=1, lengths=())
    pinned = written_by_a_device(world.pool) if writer == "device" else None
    tile = world.pool.tensor("tiles", 0)[0, 0].nbytes
    run = Run(world, Rogue(delay_us=50), replace(SMALL, hot_bytes=slots * tile, touches=1))
    for _ in range(6):
        requests = [world.add(n) for n in (400, 300)]
        for _ in range(3):
            run.step(requests, run.plan(requests, GPU))
        for request in requests:  # the next ones have the same pages, with other tokens
            world.free += request.pages[::-1]
            world.free_rows.append(request.row)
    stats = run.dispatcher.stats()
    run.dispatcher.stop()
    if pinned is not None:
        pinned.release()
    if slots == 1000:
        assert stats["hot_hits"] > 0 and stats["hot_stale"] > 0
    else:
        assert stats["hot_evictions"] > 0


@pytest.mark.parametrize("seed", range(4))
def test_abandoned_layers_leave_nothing_behind(seed: int) -> None:
    """Layers that end at any moment, steps that replace them, pages that change hands meanwhile."""
    world = make(seed, lengths=(500, 700))
    rogue = Rogue(seed, delay_us=500)
    run = Run(world, rogue, replace(SMALL, hot_bytes=1 << 18, touches=1 + seed % 2))
    dice = random.Random(seed)
    requests = requests_of(world)
    for turn in range(30):
        plan = run.plan(requests, dice.choice([GPU, ANY]), dice.choice([16, 64]), dice.choice([0.2, 1.0]))
        world.begin_step(requests)
        if turn % 3 == 2:
            run.layer(requests, plan)
            continue
        world.begin_layer(requests, 0, plan)
        time.sleep(dice.choice([0, 1e-4, 2e-3]))
        world.engine.abandon()
        for request in requests:  # the token of the abandoned layer was written or not: the next step writes it anew
            request.keys[0], request.values[0] = request.keys[0][:-1], request.values[0][:-1]
        if dice.random() < 0.3:
            gone = requests.pop(0)
            world.free += gone.pages[::-1]
            world.free_rows.append(gone.row)
            requests.append(world.add(dice.choice([300, 600])))
    run.dispatcher.stop()
    assert run.dispatcher.lost == ""
    assert run.dispatcher.stats()["failed_tasks"] == 0


def test_the_option_brings_the_executor(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("FLUXION_DEVICE", "sim")
    world = World(rows=2)
    config = FluxionConfig.parse('{"executors": "cpu+gpu", "hot_tiles_gb": 0.001}')
    with caplog.at_level("INFO"):
        (executor,) = executors_of(config, world.pool)
        assert isinstance(executor, GpuExecutor)
        executor.bind(world.engine.native, world.engine.q_heads)
    assert [record.message for record in caplog.records if "32768 tokens" in record.message]
    assert executor.dispatcher is not None
    executor.dispatcher.stop()
    monkeypatch.setenv("FLUXION_DEVICE", "")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError):
            executors_of(config, world.pool)


def test_a_lost_device_is_said_once_and_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    rogue = Rogue()
    world = World(rows=2, layers=1, scheduler="uniform")
    executor = GpuExecutor(SimpleNamespace(api=rogue.api, backend="sim"), SMALL)  # type: ignore[arg-type]
    executor.bind(world.engine.native, world.engine.q_heads)
    world.engine.executors = [executor]
    world.engine._executor_ids = [ExecutorId.CPU, ExecutorId.GPU]
    world.engine._owner = None
    world.extend(1, 700)
    world.decode([1])
    assert world.engine.stats()["gpu_tasks"] == 1
    rogue.fail("attend")
    with pytest.raises(RuntimeError, match="the test asked for a failure"):
        world.decode([1])
    world.keys[1][0], world.values[1][0] = world.keys[1][0][:700], world.values[1][0][:700]
    world.engine.scheduler = by_priority
    world.extend(1, 1)
    for _ in range(3):
        ((got, want),) = world.decode([1])
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "Fluxion: the device could not take a batch of attention (the test asked for a failure); tasks are computed by "
        "the CPU alone from now on"
    ]


def test_a_library_without_flashinfer_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLUXION_DEVICE", "sim")
    pool = SimpleNamespace(pages=8)
    for kernels, has, told in (("flashinfer", True, 0), ("fluxion", False, 0), ("flashinfer", False, 1)):
        caplog.clear()
        monkeypatch.setattr(DeviceLibrary, "has_flashinfer", has)
        create(FluxionConfig.parse(f'{{"executors": "cpu+gpu", "gpu_kernels": "{kernels}"}}'), pool)
        assert sum("built without FlashInfer" in record.message for record in caplog.records) == told
