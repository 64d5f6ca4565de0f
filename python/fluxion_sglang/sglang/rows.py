"""Rows of SGLang's request table that come free: the moment at which a request has ended, however it ended.

A request that finishes, is aborted or retracted gives its row back; a flush gives all of them back. What is kept by row
can go then, also on a server that has nothing more to do. No pass is under way at that time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Freed = Callable[[Iterable[int]], None]

_watchers: weakref.WeakKeyDictionary[Any, weakref.WeakMethod[Freed]] = weakref.WeakKeyDictionary()
"""By request table."""


def watch(table: Any, freed: Freed) -> None:
    """Have `freed`, a bound method, called with the rows of `table` (a ReqToTokenPool) that come free."""
    _watchers[table] = weakref.WeakMethod(freed)


def free_rows(original: Callable[..., None], table: Any, indices: Sequence[int]) -> None:
    """AROUND ReqToTokenPool.free_rows."""
    original(table, indices)
    tell(table, indices)


def clear(original: Callable[..., None], table: Any) -> None:
    """AROUND ReqToTokenPool.clear and DecodeReqToTokenPool.clear."""
    original(table)
    tell(table, range(table.req_to_token.shape[0]))


def tell(table: Any, rows: Iterable[int]) -> None:
    """These rows of `table` have come free."""
    watcher = _watchers.get(table)
    freed = None if watcher is None else watcher()
    if freed is not None:
        freed(rows)
