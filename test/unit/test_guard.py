"""The guard rail: tasks that have read their blocks and go back for more."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from definitions.torch_executor import block_pages, blocks_to_read
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from int8 import INT8, pair_bytes
from native_world import NativeWorld, Plan, Request, attention, block_bounds, layer_begin
from world import World

from fluxion_sglang.executor.metrics import _COUNTERS
from fluxion_sglang.native import topology
from fluxion_sglang.scoring.audit_file import read

ISAS: list[str] = topology()["isas"]
DTYPES = [torch.float32, torch.bfloat16, INT8]
LENGTHS = [300, 607, 1000, 143]
TINY, HUGE = 1e-9, 1e9
Chosen = dict[tuple[int, int], list[set[int]]]


def run(world: NativeWorld, requests: list[Request], plan: Plan) -> tuple[torch.Tensor, torch.Tensor, Chosen]:
    """One step of one layer whose resident attention comes first: q, out, and what was selected before the guard."""
    world.begin_step(requests)
    tasks, q, out = world.begin_layer(requests, 0, plan, resident_first=True)
    chosen = world.selections(requests, tasks)
    world.engine.layer_finish()
    return q, out, chosen


def again(world: NativeWorld, requests: list[Request], plan: Plan, q: torch.Tensor) -> tuple[torch.Tensor, Chosen]:
    """The same layer under another plan, all at once and so without the guard: out and selections."""
    out = torch.full_like(q, torch.nan)
    tasks = layer_begin(
        world.engine, 0, q, None, None, world.windows[0], plan.blk, plan.budget, plan.value, world.scale, out
    )
    chosen = world.selections(requests, tasks)
    world.engine.layer_finish()
    return out, chosen


def doubled(world: NativeWorld, requests: list[Request], plan: Plan) -> Plan:
    """The plan whose budgets buy twice the blocks. The requests hold the new token."""
    budget = plan.budget.clone()
    for b, request in enumerate(requests):
        middle = len(world.middle(request))
        for head in range(world.q_heads):
            if not (middle and 0 < budget[b, head] < 1):
                continue
            blk = int(plan.blk[b, head // world.group])
            blocks = len(block_pages(middle, blk, world.placement.sink_pages))
            count = 2 * blocks_to_read(float(budget[b, head]), middle, blk, blocks)
            # A budget below 1 buys at most middle / blk blocks, and the cut ends can make one more.
            budget[b, head] = 1.0 if count >= blocks else min(count * blk / middle, 0.99999)
    return Plan(plan.blk, budget, plan.value)


def grown(world: NativeWorld, before: dict[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in world.engine.stats().items()}


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=examples(20))
@given(data=st.data(), union=st.booleans(), seed=st.integers(0, 2**16), dtype=st.sampled_from(DTYPES),
       collide=st.booleans(), spread=st.sampled_from([1.0, 0.5]))  # fmt: skip
def test_whoever_leaves_anything_out_reads_its_best_twice_as_many(
    isa: str, data: st.DataObject, union: bool, seed: int, dtype: torch.dtype, collide: bool, spread: float
) -> None:
    world = NativeWorld(
        isa=isa, seed=seed, dtype=dtype, attend_union=union, group=3, guard=TINY, spread=spread, pages=512
    )
    requests = [world.add(n) for n in data.draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3))]
    if collide:
        for j in (1, 2, 3):
            world.pool.tensor(f"tag{j}", 0).fill_(-1)
    plan = world.plan(requests)
    for at in plan.blk.view(-1).split(1):
        at.fill_(data.draw(st.sampled_from([16, 32, 64, 128])))
    for at in plan.budget.view(-1).split(1):
        at.fill_(data.draw(st.sampled_from([0.0, 0.01, 0.05, 0.2, 0.5, 0.8, 1.0, math.nan])))
    before = world.engine.stats()
    q, out, first = run(world, requests, plan)
    stats = grown(world, before)
    reads = torch.empty(len(requests), world.heads, 2, dtype=torch.int64)
    world.engine.reads(reads)
    exact = torch.empty(q.shape)
    world.engine.result(exact)

    at_once, wanted = again(world, requests, doubled(world, requests, plan), q)
    assert set(first) == set(wanted)
    assert all(a <= b for key in first for a, b in zip(first[key], wanted[key], strict=True))
    world.check(out, world.expected(requests, 0, q, wanted))
    torch.testing.assert_close(out, at_once, **world.tolerance())
    assert torch.equal(exact.to(world.dtype), out)

    assert stats["widened_tasks"] == sum(first[key] != wanted[key] for key in first)
    assert stats["tokens_read"] == sum(len(read) for heads in wanted.values() for read in heads)
    assert stats["tile_bytes"] == reads[..., 0].sum() and stats["metadata_bytes"] == reads[..., 1].sum()
    row = pair_bytes(world.dim, dtype)
    for key in first:
        added = set().union(*(b - a for a, b in zip(first[key], wanted[key], strict=True)))
        assert reads[key][0] == (len(set().union(*first[key])) + len(added)) * row
    assert stats["tasks_cpu"] == stats["tasks"] == len(first)


@pytest.mark.parametrize("union", [False, True])
def test_where_it_does_not_apply_not_a_bit_changes(union: bool) -> None:
    """No head leaves that much out; no resident LSE yet; single tokens; everything; nothing."""

    def outs(guard: float | None, resident_first: bool, blk: int, budget: float) -> tuple[list[torch.Tensor], object]:
        world = NativeWorld(attend_union=union, guard=guard, group=4, seed=3)
        requests = [world.add(n) for n in LENGTHS]
        found = []
        for _ in range(2):
            world.begin_step(requests)
            _, _, out = world.begin_layer(requests, 0, world.plan(requests, blk, budget), resident_first)
            world.engine.layer_finish()
            found.append(out)
        assert world.engine.stats()["widened_tasks"] == 0
        return found, world.engine.stats()

    for guard, resident_first, blk, budget in [
        (HUGE, True, 16, 0.1),
        (HUGE, True, 64, 0.1),
        (TINY, False, 16, 0.1),
        (TINY, True, 1, 0.1),
        (TINY, True, 16, 1.0),
        (TINY, True, 16, 0.0),
    ]:
        got, counts = outs(guard, resident_first, blk, budget)
        want, expected = outs(None, resident_first, blk, budget)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)) and counts == expected


def estimates(world: NativeWorld, requests: list[Request], plan: Plan, q: torch.Tensor, chosen: Chosen) -> torch.Tensor:
    """The share that each head left out by the guard's formula, from the definitions, float64 [B, Hq]."""
    found = torch.zeros(len(requests), world.q_heads, dtype=torch.float64)
    for (b, h), heads in chosen.items():
        request, blk = requests[b], int(plan.blk[b, h])
        keys, values = request.keys[0][:, h], request.values[0][:, h]
        middle = world.middle(request)
        n, start = request.length, world.placement.window_start(request.length)
        resident = [*range(world.placement.sinks), *range(start, n)]
        for g, its in enumerate(heads):
            query = q[b, h * world.group + g]
            _, known = attention(query, keys[resident + sorted(its)], values[resident + sorted(its)], world.scale)
            _, mid = attention(query, keys[sorted(its)], values[sorted(its)], world.scale)
            mass = {True: [], False: []}
            for i in range(middle[0] // blk, middle[-1] // blk + 1):
                at = [p for p in middle if p // blk == i]
                bound = world.scale * block_bounds(query, keys[at])
                mass[at[0] in its].append(bound + math.log(len(at)))
            bounds = {was: torch.tensor(logs, dtype=torch.float64).logsumexp(0) for was, logs in mass.items()}
            tightness = mid - bounds[True]
            assert tightness <= 1e-5
            found[b, h * world.group + g] = (bounds[False] + tightness - known).exp()
    return found


@pytest.mark.parametrize("blk", [16, 64])
@pytest.mark.parametrize("union", [False, True])
def test_exactly_the_heads_that_the_formula_names_are_widened(union: bool, blk: int) -> None:
    def world_of(guard: float | None) -> tuple[NativeWorld, list[Request], Plan]:
        world = NativeWorld(attend_union=union, group=4, guard=guard, seed=7, pages=512)
        requests = [world.add(n) for n in (607, 1000, 2500)]
        plan = world.plan(requests, blk)
        plan.budget = torch.linspace(0.02, 0.4, plan.budget.numel()).view_as(plan.budget)
        return world, requests, plan

    world, requests, plan = world_of(None)
    q, _, first = run(world, requests, plan)
    left = estimates(world, requests, plan, q, first)
    ordered = left.flatten().sort().values
    middle = len(ordered) // 2
    assert ordered[middle] > 1.001 * ordered[middle - 1], "the threshold lies between two heads"
    guard = float((ordered[middle] * ordered[middle - 1]).sqrt())

    world, requests, plan = world_of(guard)
    q, out, chosen = run(world, requests, plan)
    assert chosen == first
    budget = torch.where(left > guard, doubled(world, requests, plan).budget, plan.budget)
    _, wanted = again(world, requests, Plan(plan.blk, budget, plan.value), q)
    if union:  # what the first selection took stays
        assert all(a <= b for key in first for a, b in zip(first[key], wanted[key], strict=True))
    world.check(out, world.expected(requests, 0, q, wanted))
    assert world.engine.stats()["widened_tasks"] == sum(first[key] != wanted[key] for key in first) > 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("needle", [False, True])
def test_a_needle_just_outside_the_budget_is_found(isa: str, needle: bool) -> None:
    """A block whose keys cancel has the highest bound and hardly a score; the needle's block comes second."""
    world = NativeWorld(isa=isa, heads=1, group=1, guard=0.05)
    world.randn = lambda *size: torch.zeros(size)  # type: ignore[method-assign]
    request = world.add(1000)
    k, v, pages = request.keys[0], request.values[0], torch.tensor(request.pages, dtype=torch.int32)
    k[320:336:2, :, 0], k[320:336:2, :, 1] = 1.0, -1.0
    k[321:336:2, :, 0], k[321:336:2, :, 1] = -1.0, 1.0
    if needle:
        k[700, :, :2], v[700] = 0.95, 1.0
    world.pool.append(0, pages, 0, k, v)
    world.begin_step([request])
    q = torch.zeros(1, 1, world.dim)
    q[..., :2] = 8 / world.scale
    plan, out, parts = world.plan([request], 16, 0.01), torch.full_like(q, torch.nan), torch.empty(1, 1, 5)
    token = torch.zeros(1, 1, world.dim)
    world.engine.layer_resident(0, q, token, token, world.windows[0], world.scale, parts)
    layer_begin(world.engine, 0, q, None, None, None, plan.blk, plan.budget, plan.value, world.scale, out)
    chosen = world.selections([request], 1)
    world.engine.layer_finish()
    assert chosen == {(0, 0): [set(range(320, 336))]}, "the budget is one block, and the needle's is not it"
    assert world.engine.stats()["widened_tasks"] == needle
    want, _ = attention(q[0, 0], k[:, 0], v[:, 0], world.scale)
    assert float(want[0]) == pytest.approx(float(needle), abs=1e-3), "with a needle, it is nearly all of the attention"
    assert float(out[0, 0, 0]) == pytest.approx(float(needle), abs=1e-3)


@pytest.mark.parametrize("policy", ["fixed:32:0.05", "anchor"])
def test_every_policy_is_guarded_and_audited(policy: str, tmp_path: Path) -> None:
    """A fixed budget too, alone and beside others: nothing depends on who else is in the batch."""
    counts = []
    for guard in (None, TINY):
        world = World(policy=policy, guard=guard, audit=tmp_path / f"{guard}.npy", seed=4)
        for row, length in enumerate((700, 1900), start=1):
            world.extend(row, length)
        for _ in range(3):
            world.decode([1, 2])
        counts.append(world.engine.stats())
        records = np.concatenate(read(tmp_path / f"{guard}.npy")[0])
        assert records["tile_bytes"].sum() == counts[-1]["tile_bytes"]
    assert counts[0]["widened_tasks"] == 0 < counts[1]["widened_tasks"] <= counts[1]["tasks"]
    assert counts[0]["metadata_bytes"] == counts[1]["metadata_bytes"], "scores are not computed again"
    assert counts[0]["tile_bytes"] < counts[1]["tile_bytes"] <= 2 * counts[0]["tile_bytes"]


def test_foreign_executors_have_no_guard() -> None:
    outs = []
    for guard in (None, TINY):
        world = World(policy="anchor", guard=guard, executors="cpu+torch", workers=1)
        world.extend(1, 1500)
        outs.append([got for got, _ in world.decode([1])])
        stats = world.engine.stats()
        assert stats["tasks_torch"] == stats["tasks"] > 0 and stats["widened_tasks"] == 0
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


@pytest.mark.parametrize("guard", [-0.1, math.nan, math.inf])
def test_a_guard_that_is_no_share_is_refused(guard: float) -> None:
    with pytest.raises(ValueError, match=r"guard is .* a share of attention above 0"):
        NativeWorld(guard=guard)


def test_the_statistic_reaches_the_metrics() -> None:
    # A layer server's, the near middle's, the files' and the landing zone's: test_timeline.py, test_near.py,
    # test_disk_served.py, test_transfer.py.
    starts = ("device_", "near_", "far_", "disk_", "arriv")
    of_devices = {name for name in _COUNTERS if name.startswith(starts)}
    # The pool's, and the backend's: test_canary_served.py, test_deploy_served.py.
    of_others = {"canary_checks", "canary_mismatches", "failed_passes", "refused_specs", "healed_windows", "worker_ns"}
    assert set(_COUNTERS) - of_devices - of_others <= set(NativeWorld().engine.stats())
    assert "widened_tasks" in _COUNTERS
