"""Residency is a pure function of length and position; these tests check its laws."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fluxion_sglang.kv.page_table import page_table
from fluxion_sglang.kv.placement import PAGE, Placement

placements = st.builds(
    Placement, sinks=st.integers(1, 8).map(lambda p: p * PAGE), window=st.integers(1, 24).map(lambda p: p * PAGE)
)


@given(placements, st.integers(0, 5000))
def test_sinks_middle_and_window_partition_the_request(placement: Placement, n: int) -> None:
    start = placement.window_start(n)
    assert start % PAGE == 0 and placement.middle(n) % PAGE == 0
    assert placement.resident(n) + placement.middle(n) == n
    if n > placement.sinks:
        assert min(n - placement.sinks, placement.window) <= n - start < placement.window + PAGE


@given(placements, st.integers(1, 5000))
def test_resident_positions_never_share_a_slot(placement: Placement, n: int) -> None:
    resident = [*range(min(placement.sinks, n)), *range(placement.window_start(n), n)]
    slots = [placement.slot(position) for position in resident]
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < placement.slots for slot in slots)


@given(placements, st.integers(1, 5000))
def test_decoding_overwrites_only_what_left_the_window(placement: Placement, n: int) -> None:
    resident = {*range(min(placement.sinks, n)), *range(placement.window_start(n + 1), n)}
    assert placement.slot(n) not in {placement.slot(position) for position in resident}


def test_paper_sizes() -> None:
    placement = Placement()
    assert (placement.slots, placement.slot_pages) == (336, 21)
    assert placement.middle(320) == 0 and placement.middle(336) == 16


def test_page_table_reads_the_request_table() -> None:
    table = torch.zeros(4, 100, dtype=torch.int32)
    pages = torch.tensor([9, 3, 7])
    table[2, :40] = (pages.repeat_interleave(16) * 16 + torch.arange(16).repeat(3))[:40]
    got = page_table(table, torch.tensor([2]), 40)
    assert got.dtype == torch.int32 and got.is_contiguous()
    assert got.tolist() == [[9, 3, 7]]
