"""Freed rows of SGLang's request table are reported to all listeners that keep state by row."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from fluxion_sglang.sglang.requests import rows


class Watcher:
    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def freed(self, freed: Iterable[int]) -> None:
        self.seen.append(list(freed))


def table() -> Any:
    return ReqToTokenPool(size=3, max_context_len=16, device="cpu", enable_memory_saver=False)


def test_rows_that_come_free_are_told_when_they_are() -> None:
    pool, other, watcher = table(), table(), Watcher()
    rows.watch(pool, watcher.freed)
    taken = pool.alloc_rows(2)
    rows.free_rows(ReqToTokenPool.free_rows, pool, taken)
    assert watcher.seen == [taken] and pool.available_size() == 3
    rows.free_rows(ReqToTokenPool.free_rows, other, other.alloc_rows(1))
    assert watcher.seen == [taken], "another table's"
    pool.alloc_rows(1)
    rows.clear(ReqToTokenPool.clear, pool)
    assert watcher.seen[1:] == [[0, 1, 2, 3]] and pool.available_size() == 3


def test_a_watcher_that_is_gone_is_not_called() -> None:
    pool, watcher = table(), Watcher()
    seen = watcher.seen
    rows.watch(pool, watcher.freed)
    del watcher
    gc.collect()
    rows.clear(ReqToTokenPool.clear, pool)
    assert seen == [] and pool.available_size() == 3


def test_a_flush_is_told_after_its_rows() -> None:
    class Flushed(Watcher):
        def flushed(self) -> None:
            self.seen.append([-1])

    pool, watcher = table(), Flushed()
    rows.watch(pool, watcher.freed, watcher.flushed)
    rows.free_rows(ReqToTokenPool.free_rows, pool, pool.alloc_rows(1))
    rows.clear(ReqToTokenPool.clear, pool)
    assert watcher.seen[1:] == [[0, 1, 2, 3], [-1]]
