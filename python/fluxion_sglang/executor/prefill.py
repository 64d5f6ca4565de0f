"""The requests of a prefill pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExtendRequest:
    """One request of an extend batch.

    Attributes:
        row: its row in the request table.
        start: tokens already in the host pool (cache hit, earlier chunks); any number, page aligned or not.
        stop: tokens after this chunk.
        offset: index of its first token in the batch's flat q, k, v.
        pages: [>= ceil(stop / 16)] int32, its page list.
        queries: number of last queries to report once the host pool has the chunk.
        tree: [stop - start] int64: the new tokens are nodes of a tree (`NativePool.attend_chunk`); None: a chain.
    """

    row: int
    start: int
    stop: int
    offset: int
    pages: torch.Tensor
    queries: int = 0
    tree: torch.Tensor | None = None

    @property
    def tokens(self) -> slice:
        """The request's tokens in the batch's flat q, k, v."""
        return slice(self.offset, self.offset + self.stop - self.start)

    @property
    def last_queries(self) -> slice:
        """The slice of the batch's flat q with the queries to report."""
        tokens = self.tokens
        return slice(max(tokens.start, tokens.stop - self.queries), tokens.stop)
