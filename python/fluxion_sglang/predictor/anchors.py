"""Keeps every request's anchor query, that of its last prefilled token, and its measurements.

The query is noted when a chunk is prefilled. It is measured when the request first decodes under a policy that needs
it. So no code has to know a prompt's last chunk, and requests under other policies cost a copy of one query. A cache
hit, an appended turn or a re-prefill after retraction makes a new anchor like any other prefill.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fluxion_sglang.kv.host_pool import HostPool
from fluxion_sglang.predictor.criterion import Criterion
from fluxion_sglang.predictor.features import ANCHOR
from fluxion_sglang.predictor.measure import measure


class Anchors:
    """Anchors of `rows` request rows, in tables that the features kernel reads by row.

    The operating system allocates memory when rows are used: [rows, Hq, 28 + D] and [rows, H, D] numbers a layer.

    Attributes:
        statistics: per layer [rows, Hq, 28] float32, the anchor features.
        queries: per layer [rows, Hq, D], KV dtype.
        mean_k: per layer [rows, H, D] float32.
    """

    def __init__(self, pool: HostPool, rows: int, q_heads: int) -> None:
        self.pool = pool
        shape = pool.shape
        layers = range(shape.layers)
        self.statistics = [torch.empty(rows, q_heads, len(ANCHOR)) for _ in layers]
        self.queries = [torch.empty(rows, q_heads, shape.head_dim, dtype=shape.dtype) for _ in layers]
        self.mean_k = [torch.empty(rows, shape.kv_heads, shape.head_dim) for _ in layers]
        self._lengths = [[0] * rows for _ in layers]  # tokens up to and including the query's; 0: no anchor
        self._measured: list[list[Criterion | None]] = [[None] * rows for _ in layers]

    def note(self, layer: int, row: int, length: int, query: torch.Tensor) -> None:
        """Note the query [Hq, D] of token `length` - 1 of the request in `row`; the host pool has all its tokens."""
        self.queries[layer][row] = query
        self._lengths[layer][row] = length
        self._measured[layer][row] = None

    def forget(self, row: int) -> None:
        """Drop the anchor of a row whose request came without a prefill; its next decoded query becomes it."""
        for lengths in self._lengths:
            lengths[row] = 0

    def refresh(
        self,
        layer: int,
        rows: Sequence[int],
        lengths: Sequence[int],
        pages: torch.Tensor,
        q: torch.Tensor,
        scale: float,
        criteria: Sequence[Criterion | None],
    ) -> None:
        """Measure the anchors of requests that are not yet measured under their criterion.

        Args:
            rows, lengths, criteria: one entry per request; criterion None: its policy needs no anchor. The token of
                this step is in the pool.
            pages: [B, M] int32. q: [B, Hq, D], the queries of this step.
        """
        for i, (row, criterion) in enumerate(zip(rows, criteria, strict=True)):
            if criterion is None:
                continue
            if self._lengths[layer][row] == 0:
                self.note(layer, row, lengths[i], q[i])
            if self._measured[layer][row] == criterion:
                continue
            found = measure(
                self.pool,
                layer,
                pages[i],
                torch.tensor([self._lengths[layer][row]], dtype=torch.int32),
                self.queries[layer][row].unsqueeze(0),
                scale,
                self.pool.placement.window,
                [criterion],
                single_tokens=False,
            )
            self.statistics[layer][row] = found.anchor[0]
            self.mean_k[layer][row] = found.mean_k[0]
            self._measured[layer][row] = criterion
