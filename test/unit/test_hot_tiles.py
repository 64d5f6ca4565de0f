"""The bookkeeping of hot tiles against a plain model, and what no schedule may break."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rogue import native

HITS, MISSES, COPIES, EVICTIONS, STALE = range(5)
TILES = 1000


class Hot:
    """`HotTiles` of csrc/device/hot_tiles.h."""

    def __init__(self, slots: int, touches: int, horizon: int) -> None:
        self.library = native()
        self.library.hot_create.restype = ctypes.c_void_p
        self.library.hot_stat.restype = ctypes.c_int64
        self.handle = ctypes.c_void_p(self.library.hot_create(ctypes.c_int64(TILES), slots, touches, horizon))

    def find(self, tile: int, writes: int, batch: int = 0) -> int:
        numbers = ctypes.c_int64(tile), ctypes.c_uint32(writes), ctypes.c_int64(batch)
        return int(self.library.hot_find(self.handle, *numbers))

    def admit(self, tile: int, writes: int) -> int:
        return int(self.library.hot_admit(self.handle, ctypes.c_int64(tile), ctypes.c_uint32(writes)))

    def filled(self, slot: int) -> None:
        self.library.hot_filled(self.handle, slot)

    def ended(self, batch: int) -> None:
        """All batches before this one."""
        self.library.hot_ended(self.handle, ctypes.c_int64(batch))

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


@settings(max_examples=examples(100))
@given(slots=st.integers(0, 12), tiles=st.lists(st.integers(0, 20), max_size=200))
def test_it_is_the_second_chance_algorithm(slots: int, tiles: list[int]) -> None:
    """Batches that end at once, against a list of slots and a hand."""
    with hot_tiles(slots) as hot:
        held: list[int] = []  # the tile of every slot
        found: list[bool] = []
        hand = 0
        for batch, tile in enumerate(tiles):
            slot = hot.find(tile, 7, batch)
            hot.ended(batch + 1)
            assert slot == (held.index(tile) if tile in held else -1)
            if slot >= 0:
                found[slot] = True
                continue
            if len(held) < slots:
                held.append(tile)
                found.append(False)
                want = len(held) - 1
            elif slots:
                while found[hand]:
                    found[hand] = False
                    hand = (hand + 1) % slots
                want, held[hand] = hand, tile
                hand = (hand + 1) % slots
            else:
                want = -1
            assert hot.admit(tile, 7) == want
            if want >= 0:
                hot.filled(want)
            assert hot.used == len(held)


@settings(max_examples=examples(150))
@given(slots=st.integers(1, 10), touches=st.integers(1, 2), seed=st.integers(0, 2**20))
def test_no_slot_is_given_away_while_somebody_needs_it(slots: int, touches: int, seed: int) -> None:
    """Random batches that read what they find, end in any order, and tiles that are written at any time."""
    dice = random.Random(seed)
    with hot_tiles(slots, touches) as hot:
        writes = dict.fromkeys(range(30), 0)
        holds: dict[int, tuple[int, int]] = {}  # slot -> the tile and count whose bytes are there, or on their way
        filling: list[int] = []
        batches: dict[int, list[int]] = {}
        number = 0
        for _ in range(300):
            what = dice.random()
            if what < 0.5:
                batch: list[int] = []
                batches[number] = batch
                for tile in dice.sample(sorted(writes), 4):
                    slot = hot.find(tile, writes[tile], number)
                    if slot >= 0:
                        assert slot not in filling
                        assert holds[slot] == (tile, writes[tile]), "a copy of another tile, or of another time"
                        batch.append(slot)
                        continue
                    slot = hot.admit(tile, writes[tile])
                    if slot >= 0:
                        assert slot not in filling
                        assert all(slot not in other for other in batches.values()), "a batch still reads it"
                        holds[slot] = (tile, writes[tile])
                        filling.append(slot)
                number += 1
            elif what < 0.7 and filling:
                slot = filling.pop(dice.randrange(len(filling)))
                hot.filled(slot)
            elif what < 0.9 and batches:
                batches.pop(dice.choice(sorted(batches)))
                hot.ended(min(batches, default=number))
            elif what < 0.95:
                writes[dice.choice(sorted(writes))] += 1
            else:
                hot.tick()
        for slot in filling:
            hot.filled(slot)
        hot.ended(number)
        assert hot.used <= slots
        # Everything can be had again: no slot was lost. What was found has its second chance first.
        with_room = [put(hot, tile) for tile in range(100, 100 + 4 * slots) for _ in range(touches)]
        assert {slot for slot in with_room if slot >= 0} == set(range(slots))


def test_a_tile_that_was_written_is_doomed_while_a_batch_reads_it() -> None:
    with hot_tiles(1) as hot:
        slot = put(hot, 5)
        assert hot.find(5, 0, 3) == slot
        assert hot.find(5, 1, 4) == -1 and hot.stat(STALE) == 1
        hot.ended(3)
        assert hot.admit(5, 1) == -1, "its only slot is still read"
        hot.ended(4)
        assert hot.admit(5, 1) == slot
        hot.filled(slot)
        assert hot.find(5, 2, 5) == -1 and hot.used == 0, "it was written while it was copied"


def test_what_a_batch_reads_stays() -> None:
    with hot_tiles(2) as hot:
        first, second = put(hot, 1), put(hot, 2)
        assert hot.find(1, 0, 7) == first
        hot.ended(7)
        assert [put(hot, tile) for tile in (3, 4)] == [second, second]
        hot.ended(8)
        assert put(hot, 5) == second, "the first one's second chance"
        assert put(hot, 6) == first
        assert hot.stat(EVICTIONS) == 4


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
