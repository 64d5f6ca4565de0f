"""Watches for freed rows of SGLang's request table, which mark the end of requests.

A request that finishes, is aborted or retracted frees its row; a flush frees all rows. State kept by row is then
dropped, also on an idle server. No pass runs at that time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Freed = Callable[[Iterable[int]], None]
Flushed = Callable[[], None]

_watchers: weakref.WeakKeyDictionary[Any, weakref.WeakMethod[Freed]] = weakref.WeakKeyDictionary()
"""Watchers by request table."""

_flush_watchers: weakref.WeakKeyDictionary[Any, weakref.WeakMethod[Flushed]] = weakref.WeakKeyDictionary()


def watch(table: Any, freed: Freed, flushed: Flushed | None = None) -> None:
    """Call the bound method `freed` with the freed rows of `table` (a ReqToTokenPool), and the bound method `flushed`
    after a flush of all rows."""
    _watchers[table] = weakref.WeakMethod(freed)
    if flushed is not None:
        _flush_watchers[table] = weakref.WeakMethod(flushed)


def free_rows(original: Callable[..., None], table: Any, indices: Sequence[int]) -> None:
    """AROUND ReqToTokenPool.free_rows."""
    original(table, indices)
    tell(table, indices)


def clear(original: Callable[..., None], table: Any) -> None:
    """AROUND ReqToTokenPool.clear and DecodeReqToTokenPool.clear."""
    original(table)
    tell(table, range(table.req_to_token.shape[0]))
    watcher = _flush_watchers.get(table)
    flushed = None if watcher is None else watcher()
    if flushed is not None:
        flushed()


def tell(table: Any, rows: Iterable[int]) -> None:
    """Report freed rows of `table` to its watcher."""
    watcher = _watchers.get(table)
    freed = None if watcher is None else watcher()
    if freed is not None:
        freed(rows)
