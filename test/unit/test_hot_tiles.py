"""The bookkeeping of hot tiles against a plain model, and what no schedule may break."""

from __future__ import annotations

import ctypes
import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rogue import native

HITS, MISSES, COPIES, EVICTIONS, STALE = range(5)


class Hot:
    """`HotTiles` of csrc/device/hot_tiles.h."""

    def __init__(self, slots: int, touches: int, horizon: int) -> None:
        self.library = native()
        self.library.hot_create.restype = ctypes.c_void_p
        self.library.hot_stat.restype = ctypes.c_int64
        self.handle = ctypes.c_void_p(self.library.hot_create(slots, touches, horizon))

    def find(self, tile: int, writes: int) -> int:
        return int(self.library.hot_find(self.handle, ctypes.c_int64(tile), ctypes.c_uint32(writes)))

    def admit(self, tile: int, writes: int) -> int:
        return int(self.library.hot_admit(self.handle, ctypes.c_int64(tile), ctypes.c_uint32(writes)))

    def filled(self, slot: int) -> None:
        self.library.hot_filled(self.handle, slot)

    def unpin(self, slot: int) -> None:
        self.library.hot_unpin(self.handle, slot)

    def tick(self) -> None:
        self.library.hot_tick(self.handle)

    @property
    def used(self) -> int:
        return int(self.library.hot_used(self.handle))

    def stat(self, which: int) -> int:
        return int(self.library.hot_stat(self.handle, which))


@contextmanager
def hot_tiles(slots: int, touches: int = 1, horizon: int = 4) -> Iterator[Hot]:
    hot = Hot(slots, touches, horizon)
    yield hot
    hot.library.hot_destroy(hot.handle)


def put(hot: Hot, tile: int, writes: int = 0) -> int:
    assert hot.find(tile, writes) == -1
    slot = hot.admit(tile, writes)
    if slot >= 0:
        hot.filled(slot)
    return slot


def check_lru(slots: int, tiles: list[int]) -> None:
    """Without pins, against a dictionary in the order of use."""
    with hot_tiles(slots) as hot:
        model: OrderedDict[int, int] = OrderedDict()
        for tile in tiles:
            slot = hot.find(tile, 7)
            assert slot == model.get(tile, -1)
            if slot >= 0:
                hot.unpin(slot)
                model.move_to_end(tile)
            elif slots:
                if len(model) == slots:
                    model.popitem(last=False)
                slot = hot.admit(tile, 7)
                assert slot >= 0 and slot not in model.values()
                hot.filled(slot)
                model[tile] = slot
            else:
                assert hot.admit(tile, 7) == -1
            assert hot.used == len(model)


@settings(max_examples=examples(100))
@given(slots=st.integers(0, 12), tiles=st.lists(st.integers(0, 20), max_size=200))
def test_without_pins_it_is_an_lru(slots: int, tiles: list[int]) -> None:
    check_lru(slots, tiles)


@pytest.mark.parametrize("slots", [15, 63, 500])
def test_a_long_run_is_an_lru(slots: int) -> None:
    """The table is half full, so that tiles stand behind one another and move up again and again."""
    dice = random.Random(slots)
    check_lru(slots, [dice.randrange(2 * slots) << 40 | dice.randrange(2) for _ in range(20_000)])


@settings(max_examples=examples(150))
@given(slots=st.integers(1, 10), touches=st.integers(1, 2), seed=st.integers(0, 2**20))
def test_no_slot_is_given_away_while_somebody_needs_it(slots: int, touches: int, seed: int) -> None:
    """Random batches that pin what they find, end in any order, and tiles that are written at any time."""
    dice = random.Random(seed)
    with hot_tiles(slots, touches) as hot:
        writes = dict.fromkeys(range(30), 0)
        holds: dict[int, tuple[int, int]] = {}  # slot -> the tile and count whose bytes are there, or on their way
        filling: list[int] = []
        batches: list[list[int]] = []
        for _ in range(300):
            what = dice.random()
            if what < 0.5:
                batch = []
                for tile in dice.sample(sorted(writes), 4):
                    slot = hot.find(tile, writes[tile])
                    if slot >= 0:
                        assert slot not in filling
                        assert holds[slot] == (tile, writes[tile]), "a copy of another tile, or of another time"
                        batch.append(slot)
                        continue
                    slot = hot.admit(tile, writes[tile])
                    if slot >= 0:
                        assert slot not in filling
                        assert all(slot not in other for other in [*batches, batch]), "a batch still reads it"
                        holds[slot] = (tile, writes[tile])
                        filling.append(slot)
                batches.append(batch)
            elif what < 0.7 and filling:
                slot = filling.pop(dice.randrange(len(filling)))
                hot.filled(slot)
            elif what < 0.9 and batches:
                for slot in batches.pop(dice.randrange(len(batches))):
                    hot.unpin(slot)
            elif what < 0.95:
                writes[dice.choice(sorted(writes))] += 1
            else:
                hot.tick()
        for slot in filling:
            hot.filled(slot)
        for batch in batches:
            for slot in batch:
                hot.unpin(slot)
        assert hot.used <= slots
        # Everything can be had again: no slot was lost.
        with_room = [put(hot, tile) for tile in range(100, 100 + 3 * slots) for _ in range(touches)]
        assert sorted({slot for slot in with_room[-touches * slots :] if slot >= 0}) == list(range(slots))


def test_a_pinned_tile_that_was_written_is_doomed_not_reused() -> None:
    with hot_tiles(1) as hot:
        slot = put(hot, 5)
        assert hot.find(5, 0) == slot
        assert hot.find(5, 1) == -1 and hot.stat(STALE) == 1
        assert hot.admit(5, 1) == -1, "its only slot is still read"
        hot.unpin(slot)
        assert hot.admit(5, 1) == slot
        hot.filled(slot)
        assert hot.find(5, 2) == -1 and hot.used == 0, "it was written while it was copied"


def test_a_tile_on_its_way_is_neither_found_nor_fetched_twice() -> None:
    with hot_tiles(4) as hot:
        slot = hot.admit(9, 0)
        assert hot.find(9, 0) == -1 and hot.admit(9, 0) == -1
        hot.filled(slot)
        assert hot.find(9, 0) == slot
        assert (hot.stat(HITS), hot.stat(MISSES), hot.stat(COPIES)) == (1, 1, 1)


@pytest.mark.parametrize("steps", [0, 4, 5])
def test_the_second_touch_counts_within_the_horizon(steps: int) -> None:
    with hot_tiles(4, touches=2, horizon=4) as hot:
        assert put(hot, 3) == -1
        for _ in range(steps):
            hot.tick()
        assert (put(hot, 3) >= 0) == (steps <= 4)


def test_the_least_recently_used_goes_first() -> None:
    with hot_tiles(2) as hot:
        first, second = put(hot, 1), put(hot, 2)
        hot.unpin(hot.find(1, 0))
        assert put(hot, 3) == second and hot.stat(EVICTIONS) == 1
        assert hot.find(1, 0) == first
