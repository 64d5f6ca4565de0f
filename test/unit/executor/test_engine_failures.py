"""Failures of the native engine: wrong pages, rows and arguments, exhausted memory, and layers that are never
finished."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from native_world import NativeWorld, Plan, layer_begin
from places import python
from test_engine import run_full


@pytest.mark.parametrize("page", [0, -1, 256, 2**31 - 1, -(2**31)])
def test_a_bad_page_id_fails_its_layers_and_no_others(page: int) -> None:
    world = NativeWorld(layers=2)
    good, bad = world.add(200), world.add(300)
    right = list(bad.pages)
    bad.pages[7] = page
    world.begin_step([good, bad])
    for layer in range(2):
        _, q, out = world.begin_layer([good, bad], layer, world.plan([good, bad]))
        with pytest.raises(
            RuntimeError, match=rf"Layer {layer}: Request 1 .* page 7 .* id {page}\b.* between 1 and 255"
        ):
            world.engine.layer_finish()
        # the others are computed
        world.check(out[:1], world.expected([good], layer, q, world.everything([good], layer)))
    bad.pages[:19] = right
    for layer in range(2):  # the token of the failed step was not written
        bad.keys[layer], bad.values[layer] = bad.keys[layer][:-1], bad.values[layer][:-1]
    run_full(world, [bad, good])


def test_bad_lengths_rows_and_blocks() -> None:
    world = NativeWorld()
    requests = [world.add(100), world.add(90)]
    table = world.table(requests)
    plan = world.plan(requests)
    q, k, v = (world.randn(2, world.q_heads, 32), world.randn(2, world.heads, 32), world.randn(2, world.heads, 32))
    out = torch.empty_like(q)

    def layer(rows: list[int], lengths: list[int], plan: Plan) -> None:
        world.engine.step(torch.tensor(rows, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), table)
        layer_begin(world.engine, 0, q, k, v, world.windows[0], plan, 1.0, out)
        world.engine.layer_finish()

    row = [r.row for r in requests]
    with pytest.raises(RuntimeError, match="Request 0 cannot be computed: it has 0 tokens"):
        layer(row, [0, 90], plan)
    with pytest.raises(RuntimeError, match="Request 1 cannot be computed: it has 100000 tokens"):
        layer(row, [100, 100000], plan)
    with pytest.raises(RuntimeError, match="Request 1 has the row 6"):
        layer([row[0], 6], [100, 90], plan)
    with pytest.raises(ValueError, match="the same row"):
        layer([row[0], row[0]], [100, 90], plan)
    odd = world.plan(requests)
    odd.blk[1, 1] = 24
    with pytest.raises(RuntimeError, match="KV head 1 asks for blocks of 24 tokens"):
        layer(row, [100, 90], odd)
    with pytest.raises(RuntimeError, match="without layer_begin"):
        world.engine.layer_finish()
    layer(row, [100, 90], plan)


def test_arguments_that_do_not_fit_are_refused_and_open_no_layer() -> None:
    """These arguments do not fit together; test_arguments.py tests single illegal arguments."""
    world = NativeWorld()
    requests = [world.add(100), world.add(90)]
    world.begin_step(requests)
    plan = world.plan(requests)
    q, k, v = (world.randn(2, heads, 32) for heads in (world.q_heads, world.heads, world.heads))
    window, few = world.windows[0], plan.budget[:, :-1].contiguous()
    for layer, windows, budget, sentence in (
        (0, window[:, :-1], plan.budget, "no multiple of the 6 pages of a row"),
        (0, window, few, "budget has 3 heads and blk has 2"),
        (1, window, plan.budget, "no layer 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            layer_begin(world.engine, layer, q, k, v, windows, replace(plan, budget=budget), 1.0, q.clone())
    with pytest.raises(RuntimeError, match="without layer_begin"):
        world.engine.layer_finish()
    sizes = {"q_heads": 4, "max_requests": 1, "max_pages": 1, "attend_union": True, "share_prefixes": False}
    for sinks, window, sentence in ((16, 48, "sinks is 16"), (32, 40, "window is 40"), (32, 0, "window is 0")):
        with pytest.raises(ValueError, match=sentence):
            type(world.engine)(world.pool.workers, world.pool, sinks=sinks, window=window, **sizes)


def test_an_abandoned_layer_does_no_harm() -> None:
    """A caller that fails between begin and finish ends those requests, and serves others."""
    world = NativeWorld()
    requests = [world.add(n) for n in (700, 300)]
    others = [world.add(n) for n in (600, 400)]
    world.begin_step(requests)
    world.begin_layer(requests, 0, world.plan(requests))
    claim = world.engine.queue_pop(1)
    run_full(world, others)
    if claim >= 0:
        assert not world.engine.task_done(claim, torch.full((2, 32), torch.nan), torch.zeros(2), 0)
    with pytest.raises(RuntimeError, match="no task 0 now"):
        world.engine.task(0)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_abandoned_layer_writes_nothing_afterwards(workers: int) -> None:
    """Its page and row may belong to another request by then, whose data must survive."""
    world = NativeWorld(workers=workers)
    requests = [world.add(n) for n in (703, 351)]
    world.begin_step(requests)
    world.begin_layer(requests, 0, world.plan(requests))
    world.engine.abandon()
    tensors = [world.pool.tensor(name, 0) for name in ("tiles", "meta0", "meta1", "tag1", "moments")]
    tensors.append(world.windows[0])
    for tensor in tensors:
        tensor.fill_(5)
    world.begin_step(requests)
    with pytest.raises(RuntimeError, match="begin a layer first"):
        world.engine.layer_finish()
    assert all((tensor == 5).all() for tensor in tensors)


def test_results_are_those_of_a_layer_that_was_finished() -> None:
    world = NativeWorld()
    request = world.add(500)
    result, reads = torch.empty(1, world.q_heads, 32), torch.empty(1, world.heads, 2, dtype=torch.int64)

    def none() -> None:
        with pytest.raises(RuntimeError, match="There is no result"):
            world.engine.result(result)
        with pytest.raises(RuntimeError, match="There is no result"):
            world.engine.reads(reads)

    world.begin_step([request])
    none()
    world.begin_layer([request], 0, world.plan([request]))
    none()
    world.engine.layer_finish()
    world.engine.result(result)
    world.engine.reads(reads)
    assert (reads[..., 0] > 0).all()
    world.begin_step([request])
    none()
    odd = world.plan([request], blk=24)
    world.begin_layer([request], 0, odd)
    with pytest.raises(RuntimeError, match="blocks of 24"):
        world.engine.layer_finish()
    none()


MEMORY_RUNS_OUT = """
import resource
import torch
from native_world import NativeWorld

