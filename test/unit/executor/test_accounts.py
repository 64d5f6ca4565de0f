"""An engine's accounts against its statistics, and the counters made from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import prometheus_client
import pytest
import torch
from python_device import DeviceWorld
from world import World

from fluxion_sglang.executor.accounts import SAMPLED, Accounts, StepAccounts
from fluxion_sglang.executor.histograms import ReadHistograms
from fluxion_sglang.executor.metrics import EngineMetrics, Kept, described
from fluxion_sglang.executor.phases import Phase
from fluxion_sglang.executor.variant import PLAIN, Variant
from fluxion_sglang.policy import parse_spec


def counted(sampled: int = 1, **settings: object) -> tuple[World, StepAccounts]:
    world = World(**settings)  # type: ignore[arg-type]
    accounts = world.engine.accounts = StepAccounts(world.pool.shape, sampled=sampled)
    return world, accounts


@pytest.mark.parametrize("spec", ["full", "fixed:16:0.05", "streaming", "anchor", "lfps"])
@pytest.mark.parametrize("share_prefixes", [False, True])
def test_reads_add_up_to_the_statistics(spec: str, share_prefixes: bool) -> None:
    world, accounts = counted(share_prefixes=share_prefixes)
    world.extend(1, 900)
    world.share(2, 1, 40)
    world.extend(2, 200)
    world.extend(3, 350)
    policy = parse_spec(spec)
    for rows in ([1], [1, 2], [1, 2], [1, 2, 3], [3], [1]):
        world.decode(rows, [policy] * len(rows))
    found, stats = accounts.totals(), world.engine.stats()
    assert (found.steps, found.tokens) == (6, 10)
    assert len(found.read_bytes) == world.layers and len(found.read_bytes[0]) == world.heads
    assert sum(map(sum, found.read_bytes)) == stats["tile_bytes"] + stats["shared_tile_bytes"]
    token = 2 * world.dim * world.dtype.itemsize
    # The statistics count tokens per query head.
    assert sum(found.middle_bytes) == stats["middle_tokens"] // world.group * token
    assert sum(found.blocks.values()) == 10 * world.layers * world.heads
    if spec == "full":
        assert found.read_bytes == [[middle // world.heads] * world.heads for middle in found.middle_bytes]
    if spec == "streaming":
        assert found.blocks == {0: 10 * world.layers * world.heads}
    assert accounts.totals() == found, "to ask changes nothing"


def test_groups_are_told_apart() -> None:
    world, accounts = counted()
    world.extend(1, 1200)
    policy = parse_spec("fixed:16:0.1")
    want = torch.zeros(world.layers, world.heads, dtype=torch.int64)
    reads = torch.empty(1, world.heads, 2, dtype=torch.int64)
    decode = world.device.decode

    def noted(layer: int, *args: torch.Tensor) -> torch.Tensor:
        out = decode(layer, *args)  # type: ignore[arg-type]
        world.engine.native.reads(reads)
        want[layer] += reads[0, :, 0]
        return out

    world.device.decode = noted  # type: ignore[assignment,method-assign]
    for _ in range(5):
        world.decode([1], [policy])
    assert accounts.totals().read_bytes == want.tolist() and len(set(want.flatten().tolist())) > 1


def test_a_sample_of_the_steps() -> None:
    world, accounts = counted(sampled=SAMPLED)
    world.extend(1, 900)
    for _ in range(2 * SAMPLED + 1):
        world.decode([1])
    found, stats = accounts.totals(), world.engine.stats()
    assert found.steps == found.tokens == 2 * SAMPLED + 1
    assert sum(found.blocks.values()) == 3 * world.layers * world.heads
    assert sum(map(sum, found.read_bytes)) < stats["tile_bytes"] / 2
    assert found.read_bytes == [[middle // world.heads] * world.heads for middle in found.middle_bytes], (
        "the same steps"
    )
    assert found.timed_steps == 2, "the last has no successor yet"


def test_a_failed_step_counts_nothing() -> None:
    world, accounts = counted(policy="fixed:16:0.1")
    world.extend(1, 700)
    world.decode([1])
    before = accounts.totals()
    good, world.pages[1][10] = world.pages[1][10], world.pool.pages + 5
    with pytest.raises(RuntimeError, match="page"):
        world.decode([1])
    after = accounts.totals()
    assert before.steps == 1
    # Only now does the first step have a successor.
    assert replace(after, timed_steps=before.timed_steps, seconds=before.seconds) == before
    world.pages[1][10] = good
    world.decode([1])
    after = accounts.totals()
    assert after.steps == 2 and after.middle_bytes[0] > before.middle_bytes[0]
    assert sum(map(sum, after.read_bytes)) > sum(map(sum, before.read_bytes))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A clock that advances only on request, in seconds."""
    now = [0]
    monkeypatch.setattr("fluxion_sglang.executor.accounts.time.perf_counter_ns", lambda: now[0] * 10**9)

    def passes(seconds: int) -> None:
        now[0] += seconds

    return passes


