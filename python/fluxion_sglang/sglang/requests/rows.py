"""Rows of SGLang's request table that come free: the moment at which a request has ended, however it ended.

A request that finishes, is aborted or retracted gives its row back; a flush gives all of them back. What is kept by row
can go then, also on a server that has nothing more to do. No pass is under way at that time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Freed = Callable[[Iterable[int]], None]
Flushed = Callable[[], None]

_watchers: weakref.WeakKeyDictionary[Any, weakref.WeakMethod[Freed]] = weakref.WeakKeyDictionary()
"""By request table."""

_flush_watchers: weakref.WeakKeyDictionary[Any, weakref.WeakMethod[Flushed]] = weakref.WeakKeyDictionary()


def watch(table: Any, freed: Freed, flushed: Flushed | None = None) -> None:
    """Have `freed`, a bound method, called with the rows of `table` (a ReqToTokenPool) that come free, and `flushed`,
    another one, after a flush of all of them."""
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
    """These rows of `table` have come free."""
    watcher = _watchers.get(table)
    freed = None if watcher is None else watcher()
    if freed is not None:
        freed(rows)