def short_of_memory(step):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), old[1]))
    try:
        step()
    except RuntimeError as error:
        assert "bad_alloc" in str(error), error
        return
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)
    raise SystemExit("there was room")

world = NativeWorld(heads=1, group=16, pages=26000, workers=1)
requests = [world.add(400_000)]
one = lambda value: torch.tensor([value], dtype=torch.int32)
row, length, table = one(requests[0].row), one(requests[0].length), world.table(requests)
short_of_memory(lambda: world.engine.step(row, length, table))
for blk in (16, 1):  # the second asks for more room, within a layer
    plan = world.plan(requests, blk, 0.01)
    world.begin_step(requests)
    if blk == 1:
        short_of_memory(lambda: world.begin_layer(requests, 0, plan))
        try:
            world.engine.result(torch.empty(1, 16, 32))
        except RuntimeError as error:
            assert "no result" in str(error)
        else:
            raise SystemExit("a result of a layer that never began")
    tasks, q, out = world.begin_layer(requests, 0, plan)
    chosen = world.selections(requests, tasks)
    world.engine.layer_finish()
    world.check(out, world.expected(requests, 0, q, chosen))
print("ok")
"""


@pytest.mark.full
def test_memory_that_runs_out_fails_a_layer_and_leaves_the_engine_whole() -> None:
    """If sizes were raised before the allocation, the next layer would write past its arrays."""
    # With a fixed threshold, large blocks come from the system and return to it, so that the limit takes effect.
    done = python("-c", MEMORY_RUNS_OUT, env={"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"})
    assert done.stdout.strip() == "ok", done.stderr
