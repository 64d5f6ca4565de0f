"""The decode engine with every set of executors, against exact attention and against each other."""

from __future__ import annotations

import itertools

import pytest
import torch
from definitions.torch_executor import block_pages
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from world import World, on_both, same_reads

from fluxion_lab.schedulers import by_length, evenly, one_alone
from fluxion_sglang.executor.base import ExecutorId
from fluxion_sglang.executor.decode import Scheduler
from fluxion_sglang.executor.host import HostDevice
from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.policy.base import DecodeStep, LayerPlan

LENGTHS = [1, 15, 64, 65, 319, 320, 335, 336, 337, 500, 1111, 2047]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("executors", ["cpu", "cpu+torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_is_exact_at_every_kind_of_length(executors: str, dtype: torch.dtype) -> None:
    world = World(dtype=dtype, executors=executors, rows=len(LENGTHS) + 1, tokens=16384)
    for row, length in enumerate(LENGTHS, start=1):
        world.extend(row, length)
    for _ in range(20):
        for got, want in world.decode(list(range(1, len(LENGTHS) + 1))):
            assert error(got, want) < (1e-5 if dtype == torch.float32 else 5e-3)


@settings(max_examples=examples(25))
@given(
    blk=st.sampled_from([16, 32, 64, 128]), budget=st.floats(0.01, 1.0), union=st.booleans(),
    lengths=st.lists(st.integers(337, 1500), min_size=1, max_size=3), seed=st.integers(0, 2**16),
    spread=st.sampled_from([1.0, 0.5]),
)  # fmt: skip
def test_native_and_torch_select_and_attend_alike(
    blk: int, budget: float, union: bool, lengths: list[int], seed: int, spread: float
) -> None:
    outs, stats = on_both(lengths, 3, policy=f"fixed:{blk}:{budget}", attend_union=union, seed=seed, spread=spread)
    assert stats[0]["tokens_read"] == stats[1]["tokens_read"]
    torch.testing.assert_close(*outs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("eps", [0.000001, 0.05, 0.3])
def test_native_and_torch_read_by_sketches_alike(eps: float) -> None:
    """The engine searches its bound in a few steps, and skips pages that it has skimmed."""
    outs, stats = on_both((1500, 345, 800), 3, policy=f"sketch:{eps}")
    assert stats[0]["tokens_read"] == pytest.approx(stats[1]["tokens_read"], rel=0.1) and stats[1]["tokens_read"] > 0
    assert all(error(native, torch_.double()) < max(1e-5, eps) for native, torch_ in zip(*outs, strict=True))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
@pytest.mark.parametrize("union", [False, True])
@pytest.mark.parametrize("spec", ["psa:0.9:16:quest", "psa:0.98:32", "psa:0.995:128:mean", "psa:0.2:64:quest"])
def test_native_and_torch_stop_alike(spec: str, union: bool, seed: int) -> None:
    outs, stats = on_both((1500, 345, 800), 3, policy=spec, attend_union=union, seed=seed)
    for name in ("tokens_read", "tile_bytes"):
        assert stats[0][name] == stats[1][name] > 0
    torch.testing.assert_close(*outs, atol=2e-5, rtol=2e-5)


@settings(max_examples=examples(20))
@given(
    budget=st.floats(0.0005, 1.0), union=st.booleans(),
    lengths=st.lists(st.integers(300, 1500), min_size=1, max_size=3),
    group=st.sampled_from([1, 4, 7]), dim=st.sampled_from([32, 64, 80]), seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_native_and_torch_find_the_same_best_tokens(
    budget: float, union: bool, lengths: list[int], group: int, dim: int, seed: int, dtype: torch.dtype
) -> None:
    """On integers the oracle's selection is determined, ties included: same reads, same outputs."""
    drawn = {"seed": seed, "whole": True, "dtype": dtype, "group": group, "dim": dim}
    outs, stats = on_both(lengths, 2, policy=f"oracle:{budget}", attend_union=union, **drawn)
    same_reads(stats)
    tolerance = 2e-5 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(*outs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("executors", ["cpu", "cpu+torch"])
@pytest.mark.parametrize("scheduler", [None, one_alone, evenly, by_length])
def test_every_scheduler_gives_the_same_attention(executors: str, scheduler: Scheduler | None) -> None:
    world = World(executors=executors, scheduler=scheduler, workers=1, layers=1, rows=7, tokens=16384)
    for row, length in enumerate((2047, 336, 500, 320, 1111, 900), start=1):
        world.extend(row, length)
    for _ in range(3):
        for got, want in world.decode([1, 2, 3, 4, 5, 6]):
            assert error(got, want) < 1e-5
        cpu, torch_ = (world.engine.native.owners().tolist().count(id) for id in (ExecutorId.CPU, ExecutorId.TORCH))
        assert cpu + torch_ == 10, "two heads of the five requests that have a middle"
        if executors == "cpu" or scheduler is one_alone:
            assert torch_ == 0
        elif scheduler is None:
            assert cpu == 0, "the one worker begins when the torch executor is done"
        else:
            # The two tasks of about 1,728 tokens come nearest to half of about 6,560.
            assert cpu == (5 if scheduler is evenly else 2)


IDS = [ExecutorId.CPU, ExecutorId.TORCH]


@settings(max_examples=examples(200))
@given(
    lengths=st.lists(st.integers(1, 5000), max_size=6), heads=st.integers(1, 5), group=st.integers(1, 4),
    executors=st.integers(1, 2), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_tasks_are_divided_as_the_scheduler_says(
    lengths: list[int], heads: int, group: int, executors: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    step = DecodeStep.build(torch.arange(len(lengths)), torch.tensor(lengths), Placement(), heads, heads * group)
    budget = torch.rand(step.batch, step.q_heads, generator=random)
    plan = LayerPlan(
        16 * torch.randint(0, 3, (step.batch, heads), generator=random, dtype=torch.int32),
        budget * (budget > 0.5),
        torch.rand(step.batch, heads, generator=random),
    )
    ids = IDS[:executors]
    tasks = [
        (b, h)
        for b in range(step.batch)
        for h in range(heads)
        if step.middle[b] and plan.blk[b, h] and plan.budget[b, h * group : (h + 1) * group].any()
    ]
    for scheduler in (one_alone, evenly, by_length):
        value, owner = scheduler(plan, step, ids)
        assert owner.dtype == torch.int32 and owner.shape == plan.blk.shape
        assert value.dtype == torch.float32 and value.shape == plan.blk.shape
        assert not value.any(), "in the order of arrival"
        owners = [int(owner[at]) for at in tasks]
        assert set(owners) <= set(ids)
        counts = [owners.count(id) for id in ids]
        if scheduler is one_alone:
            assert counts == [len(tasks)] + [0] * (executors - 1)
        elif scheduler is evenly:
            assert max(counts) - min(counts) <= 1
        else:
            tokens = [int(step.middle[b]) for b, _ in tasks]
            of = [[n for n, owner in zip(tokens, owners, strict=True) if owner == id] for id in ids]
            for longer, shorter in itertools.combinations([part for part in of if part], 2):
                assert min(longer) >= max(shorter)
            for part in of:
                assert abs(sum(part) - sum(tokens) / executors) <= max(tokens, default=0)


@pytest.mark.parametrize("executors", ["cpu", "cpu+torch"])
def test_the_oracle_reads_one_token_at_least_and_everything_at_one(executors: str) -> None:
    for budget in (1e-9, 1.0):
        world = World(policy=f"oracle:{budget}", executors=executors, layers=1)
        for row, length in enumerate((334, 335, 350, 900), start=1):  # middles of 0, 16, 16 and 576 tokens
            world.extend(row, length)
        ((got, want),) = world.decode([1, 2, 3, 4])
        heads = world.heads * world.group
        middles = [world.placement.middle(n) for n in (335, 336, 351, 901)]
        assert middles == [0, 16, 16, 576]
        read = world.engine.native.stats()["tokens_read"]
        assert read == (heads * sum(middles) if budget == 1.0 else 3 * heads)
        assert error(got[0], want[0]) < 1e-5
        assert (error(got[3], want[3]) < 1e-5) == (budget == 1.0)


@pytest.mark.parametrize("executors", ["cpu", "cpu+torch"])
def test_streaming_is_attention_to_what_is_resident(executors: str) -> None:
    world = World(policy="streaming", executors=executors)
    for row, length in enumerate((100, 336, 1500), start=1):
        world.extend(row, length)
    for layer, (got, want) in enumerate(world.decode([1, 2, 3])):
        assert error(got[0], want[0]) < 1e-5, "nothing but residents yet"
        for b, row in enumerate((1, 2, 3)):
            n = world.length(row)
            start = world.placement.window_start(n)
            at = [*range(min(world.placement.sinks, n)), *range(start, n)]
            keys, values = world.keys[row], world.values[row]
            world.keys[row] = [k[at] for k in keys]
            world.values[row] = [v[at] for v in values]
            q = world.queries[layer][b]
            assert error(got[b], world.exact(row, layer, q)) < 1e-5
            world.keys[row], world.values[row] = keys, values
    stats = world.engine.native.stats()
    assert stats["tasks"] == stats["tokens_read"] == stats["tile_bytes"] == stats["metadata_bytes"] == 0
    assert stats["middle_tokens"] > 0


def test_the_engine_recovers_from_a_failed_layer() -> None:
    world = World()
    world.extend(1, 700)
    good = world.pages[1][10]
    world.pages[1][10] = world.pool.pages + 5
    with pytest.raises(RuntimeError, match="page"):
        world.decode([1])
    world.pages[1][10] = good
    for got, want in world.decode([1]):
        assert error(got, want) < 1e-5


def test_stale_rows_are_named_and_heal() -> None:
    world = World()
    world.extend(1, 900)
    rows, generation, length = torch.tensor([1]), torch.tensor([4]), torch.tensor([900])
    assert world.windows.stale(rows, generation, length) == [0]
    world.windows.mark(rows, generation, length)
    assert world.windows.stale(rows, generation, length) == []
    assert world.windows.stale(rows, generation + 1, length) == [0]
    assert world.windows.stale(rows, generation, length + 1) == [0]
    for layer in world.windows.layers:
        layer.fill_(float("nan"))
    world.windows.heal(1, 900, torch.tensor(world.pages[1], dtype=torch.int32))
    for got, want in world.decode([1]):
        assert error(got, want) < 1e-5


def test_a_pass_of_prompts_with_a_budget() -> None:
    """The requests of the pass are independent; the pool holds them, and the device reports them in batch order."""
    world = World(layers=1, rows=4, seed=3)
    device = HostDevice(world.pool, world.windows, world.engine, prefill_budget=0.2)
    counts, offset, requests = (1500, 0, 1200), 0, []
    for row, count in enumerate(counts, start=1):
        requests.append(ExtendRequest(row, 0, count, offset, world.page_list(row, max(count, 1)), queries=1))
        offset += count
    k, v = (world.randn(offset, world.heads, world.dim) for _ in range(2))
    q = world.randn(offset, world.heads * world.group, world.dim)
    told: list[tuple[int, int, torch.Size]] = []
    device.begin_extend(requests, lambda layer, index, queries, scale: told.append((layer, index, queries.shape)))

    out = device.extend(0, q, k, v, world.scale)

    assert told == [(0, i, q[:1].shape) for i in (0, 2)]
    for request in (requests[0], requests[2]):
        own = request.tokens
        want, exact = torch.empty_like(q[own]), torch.empty_like(q[own])
        assert world.pool.attend_chunk(0, request.pages, 0, q[own], world.scale, want, 0.2) < 1
        world.pool.attend_chunk(0, request.pages, 0, q[own], world.scale, exact)
        assert torch.equal(out[own], want)
        assert error(want[-1], exact[-1]) < 1e-5
        assert error(want, exact) > 1e-3


@pytest.mark.parametrize("policy", ["full", "fixed:16:0.2", "sketch:0.1"])
def test_a_decode_step_that_rides_along(policy: str) -> None:
    """A prompt pass with a decode step inside equals the two in sequence."""
    outs = []
    for mixed in (False, True):
        world = World(policy=policy, seed=5)
        for row, length in ((1, 900), (2, 500), (3, 70)):
            world.extend(row, length)
        rows, lengths, new = torch.tensor([1, 2]), torch.tensor([901, 501]), 130
        table = world.table([1, 2], [901, 501])
        chunk = ExtendRequest(3, 70, 70 + new, 0, world.page_list(3, 70 + new), queries=1)
        told: list[int] = []
        device, found = world.device, []
        heads = world.heads * world.group, world.heads, world.heads
        tokens = [[world.randn(new + 2, count, world.dim) for count in heads] for _ in range(world.layers)]
        if mixed:
            device.begin_mixed([chunk], lambda layer, *_, told=told: told.append(layer), rows, lengths, table, None)
            found = [device.extend(layer, *qkv, world.scale) for layer, qkv in enumerate(tokens)]
        else:
            device.begin_extend([chunk], lambda layer, *_, told=told: told.append(layer))
            ahead = [device.extend(layer, *(x[:new] for x in qkv), world.scale) for layer, qkv in enumerate(tokens)]
            device.begin_decode(rows, lengths, table)
            behind = [device.decode(layer, *(x[new:] for x in qkv), world.scale) for layer, qkv in enumerate(tokens)]
            found = [torch.cat(both) for both in zip(ahead, behind, strict=True)]
        assert told == list(range(world.layers))
        outs.append((found, [layer.clone() for layer in world.windows.layers], world.engine.native.stats()))
    (apart, windows, stats), (together, same_windows, same_stats) = outs
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))
    assert all(torch.equal(a[1:4], b[1:4]) for a, b in zip(windows, same_windows, strict=True))
    assert stats == same_stats and stats["tasks"] > 0


@given(
    middle=st.integers(1, 200).map(lambda p: p * PAGE),
    blk=st.sampled_from([16, 32, 64, 128]),
    sink_pages=st.integers(0, 9),
)
def test_blocks_partition_the_middle_on_absolute_boundaries(middle: int, blk: int, sink_pages: int) -> None:
    blocks = block_pages(middle, blk, sink_pages)
    assert [page for block in blocks for page in block] == list(range(sink_pages, sink_pages + middle // PAGE))
    span = blk // PAGE
    assert all(block[0] // span == block[-1] // span for block in blocks)