def test_time_of_steps_that_follow_one_another(clock: Callable[[int], None]) -> None:
    world, accounts = counted(layers=1)
    native = world.engine.native
    native.reads = lambda out: None  # type: ignore[method-assign]

    def step(row: int, length: int) -> None:
        rows, lengths = torch.tensor([row]), torch.tensor([length])
        accounts.begin()
        clock(1)
        accounts.began(_step(world, rows, lengths))
        for part in (Phase.MODEL, Phase.RESIDENT, Phase.FEATURES, Phase.PLAN, Phase.TASKS):
            clock(10 ** (1 + part))
            accounts.lap(part)
        accounts.layer(0, native, torch.zeros(1, world.heads, dtype=torch.int32))

    def seconds() -> list[float]:
        return [round(second) for second in accounts.totals().seconds]

    step(1, 500)
    assert accounts.totals().timed_steps == 0
    clock(7)
    step(1, 501)  # the first step is complete now
    assert accounts.totals().timed_steps == 1 and seconds() == [10, 100, 1001, 10000, 100000, 7]
    clock(1000000)
    step(1, 600)  # another request in the row: this time belongs to no step
    assert accounts.totals().timed_steps == 1
    accounts.interrupted()
    clock(1000000)
    step(1, 601)  # after a prefill
    assert accounts.totals().timed_steps == 1 and seconds()[Phase.BETWEEN] == 7
    clock(3)
    step(1, 602)
    assert accounts.totals().timed_steps == 2 and seconds() == [20, 200, 2002, 20000, 200000, 10]


def _step(world: World, rows: torch.Tensor, lengths: torch.Tensor):  # type: ignore[no-untyped-def]
    from fluxion_sglang.policy.base import DecodeStep

    return DecodeStep.build(rows, lengths, world.placement, world.heads, world.heads * world.group)


def test_prefill_interrupts() -> None:
    world, accounts = counted()
    world.extend(1, 700)
    world.decode([1])
    world.decode([1])
    assert accounts.totals().timed_steps == 1
    world.engine.prefilled(0, 2, 100, torch.zeros(1, world.heads * world.group, world.dim))
    world.decode([1])
    assert accounts.totals().timed_steps == 1


@pytest.mark.parametrize("spec", ["fixed:16:0.1", "anchor"])
def test_residents_of_a_device(spec: str) -> None:
    """Its steps count like those of the CPU."""
    mine, yours = (counted(policy=spec) for _ in range(2))
    for world, _ in (mine, yours):
        world.extend(1, 1200)
        world.extend(2, 700)
    with DeviceWorld(yours[0]) as device:
        for _ in range(3):
            mine[0].decode([1, 2])
            device.decode([1, 2])
        want, got = mine[1].totals(), yours[1].totals()
    assert (got.steps, got.middle_bytes, got.blocks) == (want.steps, want.middle_bytes, want.blocks)
    assert got.read_bytes == want.read_bytes and got.timed_steps == want.timed_steps == 2
    looked = {Phase.RESIDENT, Phase.FEATURES}
    assert all(seconds > 0 for part, seconds in zip(Phase, got.seconds, strict=True) if part not in looked)


def test_layers_with_a_window_have_no_middle() -> None:
    windowed = Variant(window=100)
    world, accounts = counted(layers=3, variants=(windowed, PLAIN, windowed))
    world.extend(1, 900)
    for _ in range(3):
        world.decode([1], [parse_spec("fixed:16:0.1")])
    found, stats = accounts.totals(), world.engine.stats()
    assert (found.steps, found.tokens, found.timed_steps) == (3, 3, 2)
    assert found.middle_bytes[1] == stats["middle_tokens"] // world.group * 2 * world.dim * world.dtype.itemsize > 0
    assert [bool(layer) for layer in found.middle_bytes] == [any(groups) for groups in found.read_bytes]
    assert not found.middle_bytes[0] and not found.middle_bytes[2]
    assert found.blocks == {16: 3 * world.heads}
    assert found.seconds[Phase.TASKS] > 0


def test_nobody_asks_by_default() -> None:
    assert type(World().engine.accounts) is Accounts


# --- the counters ---


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    registry = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Gauge", "Histogram"):
        made = getattr(prometheus_client, kind)
        monkeypatch.setattr(prometheus_client, kind, lambda *a, made=made, **k: made(*a, registry=registry, **k))
    return registry


