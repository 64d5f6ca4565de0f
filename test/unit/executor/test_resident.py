"""Resident attention before the plan (`NativeEngine.layer_resident`), against the path that does everything at once."""

from __future__ import annotations

import math

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from int8 import INT8
from native_world import NativeWorld, Plan, Request, attention, layer_begin, take

from benchmark.probe import library
from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.native import AttentionLayer, topology

ISAS: list[str] = topology()["isas"]
DTYPES = [torch.float32, torch.bfloat16, INT8]
# Lengths before the step around every boundary of sinks 32 and window 48.
LENGTHS = [0, 1, 15, 16, 30, 31, 32, 33, 47, 48, 63, 79, 80, 95, 96, 111, 127, 250, 255, 511, 607]
NOTHING = torch.tensor([-math.inf, -math.inf, 0, 0, 0])


def resident(
    world: NativeWorld, requests: list[Request], layer: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw q, k, v as `NativeWorld.begin_layer` does, and append: (q, k, v, parts)."""
    batch = len(requests)
    fused = world.randn(batch, world.q_heads + 2 * world.heads, world.dim)
    q, k, v = fused.split([world.q_heads, world.heads, world.heads], dim=1)
    parts = torch.full((batch, world.q_heads, 5), math.nan)
    world.engine.layer_resident(world.at(layer), q, k, v, parts)
    take(requests, layer, k, v)
    return q, k, v, parts


def begin(world: NativeWorld, layer: int, q: torch.Tensor, plan: Plan) -> tuple[int, torch.Tensor]:
    """Start the layer with the given query and plan: (tasks, out)."""
    out = torch.full((len(q), world.q_heads, world.dim), math.nan, dtype=world.dtype)
    return layer_begin(world.engine, layer, q, None, None, None, plan, world.scale, out), out


def expected_parts(world: NativeWorld, requests: list[Request], layer: int, q: torch.Tensor) -> torch.Tensor:
    """[B, Hq, 5] float64, for requests that hold the new token."""
    parts = torch.empty(len(requests), world.q_heads, 5, dtype=torch.float64)
    for b, request in enumerate(requests):
        keys, values = request.keys[layer], request.values[layer]
        n = len(keys)
        sinks, local = range(min(world.placement.sinks, n)), range(world.placement.window_start(n), n)
        for head in range(world.q_heads):
            h = head // world.group
            runs = [list(sinks), list(local), [*sinks, *local]]
            (o_sink, lse_sink), (o_local, lse_local), (o, _) = (
                attention(q[b, head], keys[run, h], values[run, h], world.scale) for run in runs
            )
            parts[b, head] = torch.stack([lse_sink, lse_local, o_sink.norm(), o_local.norm(), o.norm()])
    return parts


def states(world: NativeWorld) -> dict[str, torch.Tensor]:
    """All state after a step; NaN is replaced by a number so that comparisons work."""
    names = ("tiles", "meta0", "meta1", "meta2", "meta3", "tag1", "tag2", "tag3", "moments")
    kept = {f"{name} {layer}": world.pool.tensor(name, layer) for name in names for layer in range(world.layers)}
    kept |= {f"window {layer}": world.windows[layer].nan_to_num(12345.0) for layer in range(world.layers)}
    return kept


def same_state(a: NativeWorld, b: NativeWorld) -> None:
    other = states(b)
    for name, tensor in states(a).items():
        assert torch.equal(tensor, other[name]), name


def exact(world: NativeWorld, batch: int) -> torch.Tensor:
    """The last layer's output before rounding."""
    out = torch.full((batch, world.q_heads, world.dim), math.nan)
    world.engine.result(out)
    return out


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=examples(15))
@given(data=st.data(), seed=st.integers(0, 2**16), dtype=st.sampled_from(DTYPES), workers=st.integers(1, 3))
def test_it_is_the_fused_path(isa: str, data: st.DataObject, seed: int, dtype: torch.dtype, workers: int) -> None:
    """Outputs agree up to rounding, parts with float64, and tasks exactly; pool and windows are equal bit for bit."""
    shape = {"heads": data.draw(st.integers(1, 3)), "group": data.draw(st.integers(1, 8))}
    shape["dim"] = data.draw(st.sampled_from([32, 48, 64, 128, 256]))
    lengths = data.draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4))
    fused, ahead = (
        NativeWorld(isa=isa, seed=seed, dtype=dtype, workers=workers, layers=2, pages=128, **shape) for _ in range(2)
    )
    pairs = [(fused.add(n), ahead.add(n)) for n in lengths]
    ours, theirs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
    groups = (len(lengths), fused.heads)
    for _ in range(data.draw(st.integers(1, 3))):
        fused.begin_step(theirs)
        ahead.begin_step(ours)
        for layer in range(2):
            plan = fused.plan(theirs)
            blk = st.lists(
                st.sampled_from([0, 1, 16, 32, 64, 128]), min_size=math.prod(groups), max_size=math.prod(groups)
            )
            plan.blk = torch.tensor(data.draw(blk), dtype=torch.int32).view(groups)
            # Mix streaming heads, full heads and others.
            plan.budget = torch.rand(plan.budget.shape, generator=torch.Generator().manual_seed(seed)) * 1.5 - 0.5
            want_tasks, q_fused, want = fused.begin_layer(theirs, layer, plan)
            want_chosen = fused.selections(theirs, want_tasks)
            fused.engine.layer_finish()

            q, _, _, parts = resident(ahead, ours, layer)
            assert torch.equal(q, q_fused)
            tasks, out = begin(ahead, layer, q, plan)
            chosen = ahead.selections(ours, tasks)
            ahead.engine.layer_finish()

            assert tasks == want_tasks and chosen == want_chosen
            # A matrix unit rounds weights by up to 2^-16, and differently if residents have their own softmax.
            atol = 6e-5 if isa == "amx" and ahead.dtype == torch.bfloat16 else 2e-6
            torch.testing.assert_close(exact(ahead, len(ours)), exact(fused, len(ours)), rtol=1e-5, atol=atol)
            assert torch.equal(exact(ahead, len(ours)).to(ahead.dtype), out)
            fused.check(out, want.double())
            ahead.check(out, ahead.expected(ours, layer, q, chosen))
            torch.testing.assert_close(
                parts.double(), expected_parts(ahead, ours, layer, q), rtol=1e-5, atol=max(atol, 1e-5)
            )
            same_state(fused, ahead)
    a, b = fused.engine.stats(), ahead.engine.stats()
    assert a == b


