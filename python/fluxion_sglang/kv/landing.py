"""A landing zone for KV that another server computed: plain pages that are reserved during a transfer.

A transfer writes pages of keys [16, H, D], and of values, at given addresses. The host pool has another layout and
metadata. So arrived pages are appended to the host pool, and the zone's pages are freed for the next transfer.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import NamedTuple

import torch

from fluxion_sglang.kv.host_pool import KVShape
from fluxion_sglang.kv.placement import PAGE


class Run(NamedTuple):
    """Consecutive pages of the zone."""

    first: int
    pages: int


class LandingZone:
    """Allocates runs of its `pages` pages, first come first served.

    Not thread-safe: only its process's scheduler allocates and frees runs. Other processes write, only into allocated
    runs.

    Args:
        shape: of the host pool. Keys and values have its dtype here, even if the host pool stores int8.

    Attributes:
        keys, values: by layer, [pages, 16, H, D].
    """

    def __init__(self, shape: KVShape, pages: int) -> None:
        self.pages = pages
        size = (pages, PAGE, shape.kv_heads, shape.head_dim)
        self.keys, self.values = ([torch.zeros(size, dtype=shape.dtype) for _ in range(shape.layers)] for _ in range(2))
        self._runs: dict[Hashable, Run] = {}
        self._line: dict[Hashable, int] = {}  # waiting requests in order of arrival, with the time since when
        self._stats = dict.fromkeys(("arrived_tokens", "arrival_line_ns", "arrival_copy_ns"), 0)

    @staticmethod
    def nbytes(shape: KVShape, pages: int) -> int:
        """Memory of a zone of `pages` pages."""
        return 2 * shape.layers * pages * PAGE * shape.kv_heads * shape.head_dim * shape.dtype.itemsize

    def ask(self, who: Hashable, pages: int) -> Run | None:
        """Allocate a run of `pages` pages for `who`. None while earlier requests wait, or while there is no such gap.

        Raises:
            ValueError: the zone is smaller.
        """
        if (own := self._runs.get(who)) is not None:
            return own
        if pages > self.pages:
            raise ValueError(f"{pages} pages cannot land where there is room for {self.pages}")
        now = time.monotonic_ns()
        since = self._line.setdefault(who, now)
        if next(iter(self._line)) != who or (first := self._gap(pages)) is None:
            return None
        del self._line[who]
        self._stats["arrival_line_ns"] += now - since
        self._runs[who] = Run(first, pages)
        return self._runs[who]

    def leave(self, who: Hashable) -> None:
        """Free the run of `who`, or remove it from the queue. Its writers must have ended."""
        self._runs.pop(who, None)
        self._line.pop(who, None)

    def tokens(self, layer: int, run: Run, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `count` tokens of a run: views, [count, H, D] each."""
        of = slice(run.first, run.first + run.pages)
        return self.keys[layer][of].flatten(0, 1)[:count], self.values[layer][of].flatten(0, 1)[:count]

    def arrived(self, tokens: int, copy_ns: int) -> None:
        """Count `tokens` tokens of a run that are now in the host pool, copied in `copy_ns`."""
        self._stats["arrived_tokens"] += tokens
        self._stats["arrival_copy_ns"] += copy_ns

    def stats(self) -> dict[str, int]:
        """Cumulative counts, named as in `executor/metrics.py`."""
        return dict(self._stats)

    def _gap(self, pages: int) -> int | None:
        """The first page of the first gap between runs that is large enough."""
        end = 0
        for run in sorted(self._runs.values()):
            if run.first - end >= pages:
                return end
            end = run.first + run.pages
        return end if self.pages - end >= pages else None