def test_counters_follow_the_accounts(registry: prometheus_client.CollectorRegistry) -> None:
    world, accounts = counted()
    metrics = EngineMetrics(
        host_pool_tokens=1,
        host_pool_bytes=1,
        resident_tokens_per_request=1,
        kept=Kept(accounts.totals, layers=range(4, 6), groups=range(2, 4), first=False),
    )
    published = metrics._accounts
    assert published is not None
    read = "fluxion_group_read_bytes_total"
    assert registry.get_sample_value(read, {"layer": "5", "group": "3"}) == 0.0, "there from the start"
    world.extend(1, 900)
    for _ in range(3):
        world.decode([1], [parse_spec("fixed:16:0.1")])
        published.publish()
    found = accounts.totals()
    assert registry.get_sample_value("fluxion_decode_steps_total") == 0.0, "another process counts them"
    for layer in range(2):
        labels = {"layer": str(4 + layer)}
        assert registry.get_sample_value("fluxion_layer_middle_bytes_total", labels) == found.middle_bytes[layer]
        for group in range(2):
            value = registry.get_sample_value(read, {**labels, "group": str(2 + group)})
            assert value == found.read_bytes[layer][group] > 0
    assert registry.get_sample_value("fluxion_sampled_groups_total", {"block": "16"}) == 12.0
    assert registry.get_sample_value("fluxion_timed_steps_total") == 2.0
    for part, seconds in zip(Phase, found.seconds, strict=True):
        value = registry.get_sample_value("fluxion_step_seconds_total", {"part": part.name.lower()})
        assert value == pytest.approx(seconds)


def test_a_thread_publishes_what_the_last_step_left(registry: prometheus_client.CollectorRegistry) -> None:
    import time

    world, accounts = counted()
    metrics = EngineMetrics(
        host_pool_tokens=1,
        host_pool_bytes=1,
        resident_tokens_per_request=1,
        kept=Kept(accounts.totals, layers=range(2), groups=range(2)),
    )
    world.extend(1, 500)
    for _ in range(3):
        world.decode([1])
        metrics.update(world.engine.stats())
    deadline = time.monotonic() + 30
    while registry.get_sample_value("fluxion_decode_steps_total") != 3.0:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_counter_is_described(registry: prometheus_client.CollectorRegistry) -> None:
    _, accounts = counted()
    EngineMetrics(
        host_pool_tokens=1,
        host_pool_bytes=1,
        resident_tokens_per_request=1,
        kept=Kept(accounts.totals, layers=range(2), groups=range(2)),
    )
    world = World()
    ReadHistograms(world.engine.native, world.pool.shape)
    there = {f"{f.name}_total" if f.type == "counter" else f.name for f in registry.collect()}
    assert there == set(described())


def test_histograms_of_what_requests_read(registry: prometheus_client.CollectorRegistry) -> None:
    """Each under the name of its policy; only the first word of a client's spec becomes a label."""
    world = World()
    histograms = ReadHistograms(world.engine.native, world.pool.shape, sampled=2)
    world.engine.observers.append(histograms)
    for row, length in ((1, 1200), (2, 900), (3, 100)):
        world.extend(row, length)
    specs = ("full", "fixed:16:0.1", "full")
    for _ in range(4):  # two of them are sampled
        world.decode([1, 2, 3], [parse_spec(spec) for spec in specs])

    def value(name: str, policy: str) -> float | None:
        return registry.get_sample_value(f"fluxion_{name}", {"policy": policy})

    assert value("read_share_count", "full") == 2, "the short one has no middle"
    assert value("read_share_sum", "full") == pytest.approx(2.0)
    assert value("read_bytes_count", "full") == 4 and value("read_bytes_count", "fixed") == 2
    token = 2 * world.layers * world.heads * world.dim * 4
    middle = [world.placement.middle(1200 + step) for step in (1, 3)]
    assert value("read_bytes_sum", "full") == sum(middle) * token
    share = value("read_share_sum", "fixed")
    assert share is not None and 0.2 <= share < 1.0, "heads that share KV read what any of them chose"
    assert value("read_share_count", "fixed:16:0.1") is None


def test_layers_with_a_window_read_no_middle(registry: prometheus_client.CollectorRegistry) -> None:
    """`full` reads the whole middle in the other layers, wherever these are in the model."""
    windowed = Variant(window=100)
    world = World(layers=3, variants=(windowed, PLAIN, windowed))
    world.engine.observers.append(ReadHistograms(world.engine.native, world.pool.shape, sampled=1))
    world.extend(1, 1200)
    world.decode([1])
    labels = {"policy": "full"}
    assert registry.get_sample_value("fluxion_read_share_sum", labels) == pytest.approx(1.0)
    read = world.placement.middle(1201) * 2 * world.heads * world.dim * 4
    assert registry.get_sample_value("fluxion_read_bytes_sum", labels) == read


def test_a_failed_step_is_in_no_histogram(registry: prometheus_client.CollectorRegistry) -> None:
    world = World(policy="fixed:16:0.1")
    world.engine.observers.append(ReadHistograms(world.engine.native, world.pool.shape, sampled=1))
    world.extend(1, 700)
    good, world.pages[1][10] = world.pages[1][10], world.pool.pages + 5
    with pytest.raises(RuntimeError, match="page"):
        world.decode([1])
    world.pages[1][10] = good
    assert registry.get_sample_value("fluxion_read_bytes_count", {"policy": "fixed"}) is None
    world.decode([1])
    assert registry.get_sample_value("fluxion_read_bytes_count", {"policy": "fixed"}) == 1
