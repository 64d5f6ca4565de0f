"""The native engine against float64 attention over plain tensors."""

from __future__ import annotations

import math

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from int8 import INT8, pair_bytes
from native_world import NativeWorld, Plan, Request, block_bounds, layer_begin

from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.native import topology

ISAS: list[str] = topology()["isas"]
DTYPES = [torch.float32, torch.bfloat16, INT8]

# Lengths before the step around every boundary of sinks 32 and window 48.
LENGTHS = [0, 1, 15, 16, 31, 32, 33, 47, 48, 63, 79, 80, 81, 95, 96, 97, 127, 128, 143, 250, 511, 512, 607]


def run_full(world: NativeWorld, requests: list[Request]) -> None:
    """One step with budget 1 over all layers, checked."""
    world.begin_step(requests)
    for layer in range(world.layers):
        plan = world.plan(requests)
        _, q, out = world.begin_layer(requests, layer, plan)
        world.engine.layer_finish()
        world.check(out, world.expected(requests, layer, q, world.everything(requests, layer)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_budget_one_is_exact_at_every_length(isa: str, dtype: torch.dtype) -> None:
    for start in range(0, len(LENGTHS), 5):
        world = NativeWorld(isa=isa, dtype=dtype, seed=start)
        assert world.pool.isa == isa
        run_full(world, [world.add(n) for n in LENGTHS[start : start + 5]])


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(("heads", "group", "dim"), [(1, 1, 256), (1, 16, 48), (8, 1, 32), (3, 5, 80), (2, 7, 128)])
def test_every_geometry(heads: int, group: int, dim: int, workers: int) -> None:
    world = NativeWorld(heads=heads, group=group, dim=dim, layers=2, workers=workers)
    run_full(world, [world.add(n) for n in (130, 7, 401)])


@pytest.mark.parametrize("sinks", [0, 16, 64])
@pytest.mark.parametrize("window", [16, 80])
def test_every_placement(sinks: int, window: int) -> None:
    world = NativeWorld(placement=Placement(sinks, window))
    requests = [world.add(n) for n in (0, 15, sinks + window, 300)]
    for _ in range(20):
        run_full(world, requests)


def test_hundreds_of_decoded_tokens() -> None:
    """Windows wrap many times, pages fill, the middle grows from zero; requests come and go."""
    world = NativeWorld(layers=2, pages=200)
    requests = [world.add(0), world.add(100)]
    for step in range(300):
        if step == 60:
            requests.insert(0, world.add(77))
        if step == 200:  # the next request gets its pages and row, in any order
            gone = requests.pop(1)
            world.free = gone.pages[::2] + gone.pages[1::2] + world.free
            world.free_rows.append(gone.row)
            requests.append(world.add(170))
        run_full(world, requests)
        if step % 50 == 0:
            for request in requests:
                check_window(world, request)
    assert min(r.length for r in requests) >= 300 - 60


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(30, 47, 100), (30, 62, 94)], ids=str)
def test_decoded_tokens_leave_the_host_as_appended_ones(dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    """Tiles, metadata, tags and moments, colliding entries included, equal those of a prefill bit for bit.

    In the second case, requests fill pages in the same steps, so that blocks collide within one.
    """
    world, twin = (NativeWorld(seed=9, dtype=dtype, pages=90, heads=3) for _ in range(2))
    together = lengths == (30, 62, 94)
    if together:
        world.free.sort()  # the requests' pages are neighbours
        twin.free.sort()
    requests = [world.add(length) for length in lengths]
    collisions = 0
    assert [twin.add(r.length).pages for r in requests] == [r.pages for r in requests]
    for _ in range(250):
        world.begin_step(requests)
        plan = world.plan(requests, blk=64, budget=0.5)
        world.begin_layer(requests, 0, plan)
        world.engine.layer_finish()
        for r in requests:
            pages = torch.tensor(r.pages, dtype=torch.int32)
            twin.pool.append(0, pages, r.length - 1, r.keys[0][-1:], r.values[0][-1:])
        sealed = [int(r.pages[r.length // PAGE - 1]) // 2 for r in requests if r.length % (2 * PAGE) == 0]
        collisions += len(sealed) - len(set(sealed))
    assert collisions > 0 or not together
    for name in ("tiles", "meta0", "meta1", "meta2", "meta3", "tag1", "tag2", "tag3", "moments"):
        assert torch.equal(world.pool.tensor(name, 0), twin.pool.tensor(name, 0)), name
    assert int((world.pool.tensor("tag3", 0) >= 0).sum()) > 3


def check_window(world: NativeWorld, request: Request) -> None:
    """Every resident token is in its slot."""
    n, slots = request.length, world.placement.slots
    for layer, tiles in enumerate(world.windows):
        base = request.row * slots
        start = world.placement.window_start(n)
        for position in [*range(min(world.placement.sinks, n)), *range(start, n)]:
            page, offset = divmod(base + world.placement.slot(position), PAGE)
            assert torch.equal(tiles[:, page, 0, offset], request.keys[layer][position])
            assert torch.equal(tiles[:, page, 1, offset], request.values[layer][position])


def blocks_bought(budget: float, middle: int, blk: int, blocks: int) -> int:
    """A budget of 1 means all blocks, also where cut blocks make more of them than tokens / blk."""
    return blocks if budget >= 1 else min(blocks, max(1, math.ceil(round(budget * middle / blk, 4))))


def check_selection(
    world: NativeWorld, request: Request, plan: Plan, b: int, h: int, q: torch.Tensor, chosen: list[set[int]]
) -> None:
    """The chosen blocks of every head are its best by Quest's bound, in the number of its budget.

    The bound of a block with one token is its score; only the head itself reads it.
    """
    middle = world.middle(request)
    blk = int(plan.blk[b, h])
    blocks: dict[int, list[int]] = {}
    for position in middle:
        blocks.setdefault(position // blk, []).append(position)
    budgets = plan.budget[b, h * world.group : (h + 1) * world.group].tolist()
    union = world.attend_union and blk > 1
    own: list[set[int]] = []
    for g, budget in enumerate(budgets):
        if not budget > 0:  # NaN selects nothing
            assert union or chosen[g] == set()
            continue
        query = q[h * world.group + g]
        if blk == 1:
            scores = request.keys[0][middle, h].double() @ query.double()
            bounds = dict(zip(middle, scores.tolist(), strict=True))
        else:
            bounds = {i: float(block_bounds(query, request.keys[0][at, h])) for i, at in blocks.items()}
        count = blocks_bought(budget, len(middle), blk, len(blocks))
        best = sorted(bounds.values(), reverse=True)
        slack = 1e-4 * max(1.0, *map(abs, best))
        if world.int8:  # bounds of 8-bit keys are rounded to bfloat16, away from the keys
            slack += 2.0**-7 * float(query.double().abs() @ request.keys[0][middle, h].double().abs().amax(0))
        must = {i for i, bound in bounds.items() if bound > best[count - 1] + slack}
        may = {i for i, bound in bounds.items() if bound >= best[count - 1] - slack}
        got = {position // blk for position in chosen[g]}
        assert must <= got
        assert chosen[g] == {position for i in got for position in blocks[i]}, "blocks are read whole"
        if not union:
            assert got <= may
            assert len(got) == count
        own.append({position for i in must for position in blocks[i]})
    if union:
        assert all(read == chosen[0] for read in chosen)
        # At least the blocks that every head needs, at most those that all heads may have selected.
        assert set().union(*own) <= chosen[0]
        total = sum(blocks_bought(f, len(middle), blk, len(blocks)) for f in budgets if f > 0)
        assert len({position // blk for position in chosen[0]}) <= total


BUDGETS = st.sampled_from([0.0, 0.001, 0.05, 0.2, 0.5, 0.8, 0.999, 1.0, 3.0, -1.0, math.nan])


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=examples(15))
@given(data=st.data(), union=st.booleans(), seed=st.integers(0, 2**16), dtype=st.sampled_from(DTYPES))
def test_any_plan_reads_what_it_says(isa: str, data: st.DataObject, union: bool, seed: int, dtype: torch.dtype) -> None:
    """Any block size and budgets, a batch of mixed lengths: selection, output, priorities and statistics."""
    world = NativeWorld(isa=isa, seed=seed, dtype=dtype, attend_union=union, group=3, workers=2)
    lengths = data.draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4))
    requests = [world.add(n) for n in lengths]
    for _ in range(data.draw(st.integers(1, 2))):
        groups, heads = len(requests) * world.heads, len(requests) * world.q_heads
        plan = world.plan(requests)
        plan.blk = torch.tensor(
            data.draw(st.lists(st.sampled_from([0, 1, 16, 32, 64, 128]), min_size=groups, max_size=groups)),
            dtype=torch.int32,
        ).view_as(plan.blk)
        plan.budget = torch.tensor(
            data.draw(st.lists(BUDGETS, min_size=heads, max_size=heads)), dtype=torch.float32
        ).view_as(plan.budget)
        plan.value = world.randn(len(requests), world.heads).float()
        before = world.engine.stats()
        world.begin_step(requests)
        tasks, q, out = world.begin_layer(requests, 0, plan)
        chosen = world.selections(requests, tasks)
        values = [float(plan.value[divmod(world.engine.task(i), world.heads)]) for i in range(tasks)]
        world.engine.layer_finish()

        assert values == sorted(values, reverse=True)
        budget = plan.budget.view(len(requests), world.heads, world.group)
        assert set(chosen) == {
            (b, h)
            for b, request in enumerate(requests)
            for h in range(world.heads)
            if plan.blk[b, h] > 0 and world.middle(request) and bool((budget[b, h] > 0).any())
        }
        for (b, h), positions in chosen.items():
            check_selection(world, requests[b], plan, b, h, q[b], positions)
        world.check(out, world.expected(requests, 0, q, chosen))
        after = world.engine.stats()
        grown = {name: after[name] - before[name] for name in after}
        assert grown["layers"] == 1
        assert grown["tasks"] == grown["tasks_cpu"] == tasks
        assert grown["middle_tokens"] == sum(len(world.middle(r)) for r in requests) * world.q_heads
        assert grown["tokens_read"] == sum(len(p) for positions in chosen.values() for p in positions)
        reads = torch.full((len(requests), world.heads, 2), -1, dtype=torch.int64)
        world.engine.reads(reads)
        # A row of K and of V for every token that some head of the group attends to.
        row = pair_bytes(world.dim, dtype)
        rows = {group: len(set().union(*positions)) for group, positions in chosen.items()}
        for (b, h), bytes_ in {
            (b, h): reads[b, h, 0] for b in range(len(requests)) for h in range(world.heads)
        }.items():
            assert bytes_ == rows.get((b, h), 0) * row
        assert grown["tile_bytes"] == reads[..., 0].sum() and grown["metadata_bytes"] == reads[..., 1].sum()
        scanned = reads[..., 1] > 0
        assert not (scanned & (plan.blk < 16)).any(), "single tokens are chosen without metadata"
        exact = torch.full((len(requests), world.q_heads, world.dim), torch.nan)
        world.engine.result(exact)
        assert torch.equal(exact.to(world.dtype), out), "the result before rounding rounds to the result"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_single_tokens_are_the_best_and_of_equals_the_earlier(isa: str, dtype: torch.dtype) -> None:
    """Small integer scores are exact and often equal, so the selection is determined."""
    world = NativeWorld(isa=isa, dtype=dtype, group=4, seed=3)
    most = 1 if world.int8 else 2  # 8 bits would round a 1 to 0 beside a larger value
    world.randn = lambda *size: torch.randint(-most, most + 1, size, generator=world.random).to(world.dtype)  # type: ignore[method-assign]
    requests = [world.add(n) for n in (95, 96, 112, 701)]
    for budget in (1e-9, 0.01, 1 / 3, 0.5, 0.999999, 1.0):
        world.begin_step(requests)
        tasks, q, out = world.begin_layer(requests, 0, world.plan(requests, 1, budget))
        chosen = world.selections(requests, tasks)
        world.engine.layer_finish()
        world.check(out, world.expected(requests, 0, q, chosen))
        for b, request in enumerate(requests):
            middle = world.middle(request)
            count = max(1, math.ceil(budget * len(middle) - 1e-4))
            for head in range(world.q_heads if middle else 0):
                scores = request.keys[0][middle, head // world.group].double() @ q[b, head].double()
                best = sorted(range(len(middle)), key=lambda i: (-float(scores[i]), i))[:count]
                want = {middle[i] for i in best}
                assert chosen[b, head // world.group][head % world.group] == want


def test_all_single_tokens_are_everything() -> None:
    """Budget 1 in single tokens gives the same bits as budget 1 in blocks, and reads the same bytes."""
    outs, reads = [], []
    for blk in (1, 16):
        world = NativeWorld(seed=4)
        requests = [world.add(n) for n in (700, 40, 333)]
        world.begin_step(requests)
        _, _, out = world.begin_layer(requests, 0, world.plan(requests, blk, 1.0))
        world.engine.layer_finish()
        reads.append(torch.empty(3, world.heads, 2, dtype=torch.int64))
        world.engine.reads(reads[-1])
        outs.append(out)
    assert torch.equal(outs[0], outs[1]) and torch.equal(reads[0], reads[1])


@pytest.mark.parametrize("union", [False, True])
@pytest.mark.parametrize("blk", [32, 64, 128])
def test_collisions_change_nothing(blk: int, union: bool) -> None:
    """With every coarse entry destroyed, blocks are scored from their pages, with the same result."""
    outs, selected = [], []
    for collide in (False, True):
        world = NativeWorld(seed=5, attend_union=union, pages=512)
        requests = [world.add(n) for n in (3000, 700)]
        for j in (1, 2, 3):
            tags = world.pool.tensor(f"tag{j}", 0)
            assert int((tags >= 0).sum()) > 0
            if collide:
                tags.fill_(-1)
                world.pool.tensor(f"meta{j}", 0).fill_(torch.nan)
        world.begin_step(requests)
        plan = world.plan(requests, blk, 0.3)
        plan.budget[:, 0] = 0.07
        tasks, _, out = world.begin_layer(requests, 0, plan)
        selected.append(world.selections(requests, tasks))
        world.engine.layer_finish()
        outs.append(out)
    assert selected[0] == selected[1]
    assert torch.equal(outs[0], outs[1])


def test_a_layer_without_residents_is_refused() -> None:
    """Without windows and without a previous look: nothing is written, and the next layer works."""
    world = NativeWorld()
    requests = [world.add(n) for n in (400, 20)]
    world.begin_step(requests)
    plan = world.plan(requests)
    q, k, v = (world.randn(2, n, 32) for n in (world.q_heads, world.heads, world.heads))
    before = world.pool.tensor("tiles", 0).clone()
    for new in ((k, v), (None, None)):
        with pytest.raises(ValueError, match="Layer 0 has no residents; pass windows, or call layer_resident"):
            layer_begin(world.engine, 0, q, *new, None, plan, world.scale, torch.empty_like(q))
    assert torch.equal(world.pool.tensor("tiles", 0), before)
    _, q, out = world.begin_layer(requests, 0, plan)
    world.engine.layer_finish()
    world.check(out, world.expected(requests, 0, q, world.everything(requests)))


def test_tokens_that_are_written_already() -> None:
    """Without k and v: the window and the host already hold the token, and nothing is appended."""
    world = NativeWorld()
    request = world.add(301)
    rows = torch.tensor([request.row], dtype=torch.int32)
    world.engine.step(rows, torch.tensor([301], dtype=torch.int32), world.table([request]))
    plan = world.plan([request])
    tiles = world.pool.tensor("tiles", 0).clone()
    q = world.randn(1, world.q_heads, 32)
    out = torch.full_like(q, torch.nan)
    layer_begin(world.engine, 0, q, None, None, world.windows[0], plan, world.scale, out)
    world.engine.layer_finish()
    world.check(out, world.expected([request], 0, q, world.everything([request])))
    assert torch.equal(world.pool.tensor("tiles", 0), tiles)


def test_an_empty_batch() -> None:
    world = NativeWorld()
    world.engine.step(*(torch.empty(0, dtype=torch.int32) for _ in range(2)), torch.empty(0, 1, dtype=torch.int32))
    plan = world.plan([])
    q = torch.empty(0, world.q_heads, 32)
    kv = torch.empty(0, world.heads, 32)
    tasks = layer_begin(world.engine, 0, q, kv, kv, world.windows[0], plan, 1.0, q.clone())
    world.engine.layer_finish()
    assert tasks == 0
