"""The score tables of LFPS against its equations, over hundreds of steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from lfps_reference import threshold
from lfps_world import TablesWorld, listed_positions, lists_of

from fluxion_lab.lfps_tables import LfpsTables
from fluxion_sglang.kv.placement import PAGE, Placement


def run(world: TablesWorld, rows: list[int], steps: int, keep: float = 0.3, local: float = 2.0) -> int:
    """Steps of `rows`, each checked; returns the number of undecidable candidates."""
    left_open = 0
    for _ in range(steps):
        q = world.sharp * world.randn(len(rows), world.q_heads, world.dim)
        plan = world.plan(rows, q)
        left_open += world.check_candidates(rows, plan)
        world.choose(rows, plan, q, keep)
        world.learn(rows, plan, local * world.randn(len(rows), world.q_heads))
    for row in rows:
        world.check_tables(row)
    return left_open


@settings(max_examples=examples(25), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=3), queries=st.integers(1, 20),
    group=st.sampled_from([1, 2, 5]), sharp=st.sampled_from([0.0, 0.5, 2.0, 8.0]),
    keep=st.sampled_from([0.0, 0.3, 1.0]),
    sinks=st.sampled_from([0, 16, 64]), window=st.sampled_from([16, 64]), expand=st.booleans(),
    alpha=st.sampled_from([(0.2, 0.2), (0.1, 0.3), (1.0, 0.01)]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_random_requests(
    lengths: list[int], queries: int, group: int, sharp: float, keep: float, sinks: int, window: int, expand: bool,
    alpha: tuple[float, float], seed: int,
) -> None:  # fmt: skip
    world = TablesWorld(
        group=group, seed=seed, sharp=sharp, alpha=alpha, expand=expand, placement=Placement(sinks, window)
    )
    rows = list(range(len(lengths)))
    for row, length in zip(rows, lengths, strict=True):
        world.start(row, length, min(queries, length))
    run(world, rows, steps=20, keep=keep)


@pytest.mark.parametrize("renormalise", [40, pytest.param(3, marks=pytest.mark.full)])
def test_hundreds_of_steps(renormalise: int) -> None:
    """Tokens enter the middle, entries are multiplied, and the tables grow; almost no candidate is undecidable."""
    world = TablesWorld(seed=1, renormalise=renormalise, heads=1)
    world.start(2, 300)
    assert run(world, [2], steps=400) < 20


def test_renormalisation_changes_no_choice() -> None:
    """Renormalisation uses powers of two, so the bits do not depend on its time."""
    lists, tables = [], []
    for renormalise in (40, 3):
        world = TablesWorld(seed=2, renormalise=renormalise)
        world.start(0, 350)
        found = []
        for _ in range(120):
            q = world.sharp * world.randn(1, world.q_heads, world.dim)
            plan = world.plan([0], q)
            own = lists_of(plan)
            found.append([part.clone() for part in (own.offsets, own.pages, own.masks)])
            world.choose([0], plan, q, 0.3)
            world.learn([0], plan, torch.zeros(1, world.q_heads))
        lists.append(found)
        tables.append([world.tables.tables(0, 0, head, 470) for head in range(world.q_heads)])
    for found in lists[1:]:
        for got, want in zip(found, lists[0], strict=True):
            assert all(torch.equal(a.to(torch.int64), b.to(torch.int64)) for a, b in zip(got, want, strict=True))
    for other in tables[1:]:
        for (v, s), (vertical, slash) in zip(other, tables[0], strict=True):
            assert torch.equal(v, vertical) and torch.equal(s, slash)


def newest_page(world: TablesWorld, row: int) -> list[int]:
    start = world.placement.window_start(len(world.keys[row]))
    return list(range(start - PAGE, start))


def step(world: TablesWorld, row: int) -> tuple[torch.Tensor, list[list[int]]]:
    """A plan of one row without its update: q, and the list of each head."""
    q = world.randn(1, world.q_heads, world.dim)
    plan = world.plan([row], q)
    return q, [listed_positions(plan, *divmod(head, world.group)) for head in range(world.q_heads)]


def test_flat_tables_have_no_candidates_but_the_newest_page() -> None:
    """A query that gives all tokens equal weight: every entry is the mean, and none exceeds it."""
    world = TablesWorld()
    world.start(0, 400, q=torch.zeros(1, 4, 32))
    for _ in range(3):
        _, lists = step(world, 0)
        # New offsets weigh nothing yet, so the mean is slightly below the other entries, and a neighbour exceeds it.
        newest = newest_page(world, 0)
        assert lists == [[newest[0] - 1, *newest]] * 4


def test_zero_weights_leave_empty_tables() -> None:
    """The window outweighs the middle so much that nothing is learnt, and earlier entries decay."""
    world = TablesWorld()
    world.start(0, 300)
    for _ in range(30):
        q = world.randn(1, world.q_heads, world.dim)
        plan = world.plan([0], q)
        world.choose([0], plan, q, 1.0)
        world.learn([0], plan, torch.full((1, world.q_heads), 1e4))
    world.check_tables(0)
    vertical, _ = world.tables.tables(0, 0, 0, 330)
    assert 0 < vertical.sum() < 10 * 0.95**30 * 1.01


@pytest.mark.parametrize("at", [32, 47, 48, 100, 255, 256, 287])
def test_one_spike(at: int) -> None:
    """One token has all the weight of the last query, on either side of page borders and at both ends of the middle.
    The list is this token and its slash."""
    world = TablesWorld(heads=1, group=1)
    world.append(0, world.randn(351, 1, 32), world.randn(351, 1, 32))
    world.keys[0][at] *= 4
    world.pool.append(0, world.pages_of(0), 0, world.keys[0], world.values[0])
    world.begin(0, 4 * world.keys[0][at].view(1, 1, 32))
    for ahead in (1, 2, 3):  # the slash continues from the position
        _, (found,) = step(world, 0)
        assert set(found) == ({at, at + ahead} & set(range(32, 304))) | set(newest_page(world, 0))


def test_more_candidates_than_wanted_and_fewer() -> None:
    """A budget of everything still lists and ranks every candidate; such budgets stay below 1, which would skip the
    scores."""
    world = TablesWorld(alpha=(0.01, 0.01))
    world.start(0, 400)
    q = world.randn(1, 4, 32)
    plan = world.plan([0], q, budget=1.0)
    assert (plan.budget < 1).all() and (plan.budget > 0.999).all()
    assert (plan.blk == -1).all()


def test_no_middle_no_lists() -> None:
    world = TablesWorld()
    world.start(0, 20)
    plan = world.plan([0], world.randn(1, 4, 32))
    lists = lists_of(plan)
    assert lists.offsets.tolist() == [0, 0, 0] and (plan.budget == 0).all() and (lists.given.lse == -math.inf).all()
    world.learn([0], plan, torch.zeros(1, 4))
    world.check_tables(0)


def _next(turn: Iterator[torch.Tensor], *size: int) -> torch.Tensor:
    found = next(turn)
    assert found.shape == size
    return found


def test_requests_do_not_depend_on_their_batch() -> None:
    """Alone or beside others, in any order and with any number of workers: equal bits."""

    def lists_of(rows: list[int], workers: int) -> dict[int, list[list[int]]]:
        world = TablesWorld(seed=3, workers=workers)
        random = {row: torch.Generator().manual_seed(row) for row in range(3)}
        draw = {row: lambda *size, row=row: torch.randn(*size, generator=random[row]) for row in range(3)}
        for row in range(3):
            world.append(row, draw[row](300 + 50 * row, 2, 32), draw[row](300 + 50 * row, 2, 32))
            world.begin(row, draw[row](5, 4, 32))
        found: dict[int, list[list[int]]] = {row: [] for row in rows}
        for _ in range(20):
            q = torch.stack([draw[row](4, 32) for row in rows])
            tokens = {row: draw[row](2, 1, 2, 32) for row in rows}
            turn = iter([t for row in rows for t in tokens[row]])
            world.randn = partial(_next, turn)  # type: ignore[method-assign]
            plan = world.plan(rows, q)
            for b, row in enumerate(rows):
                found[row] += [listed_positions(plan, b * 2 + h, g) for h in range(2) for g in range(2)]
            world.choose(rows, plan, q, 0.3)
            world.learn(rows, plan, torch.zeros(len(rows), 4))
        return found

    alone = {row: lists_of([row], 1)[row] for row in range(3)}
    for rows, workers in (([0, 1, 2], 1), ([2, 0, 1], 2), ([1, 2], 2)):
        assert lists_of(rows, workers) == {row: alone[row] for row in rows}


def test_a_row_is_begun_anew() -> None:
    """Nothing of an earlier request in the row is left, whether that was longer or shorter."""
    used, fresh = TablesWorld(seed=4), TablesWorld(seed=5)
    used.start(0, 600)
    run(used, [0], 30)
    for world in (used, fresh):
        world.random.manual_seed(9)
        for state in (world.keys, world.values, world.page_lists):
            state.pop(0, None)
        world.start(0, 250)
    for _ in range(5):
        assert step(used, 0)[1] == step(fresh, 0)[1]
    got, want = (world.tables.tables(0, 0, 1, 255) for world in (used, fresh))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_memory_is_that_of_rows_in_use() -> None:
    world = TablesWorld(rows=4)
    assert world.tables.counts()["bytes"] == 0
    world.start(0, 159)
    one = world.tables.counts()["bytes"]
    assert 4 * 448 * 10 <= one <= 4 * 448 * 10 + 4 * 120  # with room for 256 more tokens, rounded to words
    world.start(3, 159)
    assert world.tables.counts()["bytes"] == 2 * one
    world.tables.release(0)
    assert world.tables.counts()["bytes"] == one
    world.tables.release(3)
    assert world.tables.counts()["bytes"] == 0
    with pytest.raises(ValueError, match=r"Row 0 has no score tables; begin them first\."):
        step(world, 0)


def test_a_score_that_is_no_number_teaches_nothing() -> None:
    world = TablesWorld(heads=1, group=1)
    world.start(0, 300)
    before = world.tables.tables(0, 0, 0, 301)
    for wrong in (math.nan, math.inf):
        q = world.randn(1, 1, 32)
        plan = world.plan([0], q)
        world.choose([0], plan, q, 1.0)
        lists_of(plan).record.scores.fill_(wrong)
        at = torch.tensor([0], dtype=torch.int32)
        world.tables.update(0, at, world.lengths([0]), plan, torch.zeros(1, 1), world.scale)
    after = world.tables.tables(0, 0, 0, 301)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 2**16), length=st.integers(100, 700), sink=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_heads_that_are_passed_by(seed: int, length: int, sink: float) -> None:
    """Eq. 5 and 6, and the result given to such a head; it neither lists nor learns."""
    world = TablesWorld(seed=seed, bypass=0.85, group=3)
    world.start(0, length)
    first = world.keys[0][0]
    q = torch.stack([world.randn(6, 32) + sink * first.repeat_interleave(3, 0) for _ in range(1)])
    plan = world.plan([0], q)
    given = lists_of(plan).given
    before = [world.tables.tables(0, 0, head, length + 1) for head in range(6)]
    for head in range(6):
        h, g = divmod(head, 3)
        keys, values = (of[0][:, h].double().numpy() for of in (world.keys, world.values))
        above, lse, o = world.reference[0, head].passed(keys, values, q[0, head].double().numpy(), world.scale, 0.85)
        if abs(above) < 1e-5:
            continue
        passed = above > 0
        assert (given.lse[0, head] > -math.inf) == passed
        if passed:
            assert not listed_positions(plan, h, g)
            assert math.isclose(given.lse[0, head], lse, rel_tol=1e-4, abs_tol=1e-4)
            np.testing.assert_allclose(given.o[0, head].numpy(), o, rtol=1e-4, atol=1e-6)
    world.choose([0], plan, q, 0.5)
    world.learn([0], plan, torch.zeros(1, 6))
    for head in range(6):
        if given.lse[0, head] > -math.inf:
            after = world.tables.tables(0, 0, head, length + 1)
            assert all(torch.equal(a, b) for a, b in zip(before[head], after, strict=True))
    world.check_tables(0)
    counts = world.tables.counts()
    assert counts["planned"] == 6 and counts["passed"] == int((given.lse > -math.inf).sum())


def test_some_heads_are_passed_by_and_some_are_not() -> None:
    world = TablesWorld(seed=6, bypass=0.85, group=3)
    world.start(0, 400)
    q = world.randn(1, 6, 32)
    q[0, ::2] += 3 * world.keys[0][0].repeat_interleave(3, 0)[::2]
    plan = world.plan([0], q)
    given = lists_of(plan).given
    assert (given.lse > -math.inf).tolist() == [[True, False] * 3]


def test_the_threshold_falls_with_the_kurtosis_and_rises_with_alpha() -> None:
    """The paper's statements about Eq. 8 hold for the reconstruction, relative to the height of the peaks."""

    def share(peaks: int, alpha: float) -> float:
        entries = np.zeros(10_000)
        entries[:peaks] = 1
        return threshold(entries, alpha)[1]

    assert share(5, 0.2) < share(50, 0.2) < share(500, 0.2) < share(3000, 0.2)
    assert share(50, 0.2) < share(50, 0.3) < 1 < share(3000, 0.2)
    normal = np.random.default_rng(0).normal(size=100_000)
    assert 0.01 < (normal > threshold(normal, 0.2)[1]).mean() < 0.03


@pytest.mark.parametrize(
    ("change", "message"), [({"alpha": (0.0, 0.2)}, "alphas above 0"), ({"renormalise": 41}, "1 to 40 binary digits")]
)
def test_options_that_cannot_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TablesWorld(**change)  # type: ignore[arg-type]


def test_sizes_that_do_not_fit() -> None:
    world = TablesWorld()
    world.start(0, 100)
    tables: LfpsTables = world.tables
    pages, q = world.pages_of(0), world.randn(5, 4, 32)
    for args in ((0, 9, 100, pages, q), (0, 0, 4, pages, q), (0, 0, 200, pages, q), (0, 0, 100, pages * 0, q)):
        with pytest.raises(ValueError, match=r"\.$"):
            tables.begin(*args, world.scale)
