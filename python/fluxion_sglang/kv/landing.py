"""Where KV that another server computed arrives: plain pages, for as long as a transfer takes.

A transfer writes pages of [16, H, D] keys, and as many of values, where it is told to. The host pool has another layout
and metadata besides, so what has arrived is appended to it from here, and its pages are free for the next transfer.
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
    """Room for `pages` pages, in runs, first come first served.

    Not thread-safe: its process's scheduler alone gives room and takes it back. Writers come from elsewhere, and only
    into runs that somebody has.

    Args:
        shape: of the host pool; here keys and values have its dtype, whatever the host pool stores.

    Attributes:
        keys, values: of each layer, [pages, 16, H, D].
    """

    def __init__(self, shape: KVShape, pages: int) -> None:
        self.pages = pages
        size = (pages, PAGE, shape.kv_heads, shape.head_dim)
        self.keys, self.values = ([torch.zeros(size, dtype=shape.dtype) for _ in range(shape.layers)] for _ in range(2))
        self._runs: dict[Hashable, Run] = {}
        self._line: dict[Hashable, int] = {}  # who waits, first come first, and since when
        self._stats = dict.fromkeys(("arrived_tokens", "arrival_line_ns", "arrival_copy_ns"), 0)

    @staticmethod
    def nbytes(shape: KVShape, pages: int) -> int:
        """Memory of a zone of so many pages."""
        return 2 * shape.layers * pages * PAGE * shape.kv_heads * shape.head_dim * shape.dtype.itemsize

    def ask(self, who: Hashable, pages: int) -> Run | None:
        """The run of `who`, or None while those who asked before wait, or while there is none of so many pages.

        Raises:
            ValueError: there never will be.
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
        """`who` needs no room any more, or does not wait any more; nobody writes into its run."""
        self._runs.pop(who, None)
        self._line.pop(who, None)

    def tokens(self, layer: int, run: Run, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `count` tokens of a run: views, [count, H, D] each."""
        of = slice(run.first, run.first + run.pages)
        return self.keys[layer][of].flatten(0, 1)[:count], self.values[layer][of].flatten(0, 1)[:count]

    def arrived(self, tokens: int, copy_ns: int) -> None:
        """So many tokens of a run are in the host pool now, after so much time."""
        self._stats["arrived_tokens"] += tokens
        self._stats["arrival_copy_ns"] += copy_ns

    def stats(self) -> dict[str, int]:
        """Cumulative; names of `executor/metrics.py`."""
        return dict(self._stats)

    def _gap(self, pages: int) -> int | None:
        """The first page of the first gap between runs that is large enough."""
        end = 0
        for run in sorted(self._runs.values()):
            if run.first - end >= pages:
                return end
            end = run.first + run.pages
        return end if self.pages - end >= pages else None