@pytest.mark.parametrize("sinks", [0, 16, 64])
@pytest.mark.parametrize("window", [16, 80])
def test_every_placement(sinks: int, window: int) -> None:
    """Through hundreds of lengths, with pages and blocks filling on the way."""
    fused, ahead = (NativeWorld(placement=Placement(sinks, window), seed=3) for _ in range(2))
    starts = (0, sinks, 300)
    theirs, ours = ([world.add(n) for n in starts] for world in (fused, ahead))
    for step in range(150):
        plan = fused.plan(theirs, (16, 32, 64, 128)[step % 4], 0.4)
        fused.begin_step(theirs)
        ahead.begin_step(ours)
        fused.begin_layer(theirs, 0, plan)
        fused.engine.layer_finish()
        q, _, _, parts = resident(ahead, ours, 0)
        begin(ahead, 0, q, plan)
        ahead.engine.layer_finish()
        torch.testing.assert_close(exact(ahead, 3), exact(fused, 3), rtol=1e-5, atol=2e-6)
        if step % 7 == 0:
            torch.testing.assert_close(parts.double(), expected_parts(ahead, ours, 0, q), rtol=1e-5, atol=1e-5)
    same_state(fused, ahead)
    assert int((ahead.pool.tensor("tag3", 0) >= 0).sum()) > 0


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)  # with the last dtype, windows are not stored as pool tiles
@pytest.mark.parametrize("isa", ISAS)
def test_the_parts_are_those_of_the_host_tiles(isa: str, dtype: torch.dtype) -> None:
    """The parts equal, bit for bit, one attend over the sinks' tiles and one over the window's, wherever the tiles
    lie."""
    world = NativeWorld(isa=isa, dtype=dtype, group=5, dim=64)
    requests = [world.add(n) for n in LENGTHS[:6]] if isa == "scalar" else [world.add(n) for n in LENGTHS[-6:]]
    world.begin_step(requests)
    q, _, _, parts = resident(world, requests, 0)
    tiles = world.pool.tensor("tiles", 0)
    placement = world.placement
    for b, request in enumerate(requests):
        n = request.length
        runs = (0, min(placement.sinks, n)), (placement.window_start(n), max(n, placement.window_start(n)))
        for h in range(world.heads):
            heads = slice(h * world.group, (h + 1) * world.group)
            for part, (start, end) in enumerate(runs):
                pages = torch.tensor(request.pages[start // PAGE : -(-end // PAGE)], dtype=torch.int32)
                masks = torch.full((len(pages), world.group), 0xFFFF)
                if end % PAGE and len(pages):
                    masks[-1] = (1 << end % PAGE) - 1
                o, lse = torch.empty(world.group, world.dim), torch.empty(world.group)
                library().k_attend(
                    isa, q[b, heads].contiguous(), world.scale, tiles[h], pages, masks.to(torch.uint16), o, lse
                )
                assert torch.equal(lse, parts[b, heads, part])
                torch.testing.assert_close(
                    o.double().norm(dim=-1).float(), parts[b, heads, 2 + part], rtol=2e-7, atol=0
                )


@pytest.mark.parametrize("n", [0, 5, 31, 79, 80])
def test_an_empty_middle(n: int) -> None:
    """No tasks: the output is the resident attention, whatever the plan says."""
    world = NativeWorld(workers=1)
    requests = [world.add(n)]
    world.begin_step(requests)
    q, _, _, parts = resident(world, requests, 0)
    tasks, out = begin(world, 0, q, world.plan(requests))
    world.engine.layer_finish()
    assert tasks == 0
    world.check(out, world.expected(requests, 0, q, {}))
    torch.testing.assert_close(out.norm(dim=-1), parts[..., 4])
    assert (parts[..., 1] == -math.inf).all() == (n < world.placement.sinks)


def test_streaming_groups_come_out_as_the_resident_result() -> None:
    world = NativeWorld(dtype=torch.float32)
    requests = [world.add(n) for n in (700, 300)]
    world.begin_step(requests)
    q, _, _, parts = resident(world, requests, 0)
    plan = world.plan(requests)
    plan.blk[0] = 0
    plan.budget[1] = 0
    tasks, out = begin(world, 0, q, plan)
    world.engine.layer_finish()
    assert tasks == 0
    world.check(out, world.expected(requests, 0, q, {}))
    torch.testing.assert_close(out.norm(dim=-1), parts[..., 4], rtol=1e-6, atol=0)


def test_tokens_that_are_written_already() -> None:
    """Without k and v, nothing is appended or sealed."""
    world = NativeWorld()
    requests = [world.add(n) for n in (320, 64, 17)]
    for request in requests:
        request.keys[0] = request.keys[0].clone()
    rows = torch.tensor([r.row for r in requests], dtype=torch.int32)
    world.engine.step(rows, torch.tensor([320, 64, 17], dtype=torch.int32), world.table(requests))
    for name in ("tag1", "tag2", "tag3"):
        world.pool.tensor(name, 0).fill_(-1)
    before = {name: tensor.clone() for name, tensor in states(world).items()}
    q = world.randn(3, world.q_heads, 32)
    parts = torch.full((3, world.q_heads, 5), math.nan)
    world.engine.layer_resident(world.at(), q, None, None, parts)
    _, out = begin(world, 0, q, world.plan(requests))
    world.engine.layer_finish()
    world.check(out, world.expected(requests, 0, q, world.everything(requests)))
    torch.testing.assert_close(parts.double(), expected_parts(world, requests, 0, q), rtol=1e-5, atol=1e-5)
    for name, tensor in states(world).items():
        assert torch.equal(tensor, before[name]), name


def test_foreign_executors_deliver_into_it() -> None:
    world = NativeWorld(workers=1)
    requests = [world.add(n) for n in (700, 300)]
    world.begin_step(requests)
    q, _, _, _ = resident(world, requests, 0)
    assert world.engine.queue_pop(1) == -1, "there is nothing to do before the plan"
    tasks, out = begin(world, 0, q, world.plan(requests))
    done = world.drain_foreign(requests, 0, q)
    world.engine.layer_finish()
    assert len(done) == tasks == 4
    world.check(out, world.expected(requests, 0, q, world.everything(requests)))


@pytest.mark.parametrize("page", [0, 2**31 - 1])
def test_a_bad_request_fails_the_layer_and_spares_the_others(page: int) -> None:
    fused, ahead = (NativeWorld(seed=1) for _ in range(2))
    batches = []
    for world in (fused, ahead):
        good, bad = world.add(127), world.add(303)
        bad.pages[7] = page
        world.begin_step([good, bad])
        batches.append([good, bad])
    plan = fused.plan(batches[0])
    sentence = rf"Layer 0: Request 1 .* page 7 .* id {page}\b"
    fused.begin_layer(batches[0], 0, plan)
    with pytest.raises(RuntimeError, match=sentence):
        fused.engine.layer_finish()
    q, _, _, parts = resident(ahead, batches[1], 0)
    assert torch.equal(parts[1], NOTHING.expand(ahead.q_heads, 5))
    _, out = begin(ahead, 0, q, plan)
    with pytest.raises(RuntimeError, match=sentence):
        ahead.engine.layer_finish()
    good = batches[1][:1]
    ahead.check(out[:1], ahead.expected(good, 0, q, ahead.everything(good)))
    torch.testing.assert_close(parts[:1].double(), expected_parts(ahead, good, 0, q[:1]), rtol=1e-5, atol=1e-5)
    same_state(fused, ahead)  # pages that the good request filled are sealed
    assert int((ahead.pool.tensor("tag3", 0) == good[0].pages[7]).sum()) == 1


def test_a_bad_row_fails_the_layer() -> None:
    """Only the resident half sees the windows, so its failure must outlast the plan."""
    world = NativeWorld()
    requests = [world.add(n) for n in (100, 90)]
    world.engine.step(
        torch.tensor([requests[0].row, 6], dtype=torch.int32),
        torch.tensor([101, 91], dtype=torch.int32),
        world.table(requests),
    )
    q, _, _, parts = resident(world, requests, 0)
    assert parts[0].isfinite().all() and torch.equal(parts[1], NOTHING.expand(world.q_heads, 5))
    begin(world, 0, q, world.plan(requests))
    with pytest.raises(RuntimeError, match="Layer 0: Request 1 has the row 6"):
        world.engine.layer_finish()
    world.engine.step(*(torch.zeros(2, dtype=torch.int32) + n for n in (0, 50)), world.table(requests))
    with pytest.raises(ValueError, match="the same row"):
        world.engine.layer_resident(world.at(), q, q[:, :2], q[:, :2], parts)


@pytest.mark.parametrize("what", ["abandon", "step", "layer", "window"])
def test_the_resident_result_is_dropped(what: str) -> None:
    """Any call other than its own layer drops it. If the layer then starts without a window, it has none."""
    world = NativeWorld(layers=2)
    requests = [world.add(n) for n in (351, 80)]
    world.begin_step(requests)
    q, k, v, parts = resident(world, requests, 0)
    before = {name: tensor.clone() for name, tensor in states(world).items() if name.endswith("0")}
    plan = world.plan(requests)
    rows = torch.tensor([r.row for r in requests], dtype=torch.int32)
    lengths = torch.tensor([r.length for r in requests], dtype=torch.int32)
    if what == "abandon":
        world.engine.abandon()
    elif what == "step":
        world.engine.step(rows, lengths, world.table(requests))
    elif what == "layer":
        with pytest.raises(ValueError, match="Layer 1 has no residents"):
            begin(world, 1, q, plan)
    else:
        out = torch.full_like(q, math.nan)
        layer_begin(world.engine, 0, q, k, v, world.windows[0], plan, world.scale, out)
        world.engine.abandon()
    with pytest.raises(RuntimeError, match="begin a layer first"):
        world.engine.layer_finish()
    with pytest.raises(ValueError, match="Layer 0 has no residents"):
        begin(world, 0, q, plan)
    after = states(world)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items()), "nothing was sealed"
    # Repeat from the start to the end.
    again = torch.full_like(parts, math.nan)
    world.engine.layer_resident(world.at(), q, k, v, again)
    assert torch.equal(again, parts)
    _, out = begin(world, 0, q, plan)
    world.engine.layer_finish()
    world.check(out, world.expected(requests, 0, q, world.everything(requests)))
    assert bool((world.pool.tensor("tag1", 0) == requests[0].pages[21]).any())


def test_it_ends_an_open_layer_and_is_no_result() -> None:
    world = NativeWorld(layers=2)
    requests = [world.add(n) for n in (700, 300)]
    world.begin_step(requests)
    world.begin_layer(requests, 0, world.plan(requests))
    claim = world.engine.queue_pop(1)
    q, _, _, _ = resident(world, requests, 1)
    if claim >= 0:
        assert not world.engine.task_done(claim, torch.full((2, 32), math.nan), torch.zeros(2), 0)
    with pytest.raises(RuntimeError, match="begin a layer first"):
        world.engine.layer_finish()
    with pytest.raises(RuntimeError, match="There is no result"):
        exact(world, 2)
    begin(world, 1, q, world.plan(requests))
    world.engine.layer_finish()
    exact(world, 2)


def test_arguments_that_do_not_fit_are_refused_and_keep_what_is_there() -> None:
    world = NativeWorld()
    requests = [world.add(n) for n in (100, 90)]
    world.begin_step(requests)
    q, k, v, parts = resident(world, requests, 0)
    kept, window = parts.clone(), world.windows[0]
    with pytest.raises(ValueError, match="no multiple of the 6 pages of a row"):
        AttentionLayer(world.engine, 0, 1.0, window[:, :-1])
    with pytest.raises(ValueError, match="has no windows"):
        world.engine.layer_resident(AttentionLayer(world.engine, 0, 1.0), q, k, v, parts)
    assert torch.equal(kept, parts)
    _, out = begin(world, 0, q, world.plan(requests))
    world.engine.layer_finish()
    assert out.isfinite().all()
    with pytest.raises(ValueError, match="no layer 1"):
        AttentionLayer(world.engine, 1, 1.0, window)


def test_an_empty_batch() -> None:
    world = NativeWorld()
    world.engine.step(*(torch.empty(0, dtype=torch.int32) for _ in range(2)), torch.empty(0, 1, dtype=torch.int32))
    q, kv = torch.empty(0, world.q_heads, 32), torch.empty(0, world.heads, 32)
    world.engine.layer_resident(world.at(), q, kv, kv, torch.empty(0, world.q_heads, 5))
    tasks, _ = begin(world, 0, q, world.plan([]))
    world.engine.layer_finish()
    assert tasks == 0
