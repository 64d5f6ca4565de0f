"""Requests of a step that are read together: the best partition for any forest of page tables."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from fluxion_sglang.native import function

LEAST_PAGES, LEAST_GAIN = 16, 1 / 16


def families(tables: list[list[int]], first: int, together: int) -> dict[frozenset[int], int]:
    """Members -> logical page at the end of the shared part, computed by the library; middles end where tables do."""
    width = max(map(len, tables)) + 1
    table = torch.full((len(tables), width), -7, dtype=torch.int32)
    for row, pages in zip(table, tables, strict=True):
        row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
    out = torch.empty(len(tables), 2, dtype=torch.int32)
    function("families")(table, torch.tensor([len(t) for t in tables], dtype=torch.int32), first, together, out)
    found: dict[int, set[int]] = {}
    for b, (family, _) in enumerate(out.tolist()):
        if family >= 0:
            found.setdefault(family, set()).add(b)
    for members in found.values():
        assert len({int(out[b, 1]) for b in members}) == 1
    return {frozenset(members): int(out[min(members), 1]) for members in found.values()}


def common(tables: list[list[int]]) -> int:
    """Number of equal leading pages in all tables."""
    return next((i for i, pages in enumerate(zip(*tables, strict=False)) if len(set(pages)) > 1), min(map(len, tables)))


def saved(tables: list[list[int]], first: int, together: int) -> int:
    """Page reads that one family of these requests saves."""
    shared = common([pages[first:] for pages in tables])
    gain = (len(tables) - -(-len(tables) // together)) * shared
    all_pages = sum(len(pages) - first for pages in tables)
    return gain if shared >= LEAST_PAGES and gain >= LEAST_GAIN * all_pages else 0


def most_saved(tables: list[list[int]], first: int, together: int) -> int:
    """The maximum over all partitions: disjoint sets of requests, each with a common prefix."""
    worth: dict[frozenset[int], int] = {}
    for depth in range(max(map(len, tables)) + 1):
        branches: dict[tuple[tuple[int, ...], bool], set[int]] = {}
        for b, pages in enumerate(tables):
            if depth <= len(pages):
                branches.setdefault((tuple(pages[first:depth]), False), set()).add(b)
            if depth == len(pages):
                branches.setdefault((tuple(pages[first:depth]), True), set()).add(b)
        for members in branches.values():
            if len(members) > 1:
                worth[frozenset(members)] = saved([tables[b] for b in sorted(members)], first, together)
    return best_of({members: gain for members, gain in worth.items() if gain})


def best_of(worth: dict[frozenset[int], int]) -> int:
    if not worth:
        return 0
    some = next(iter(worth))
    rest = {members: gain for members, gain in worth.items() if members != some}
    without = best_of(rest)
    return max(without, worth[some] + best_of({m: gain for m, gain in rest.items() if not m & some}))


@st.composite
def forests(draw: st.DrawFn, most: int = 7) -> list[list[int]]:
    """Page tables that grow by runs of fresh pages, from nothing or from a prefix of an earlier table."""
    fresh = iter(random.Random(draw(st.integers(0, 99))).sample(range(1, 100_000), 8000))
    sizes = st.sampled_from([0, 1, 3, 15, 16, 17, 18, 40, 255, 256, 257, 300, 700])
    tables: list[list[int]] = []
    for _ in range(draw(st.integers(1, most))):
        start: list[int] = []
        if tables and draw(st.integers(0, 4)):
            parent = draw(st.sampled_from(tables))
            start = parent[: draw(st.one_of(st.just(len(parent)), st.integers(0, len(parent))))]
        tables.append([*start, *(next(fresh) for _ in range(draw(sizes)))])
    return draw(st.permutations(tables))


@given(tables=forests(), first=st.integers(0, 4), together=st.integers(1, 5))
def test_families_save_the_most_page_reads(tables: list[list[int]], first: int, together: int) -> None:
    found = families(tables, first, together)
    taken = [b for members in found for b in members]
    assert len(taken) == len(set(taken)), "a request is in one family"
    total = 0
    for members, end in found.items():
        own = [tables[b] for b in sorted(members)]
        assert end == first + common([pages[first:] for pages in own])
        gain = saved(own, first, together)
        assert gain > 0
        total += gain
    assert total == most_saved(tables, first, together)


def test_a_document_is_worth_more_than_the_prompt_before_it() -> None:
    """Two documents after one system prompt, with forks each, and one request with only the prompt."""
    system, one, two = range(100), range(100, 1000), range(1000, 3000)
    tables = [[*system, *document, 10_000 + i] for i, document in enumerate([one, two, range(0), two, one, two])]
    assert families(tables, 4, 16) == {frozenset({0, 4}): 1000, frozenset({1, 3, 5}): 2100}
    assert families([[*system, 10_000 + i] for i in range(3)], 4, 16) == {frozenset(range(3)): 100}


def test_pages_that_agree_only_after_others_differ_are_no_prefix() -> None:
    tables = [[*range(1, 200)], [1, 500, *range(3, 200)], [*range(1, 200)]]
    assert families(tables, 0, 16) == {frozenset({0, 2}): 199}
    assert families(tables, 2, 16) == {frozenset({0, 1, 2}): 199}, "what is resident does not count"


def test_a_little_in_common_is_left_alone() -> None:
    long = [[*range(64), *range(1000 * i, 1000 * i + 4000)] for i in (1, 5)]
    assert families(long, 4, 16) == {}
    assert families([pages[:80] for pages in long], 4, 16) == {frozenset({0, 1}): 64}
