"""The near middle on the simulated device reads the same as the CPU, wherever tiles lie."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stream_device import Broken, Passes, check_that_it_goes_on, fail

from fluxion_sglang.device.near import metadata_bytes, request_bytes
from fluxion_sglang.kv.host_pool import GIB
from fluxion_sglang.policy import Policy, parse_spec

Make = Callable[..., Passes]


def maker(monkeypatch: pytest.MonkeyPatch, made: list[Passes], **always: Any) -> Make:
    def make(copies: int = 0, **kw: Any) -> Passes:
        """copies: number of tiles per KV head."""
        heads, dim = kw.get("heads", 2), kw.get("dim", 64)
        tile = 2 * 16 * dim * kw.get("dtype", torch.float32).itemsize
        made.append(Passes(monkeypatch, copies_gb=copies * heads * tile / GIB, **always, **kw))
        return made[-1]

    return make


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Passes] = []
    yield maker(monkeypatch, made, checked=False)
    while made:
        made[-1].library.inject("none", 1)
        made[-1].device.close()
        made.pop().pinned.release()
    gc.collect()  # streams end with their owners; each holds a hundred stacks, and sanitizer data for them


def both(near: Passes, plain: Passes, rows: list[int], policies: list[Policy] | None = None) -> None:
    """A decode step of two worlds with equal random data."""
    for one in (near, plain):
        one.begin_decode(rows, policies)
    tolerance = 1e-4 if near.world.dtype == torch.float32 else 3e-2
    for layer in range(near.world.layers):
        (got, exact), (want, same) = near.layer(layer, rows), plain.layer(layer, rows)
        assert torch.equal(exact, same), "the worlds differ"
        torch.testing.assert_close(got, want, atol=tolerance, rtol=0)
    for one in (near, plain):
        one.device.finish()


def counts(one: Passes) -> tuple[int, int, int]:
    stats = one.device.stats()
    return stats["near_tiles"], stats["far_tiles"], stats["near_copies"]


@pytest.mark.parametrize(
    ("spec", "copies", "union"),
    [
        ("fixed:16:0.1", 60, True),
        ("fixed:16:0.1", 4000, True),
        *[
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("fixed:16:0.1", 60, False), ("fixed:64:0.2", 3, True), ("fixed:128:0.5", 60, False),
                ("full", 60, True), ("streaming", 60, True),
            )
        ],
    ],
)  # fmt: skip
def test_it_reads_what_the_cpu_reads(passes: Make, spec: str, copies: int, union: bool) -> None:
    """Steps that fill pages and move the window, with requests without a middle and with a cut last block."""
    kw: dict[str, Any] = {"seed": 3, "policy": spec, "attend_union": union}
    near, plain = passes(copies, **kw), passes(**kw)
    for one in (near, plain):
        one.extend({1: 1211, 2: 300, 3: 779, 4: 30})
        one.extend({2: 401})
    for _ in range(6):
        both(near, plain, [3, 1, 2, 4])
    hits, misses, kept = counts(near)
    if spec == "streaming":
        assert hits == misses == 0
    elif copies == 4000:
        assert hits > 0 and misses == kept == 0, "what was prefilled or decoded is near"
    else:
        assert misses > 0 and kept > 0
        assert copies < 60 or hits > 0


@pytest.mark.parametrize(
    ("group", "dim", "dtype"),
    [
        (1, 32, torch.float32),
        (7, 48, torch.bfloat16),
        *[
            pytest.param(*shape, dtype, marks=pytest.mark.full)
            for shape, dtype in product([(4, 128), (16, 64), (8, 256)], [torch.float32, torch.bfloat16])
        ],
    ],
)
def test_every_shape(passes: Make, group: int, dim: int, dtype: torch.dtype) -> None:
    # Integers, so that both sides rank by equal scores, with many ties.
    kw: dict[str, Any] = {
        "seed": group, "policy": "fixed:32:0.15", "group": group, "dim": dim, "dtype": dtype, "whole": True, "layers": 1
    }  # fmt: skip
    near, plain = passes(40, **kw), passes(**kw)
    for one in (near, plain):
        one.extend({1: 600, 2: 900})
    for _ in range(2):
        both(near, plain, [2, 1])
    assert counts(near)[0] > 0 and counts(near)[1] > 0


def test_copies_follow_what_is_read(passes: Make) -> None:
    """With enough room, steps soon find their tiles near."""
    near = passes(150, seed=4, policy="full", layers=1)
    near.extend({1: 2000})
    for _ in range(2):  # another request takes the place
        near.extend({2: 900})
    misses = []
    for _ in range(8):
        before = counts(near)[1]
        near.decode([1])
        misses.append(counts(near)[1] - before)
    assert misses[0] > 0 and misses[-1] == 0


def test_pages_that_another_request_wrote(passes: Make) -> None:
    """A shared prefix, and pages that were freed and written again."""
    kw: dict[str, Any] = {"seed": 5, "policy": "fixed:16:0.2", "layers": 1}
    near, plain = passes(50, **kw), passes(**kw)
    for one in (near, plain):
        one.extend({1: 1500})
    for _ in range(18):
        both(near, plain, [1])
    for one in (near, plain):
        world = one.world
        world.share(2, 1, world.length(1) // 16)  # also pages that decode steps filled
        n = world.length(2)
        one.device.heal(2, n, world.page_list(2, n))
        one.extend({2: 400})
    for _ in range(3):
        both(near, plain, [2, 1])
    for one in (near, plain):
        world = one.world
        world.free += world.pages.pop(1)[::-1]
        for kept in (world.keys, world.values):
            del kept[1]
        # The shared pages still belong to the other request.
        world.free = [page for page in world.free if page not in world.pages[2]]
        one.extend({3: 1400})
    for _ in range(3):
        both(near, plain, [3, 2])


def test_policies_that_it_cannot_choose_for(passes: Make) -> None:
    """The CPU executes their steps; pages that these fill are near afterwards."""
    near, plain = (passes(copies, seed=6, layers=1) for copies in (2000, 0))
    for one in (near, plain):
        one.extend({1: 900, 2: 1200})
    fixed = parse_spec("fixed:16:0.1")
    both(near, plain, [1, 2], [fixed, parse_spec("fixed:32:0.3")])
    assert counts(near)[0] > 0
    before = counts(near)
    for _ in range(17):
        both(near, plain, [1, 2], [fixed, parse_spec("anchor")])
    assert counts(near)[:2] == before[:2]
    both(near, plain, [1], [fixed])
    assert counts(near)[1] == 0


@settings(max_examples=examples(4), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 1500), min_size=1, max_size=4),
    blk=st.sampled_from([16, 32, 64, 128]),
    budget=st.floats(0.01, 1.0),
    copies=st.integers(1, 200),
    seed=st.integers(0, 1000),
)
def test_any_step(lengths: list[int], blk: int, budget: float, copies: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        kw: dict[str, Any] = {"seed": seed, "policy": f"fixed:{blk}:{budget:.3f}", "layers": 1, "checked": False}
        made = [Passes(monkeypatch, copies_gb=n * 2 * 2 * 16 * 64 * 4 / GIB, **kw) for n in (copies, 0)]
        try:
            for one in made:
                one.extend({row + 1: count for row, count in enumerate(lengths)})
            for _ in range(3):
                both(made[0], made[1], [row + 1 for row in range(len(lengths))])
        finally:
            for one in made:
                one.device.close()
                one.pinned.release()


def test_after_a_pass_that_failed(passes: Make) -> None:
    one = passes(400, seed=8, layers=3)
    one.extend({1: 800, 2: 400})
    one.begin_decode([1, 2], [Broken(fail), parse_spec("full")])
    for layer in range(3):
        one.layer(layer, [1, 2])
    with pytest.raises(RuntimeError, match="the plan went wrong"):
        one.device.finish()
    check_that_it_goes_on(one, [1, 2])
    one.begin_decode([1, 2])
    one.layer(0, [1, 2])
    one.device.abort()
    one.device.finish()
    check_that_it_goes_on(one, [1, 2])
    assert counts(one)[0] > 0


@pytest.mark.parametrize("part", [pytest.param(0, marks=pytest.mark.full), 1], ids=["key", "value"])
def test_a_nan_reaches_exactly_the_heads_that_read_it(passes: Make, part: int) -> None:
    """Both in a tile with a copy and in one that the CPU reads."""
    kw: dict[str, Any] = {"seed": 9, "policy": "fixed:16:0.3", "attend_union": False, "layers": 1}
    near, plain = passes(200, **kw), passes(**kw)
    for one in (near, plain):
        one.extend({1: 1500})
        one.world.pool.tiles(0)[0, one.world.pages[1][20], part, 4] = float("nan")
    assert near.device._near is not None
    near.device._near.renew(0)  # copies come from the pool again
    reached = []
    for _ in range(12):
        missed = counts(near)[1]
        found = []
        for one in (near, plain):
            one.begin_decode([1])
            found.append(one.layer(0, [1])[0][0].isnan().any(-1).tolist())
            one.device.finish()
        assert found[0] == found[1]
        if counts(near)[1] == missed:
            reached.append(sum(found[0]))
    assert any(reached) and all(n < 8 for n in reached), "a tile that is near, and heads that do not read it"


def test_a_list_that_is_cut_into_parts_of_several_rounds(passes: Make) -> None:
    shape = {"layers": 1, "heads": 1, "group": 2, "dim": 32, "max_tokens": 8192}
    kw: dict[str, Any] = {"seed": 10, "policy": "full", **shape}
    near, plain = passes(1000, **kw), passes(**kw)
    for one in (near, plain):
        one.extend({1: 5500, 2: 600})
    both(near, plain, [1])
    both(near, plain, [2, 1])
    assert counts(near)[0] > 2 * 320 and counts(near)[1] == 0


def test_less_memory_than_a_tile(passes: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="hot_tiles_gb is 1e-07, less than one tile"):
        Passes(monkeypatch, copies_gb=1e-7)


def test_copies_keep_apart_when_pages_are_written_anew(passes: Make) -> None:
    """Pages of an ended request, including those whose copies are evicted next."""
    near, plain = (passes(copies, seed=3, layers=1) for copies in (64, 0))
    for turn in range(4):
        for one in (near, plain):
            world = one.world
            if 1 in world.pages:
                world.free += world.pages.pop(1)[::-1]
                del world.keys[1], world.values[1]
            one.extend({1: 16 * (72 + 2 * turn) + 3})
        both(near, plain, [1])


@pytest.mark.parametrize("union", [True, False])
def test_what_it_takes_is_known_before(passes: Make, union: bool) -> None:
    one = passes(2000, attend_union=union)
    shape, near = one.world.pool.shape, one.device._near
    assert near is not None
    tokens = one.world.pool.pages * 16
    assert metadata_bytes(shape, tokens) * 16 == tokens * shape.layers * shape.token_bytes
    copies = 2000 * 16 * shape.token_bytes
    foreseen = metadata_bytes(shape, tokens) + copies + one.world.rows * request_bytes(shape, 4, 2048, union)
    assert foreseen < near.nbytes < 1.03 * foreseen + 100_000
