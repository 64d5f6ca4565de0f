"""Requests with common first pages: reading them together changes only what is read."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from int8 import INT8, entry_bytes, pair_bytes
from native_world import NativeWorld, Plan, Request
from world import World

from fluxion_lab.schedulers import by_length, evenly, one_alone
from fluxion_sglang.executor.decode import Scheduler
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.native import topology
from fluxion_sglang.policy import parse_spec

ISAS: list[str] = topology()["isas"]
DTYPES = [torch.float32, torch.bfloat16, INT8]
MOST_HEADS = 64
CPU, ANY = 0, 2


@dataclass
class Done:
    """Results of a layer: q, out, exact output, selections, reads, and increments of the statistics."""

    q: torch.Tensor
    out: torch.Tensor
    exact: torch.Tensor
    chosen: dict[tuple[int, int], list[set[int]]]
    reads: torch.Tensor
    stats: dict[str, int]


@dataclass(frozen=True)
class Branch:
    """A request that shares its first `shared` pages with request `parent` and has `tail` tokens of its own."""

    parent: int
    shared: int
    tail: int


def build(world: NativeWorld, branches: list[Branch]) -> list[Request]:
    """Build the requests. If a parent has fewer pages than asked for, the branch shares fewer."""
    requests: list[Request] = []
    for branch in branches:
        parent = requests[branch.parent % len(requests)] if requests else None
        shared = min(branch.shared, parent.length // PAGE) * PAGE if parent else 0
        requests.append(world.add(shared + branch.tail, parent, shared))
    return requests


def run(world: NativeWorld, requests: list[Request], plan: Plan, resident_first: bool = False) -> Done:
    before = world.engine.stats()
    world.begin_step(requests)
    tasks, q, out = world.begin_layer(requests, 0, plan, resident_first)
    chosen = world.selections(requests, tasks)
    world.engine.layer_finish()
    exact, reads = torch.full(q.shape, torch.nan), torch.full((len(requests), world.heads, 2), -1, dtype=torch.int64)
    world.engine.result(exact)
    world.engine.reads(reads)
    stats = {name: value - before[name] for name, value in world.engine.stats().items()}
    return Done(q, out, exact, chosen, reads, stats)


def cpu_plan(world: NativeWorld, requests: list[Request], blk: int = 16, budget: float = 1.0) -> Plan:
    plan = world.plan(requests, blk, budget)
    plan.owner = torch.full_like(plan.blk, CPU)
    return plan


def both(branches: list[Branch], plan_of: Any, resident_first: bool = False, **options: Any) -> tuple[Done, Done]:
    """One step with and without sharing, over the same numbers; compared with float64 and with each other."""
    done: list[Done] = []
    for share in (True, False):
        world = NativeWorld(share_prefixes=share, rows=len(branches), pages=1024, **options)
        requests = build(world, branches)
        done.append(run(world, requests, plan_of(world, requests), resident_first))
        world.check(done[-1].out, world.expected(requests, 0, done[-1].q, done[-1].chosen))
    shared, alone = done
    assert torch.equal(shared.q, alone.q)
    assert shared.chosen == alone.chosen
    assert torch.equal(shared.reads, alone.reads)
    # In bfloat16 the weights of a page may be rounded too, relative to earlier pages.
    slack = 2e-6 if options.get("dtype", torch.float32) == torch.float32 else 5e-3
    torch.testing.assert_close(shared.exact, alone.exact, atol=slack, rtol=slack)
    for done_ in done:
        for kind, name in enumerate(("tile_bytes", "metadata_bytes")):
            assert done_.stats[name] + done_.stats[f"shared_{name}"] == done_.reads[..., kind].sum()
    for name, value in alone.stats.items():
        if name.startswith("shared"):
            assert value == 0
        elif name not in ("tile_bytes", "metadata_bytes"):
            assert value == shared.stats[name]
    return shared, alone


@st.composite
def batches(draw: st.DrawFn) -> list[Branch]:
    """A document and its branches, or branches of these; ends and branchings near page boundaries."""
    tails = st.sampled_from([0, 1, 15, 16, 17, 40, 64, 95, 96, 97, 130, 300])
    pages = st.sampled_from([3, 10, 20, 23, 24, 33, 40, 100])
    document = Branch(0, 0, draw(st.sampled_from([400, 640, 655, 656, 1100])))
    more = draw(st.lists(st.builds(Branch, st.integers(0, 7), pages, tails), min_size=1, max_size=5))
    return [document, *more]


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=examples(25))
@given(
    branches=batches(), data=st.data(), group=st.integers(1, 8), union=st.booleans(), dtype=st.sampled_from(DTYPES),
    collide=st.booleans(), chunk_bytes=st.sampled_from([None, 1, 5000]),
    cached_bytes=st.sampled_from([None, 0, 20_000, 1 << 40]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_sharing_changes_only_what_is_read(
    isa: str, branches: list[Branch], data: st.DataObject, group: int, union: bool, dtype: torch.dtype, collide: bool,
    chunk_bytes: int | None, cached_bytes: int | None, seed: int,
) -> None:  # fmt: skip
    """Any prefixes, lengths, block sizes, budgets, owners and divisions into chunks."""
    heads = 2
    mostly = data.draw(st.sampled_from([16, 32, 64, 128]))
    sizes = st.one_of(st.just(mostly), st.sampled_from([0, 1, 16, 32, 64, 128]))
    groups, queries = len(branches) * heads, len(branches) * heads * group
    blk = data.draw(st.lists(sizes, min_size=groups, max_size=groups))
    budgets = st.sampled_from([0.0, 0.01, 0.05, 0.05, 0.2, 0.5, 0.999, 1.0, math.nan])
    budget = data.draw(st.lists(budgets, min_size=queries, max_size=queries))
    owners = data.draw(st.lists(st.sampled_from([CPU, CPU, CPU, CPU, ANY]), min_size=groups, max_size=groups))

    def plan_of(world: NativeWorld, requests: list[Request]) -> Plan:
        if collide:
            for j in (1, 2, 3):
                world.pool.tensor(f"tag{j}", 0).fill_(-1)
        shape = (len(requests), heads)
        return Plan(
            torch.tensor(blk, dtype=torch.int32).view(shape),
            torch.tensor(budget, dtype=torch.float32).view(len(requests), -1),
            world.randn(*shape).float(),
            torch.tensor(owners, dtype=torch.int32).view(shape),
        )

    options: dict[str, Any] = {"isa": isa, "heads": heads, "group": group, "dtype": dtype, "seed": seed}
    both(branches, plan_of, **options, attend_union=union, chunk_bytes=chunk_bytes, cached_bytes=cached_bytes)


FORKS = [Branch(0, 0, 2000), *(Branch(0, 120, tail) for tail in (30, 150, 8, 31, 400))]
"""Six branches of one document that is much longer than their own tokens."""


@pytest.mark.parametrize(
    ("dtype", "blk", "budget"),
    [
        (torch.float32, 16, 0.4), (torch.bfloat16, 32, 0.4), (INT8, 64, 0.4), (torch.float32, 128, 0.4),
        (torch.bfloat16, 16, 1.0), (INT8, 128, 1.0),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_shared_is_read_once(blk: int, budget: float, dtype: torch.dtype) -> None:
    """Tiles and entries of the blocks before the first window are counted once for all branches."""

    def plan_of(world: NativeWorld, requests: list[Request]) -> Plan:
        return cpu_plan(world, requests, blk, budget)

    shared, _ = both(FORKS, plan_of, dtype=dtype, group=3)
    assert shared.stats["shared_tasks"] == shared.stats["tasks"] == 2 * len(FORKS)
    # The shortest branch has 1928 tokens and the new one: its window starts at 1872, its sinks end at 32.
    end = 1872 // blk * blk
    row, entry = pair_bytes(32, dtype), entry_bytes(32, dtype)
    tokens = 0
    for h in range(2):
        read = [set().union(*shared.chosen[b, h]) for b in range(len(FORKS))]
        tokens += len({t for positions in read for t in positions if t < end})
        tokens += sum(len({t for t in positions if t >= end}) for positions in read)
    assert shared.stats["tile_bytes"] == tokens * row
    if budget == 1.0:
        assert shared.stats["metadata_bytes"] == shared.stats["shared_metadata_bytes"] == 0
    else:
        # Each head saves 5 scans; a coarse block that is cut or has lost its entry uses the entries of its pages.
        scan, rest = divmod(shared.stats["shared_metadata_bytes"], (len(FORKS) - 1) * 2 * entry)
        assert rest == 0
        least = (end - 32) // blk
        assert scan == least if blk == 16 else least <= scan <= (end - 32) // 16


LARGE = 1 << 40
"""Bytes of a cache that keeps everything."""


@pytest.mark.parametrize(
    ("budget", "cached_bytes", "together"), [(0.3, LARGE, False), (0.3, 0, True), (0.02, 0, False), (1.0, LARGE, True)]
)
def test_what_few_agree_on_each_reads_for_itself(budget: float, cached_bytes: int, together: bool) -> None:
    """Independent queries select different tiles. Larger budgets select more of them, up to all tiles for all. The scan
    is shared in any case."""

    def plan_of(world: NativeWorld, requests: list[Request]) -> Plan:
        return cpu_plan(world, requests, 16, budget)

    shared, alone = both(FORKS, plan_of, cached_bytes=cached_bytes, group=3)
    assert shared.stats["shared_tasks"] == 2 * len(FORKS)
    assert (shared.stats["shared_tile_bytes"] > 0) == together
    assert (shared.stats["shared_metadata_bytes"] > 0) == (budget < 1)
    if not together:
        assert torch.equal(shared.exact, alone.exact)


def test_the_cache_is_exactly_as_large_as_it_is_said_to_be() -> None:
    """Tiles that fit in the cache are read separately; with one byte less, they are read together."""

    def plan_of(world: NativeWorld, requests: list[Request]) -> Plan:
        return cpu_plan(world, requests, 16, 0.3)

    def saved(cached_bytes: int) -> tuple[int, Done]:
        shared, _ = both(FORKS, plan_of, heads=1, group=3, cached_bytes=cached_bytes)
        return shared.stats["shared_tile_bytes"], shared

    _, done = saved(0)
    read = set().union(*(positions for heads in done.chosen.values() for positions in heads))
    once = len({t // PAGE for t in read if t < 1872}) * PAGE * 2 * 32 * 4
    assert saved(once)[0] == 0 < saved(once - 1)[0]


def test_a_cache_of_less_than_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="cached_bytes is -1; a cache keeps 0 bytes or more"):
        NativeWorld(cached_bytes=-1)


def test_shared_blocks_that_nobody_chose() -> None:
    """Only streaming heads, and budgets that select only blocks behind the prefix."""

    def plan_of(world: NativeWorld, requests: list[Request]) -> Plan:
        return cpu_plan(world, requests, 16, 0.0)

    for cached_bytes in (0, LARGE):
        shared, _ = both(FORKS, plan_of, cached_bytes=cached_bytes, group=3)
        assert shared.stats["tile_bytes"] == shared.stats["shared_tile_bytes"] == 0


@pytest.mark.parametrize("group", [1, 4, 5, 16])
def test_more_heads_than_fit_are_done_in_parts(group: int) -> None:
    """Each part reads shared blocks once."""
    forks = [Branch(0, 0, 700), *(Branch(0, 40, 90 + i) for i in range(8))]
    shared, _ = both(forks, cpu_plan, heads=1, group=group)
    parts = -(-len(forks) * group // (MOST_HEADS // group * group))
    assert shared.stats["shared_tasks"] == len(forks)
    middle = (640 - 32) // PAGE * PAGE * 2 * 32 * 4
    assert shared.stats["shared_tile_bytes"] == (len(forks) - parts) * middle


def test_a_prefix_of_prefixes_and_of_other_block_sizes() -> None:
    """Two documents after one prompt are two families; a task of another block size or executor runs alone."""
    branches = [Branch(0, 0, 1500), Branch(0, 90, 80), Branch(0, 4, 1400), Branch(2, 88, 100), Branch(2, 90, 60)]

    def plan_of(world: NativeWorld, requests: list[Request]) -> Plan:
        plan = cpu_plan(world, requests, 32, 0.2)
        plan.blk[3, 0] = 64
        plan.blk[4, 1] = 1
        assert plan.owner is not None
        plan.owner[0, 1] = ANY
        return plan

    shared, _ = both(branches, plan_of)
    assert shared.stats["shared_tasks"] == 2 + 2 + 0 + 2
    assert shared.stats["tasks"] == 10


def test_a_bad_request_is_in_no_bundle() -> None:
    """Its page id behind the shared pages is out of range: the layer fails, and the others are computed."""
    world = NativeWorld(share_prefixes=True, rows=6, pages=1024)
    requests = build(world, FORKS)
    good = requests[2].pages.copy()
    requests[2].pages[-1] = world.pages
    world.begin_step(requests)
    tasks, q, out = world.begin_layer(requests, 0, cpu_plan(world, requests))
    chosen = world.selections(requests, tasks)
    with pytest.raises(RuntimeError, match="Request 2 cannot be computed"):
        world.engine.layer_finish()
    assert world.engine.stats()["shared_tasks"] == 2 * 5
    want = world.expected(requests, 0, q, chosen)
    others = [b for b in range(6) if b != 2]
    world.check(out[others], want[others])
    requests[2].pages = good
    done = run(world, requests, cpu_plan(world, requests))
    assert done.stats["shared_tasks"] == 2 * 6
    world.check(done.out[others], world.expected(requests, 0, done.q, done.chosen)[others])


def test_branches_decode_on_and_come_and_go() -> None:
    """Tails grow over page boundaries, windows leave the shared part, requests join and leave the batch."""
    world = NativeWorld(share_prefixes=True, rows=8, pages=1024, heads=1)
    requests = build(world, [Branch(0, 0, 500), *(Branch(0, 31, tail) for tail in (4, 20))])
    seen = set()
    for step in range(120):
        if step == 40:
            requests.append(world.add(31 * PAGE + 7, requests[0], 31 * PAGE))
        if step == 70:
            del requests[1]
        if step == 90:
            requests.reverse()
        done = run(world, requests, cpu_plan(world, requests, 16, 0.2))
        world.check(done.out, world.expected(requests, 0, done.q, done.chosen))
        seen.add(done.stats["shared_tasks"])
    assert seen == {3, 4}


@pytest.mark.parametrize("cached_bytes", [0, LARGE])
@pytest.mark.parametrize("workers", [2, 4])
def test_results_are_the_same_bits_whoever_works(workers: int, cached_bytes: int) -> None:
    branches = [*FORKS, Branch(0, 100, 700), Branch(6, 120, 9)]
    outs = []
    for count in (1, workers, workers, workers):
        world = NativeWorld(
            share_prefixes=True, workers=count, rows=8, pages=1024, heads=3, chunk_bytes=10_000,
            cached_bytes=cached_bytes,
        )  # fmt: skip
        requests = build(world, branches)
        outs.append(run(world, requests, cpu_plan(world, requests, 16, 0.1)).exact)
        assert world.engine.stats()["shared_tasks"] > 0
    assert all(torch.equal(a, b) for a, b in pairwise(outs))


def test_without_a_common_prefix_or_an_owner_nothing_is_shared() -> None:
    apart = [Branch(0, 0, 500)] * 3
    assert both(apart, cpu_plan)[0].stats["shared_tasks"] == 0
    assert both(FORKS, lambda world, requests: world.plan(requests))[0].stats["shared_tasks"] == 0


# ---- the decode engine


def decode(world: World, steps: int) -> list[torch.Tensor]:
    """Outputs of requests, three of which share a document, and two of these also another page."""
    world.extend(1, 1500)
    for row, pages in ((2, 90), (3, 91)):
        world.share(row, 1, pages)
        world.extend(row, 40 * row)
    world.extend(4, 600)
    return [got for _ in range(steps) for got, _ in world.decode([4, 1, 3, 2])]


POLICIES = ["full", "fixed:16:0.1", "fixed:128:0.3", "anchor:0.05", "oracle:0.1"]
SCHEDULERS = [None, one_alone, evenly, by_length]


@pytest.mark.parametrize(
    ("policy", "scheduler"),
    [
        pytest.param(policy, scheduler, marks=() if not scheduler or policy == POLICIES[1] else pytest.mark.full)
        for policy, scheduler in product(POLICIES, SCHEDULERS)
    ],
)
def test_every_policy_and_scheduler(policy: str, scheduler: Scheduler | None) -> None:
    outs, stats = [], []
    for share in (True, False):
        world = World(policy=policy, scheduler=scheduler, share_prefixes=share, seed=2)
        outs.append(decode(world, 2))
        stats.append(world.engine.stats())
    for shared, alone in zip(*outs, strict=True):
        torch.testing.assert_close(shared, alone, atol=3e-6, rtol=3e-6)
    assert stats[0]["tokens_read"] == stats[1]["tokens_read"] > 0
    assert stats[1]["shared_tasks"] == stats[1]["shared_tile_bytes"] == 0
    if policy.startswith("oracle"):
        assert stats[0]["shared_tasks"] == 0
    elif not policy.startswith("anchor"):  # anchors may choose blocks of different sizes
        assert stats[0]["shared_tasks"] == 2 * 2 * 2 * 3
        saved = "shared_tile_bytes" if policy == "full" else "shared_metadata_bytes"
        assert stats[0][saved] > 0


def test_tasks_that_another_executor_may_take_go_alone() -> None:
    world = World(policy="fixed:16:0.1", executors="cpu+torch")
    decode(world, 1)
    assert world.engine.stats()["shared_tasks"] == 0


def test_requests_of_one_family_may_follow_different_policies() -> None:
    """The policies of a step are mixed; those with one block size are read together."""
    policies = [parse_spec(spec) for spec in ("fixed:16:0.2", "full", "fixed:32:0.1", "fixed:16:0.05")]
    outs = []
    for share in (True, False):
        world = World(share_prefixes=share, seed=5, layers=1)
        decode(world, 0)
        outs.append(world.decode([4, 1, 3, 2], policies)[0][0])
        sizes = [int(policy.plan(0, world.queries[0]).blk[0, 0]) for policy in policies[1:]]
        together = sum(n for n in Counter(sizes).values() if n > 1)
        assert world.engine.stats()["shared_tasks"] == (world.heads * together if share else 0)
    torch.testing.assert_close(*outs, atol=3e-6, rtol=3e-6)
