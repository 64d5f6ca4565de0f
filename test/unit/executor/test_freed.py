"""No request reads data that another request left in the host pool.

Freed pages are poisoned with NaN: tiles, their metadata and moments, and the coarse entries that end in them. If a
request read a token that it has not written, its output would show it, because NaN propagates through sums.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from native_world import NativeWorld, Request, attention

from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.native import topology

ISAS: list[str] = topology()["isas"]


def poison(world: NativeWorld, pages: list[int]) -> None:
    for layer in range(world.layers):
        for name in ("tiles", "meta0", "moments"):
            world.pool.tensor(name, layer)[:, pages] = torch.nan
        for level in (1, 2, 3):
            tags, entries = world.pool.tensor(f"tag{level}", layer), world.pool.tensor(f"meta{level}", layer)
            for page in pages:
                if int(tags[page >> level]) in (page, -1):
                    entries[:, page >> level] = torch.nan


def free(world: NativeWorld, request: Request, shared: set[int]) -> None:
    """Free its row, and its pages that no other request has."""
    gone = [page for page in request.pages if page not in shared]
    poison(world, gone)
    for windows in world.windows:
        first = request.row * world.placement.slot_pages
        windows[:, first : first + world.placement.slot_pages] = torch.nan
    world.free = gone[::-1] + world.free  # the next request gets them first or last
    world.free_rows.append(request.row)


def check_prefill(world: NativeWorld, request: Request, start: int, budget: float) -> None:
    tokens = request.length - start
    pages = torch.tensor(request.pages, dtype=torch.int32)
    q = world.randn(tokens, world.q_heads, world.dim)
    out = torch.full_like(q, torch.nan)
    world.pool.attend_chunk(0, pages, start, q, world.scale, out, budget)
    assert torch.isfinite(out).all()
    if budget == 1:
        for t, head in ((0, 0), (tokens - 1, world.q_heads - 1)):
            keys, values = (at[0][: start + t + 1, head // world.group] for at in (request.keys, request.values))
            want, _ = attention(q[t, head], keys, values, world.scale)
            torch.testing.assert_close(out[t, head].double(), want, **world.tolerance())


def check_described(world: NativeWorld, request: Request) -> None:
    full = request.pages[: request.length // PAGE]
    for name in ("meta0", "moments"):
        assert torch.isfinite(world.pool.tensor(name, 0)[:, full]).all(), name


def decode(world: NativeWorld, requests: list[Request], blk: int, budget: float, first: bool) -> None:
    plan = world.plan(requests, blk, budget)
    plan.owner = torch.zeros_like(plan.blk)
    world.begin_step(requests)
    tasks, q, out = world.begin_layer(requests, 0, plan, first)
    chosen = world.selections(requests, tasks)
    world.engine.layer_finish()
    world.check(out, world.expected(requests, 0, q, chosen))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=examples(20))
@given(data=st.data(), seed=st.integers(0, 2**16), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_nobody_reads_what_its_owner_has_not_written(
    isa: str, data: st.DataObject, seed: int, dtype: torch.dtype
) -> None:
    world = NativeWorld(isa=isa, seed=seed, dtype=dtype, share_prefixes=True, pages=160)
    poison(world, list(range(1, world.pages)))
    requests: list[Request] = []
    for _ in range(data.draw(st.integers(4, 12))):
        room = len(world.free) - len(requests)
        action = data.draw(st.sampled_from(["add", "fork", "decode", "decode", "free"]))
        if action in ("add", "fork") and world.free_rows and room > 40:
            parent = data.draw(st.sampled_from(requests)) if action == "fork" and requests else None
            shared = parent.length // PAGE * PAGE if parent else 0
            request = world.add(shared + data.draw(st.integers(1, 300)), parent, shared)
            requests.append(request)
            check_prefill(world, request, shared, data.draw(st.sampled_from([1.0, 0.2])))
        elif action == "decode" and requests and room > 0:
            blk, budget = data.draw(st.sampled_from([(16, 1.0), (16, 0.2), (64, 0.3), (128, 0.1), (1, 0.1)]))
            decode(world, requests, blk, budget, first=data.draw(st.booleans()))
        elif action == "free" and requests:
            gone = requests.pop(data.draw(st.integers(0, len(requests) - 1)))
            free(world, gone, {page for request in requests for page in request.pages})
        for request in requests:
            check_described(world, request)


def test_poison_that_is_read_shows() -> None:
    """The test above can fail: a single token that its owner has not written is enough."""
    for name, index in (("tiles", 1), ("tiles", 0)):
        world = NativeWorld()
        request = world.add(300)
        page: Any = request.pages[5]
        world.pool.tensor(name, 0)[0, page, index, 7, 3] = torch.nan
        with pytest.raises(AssertionError):
            decode(world, [request], 16, 1.0, first=False)
