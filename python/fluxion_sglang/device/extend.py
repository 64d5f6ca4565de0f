"""Exact attention of an extend pass on a device, over prefixes that are only in host memory.

The chunks of a pass attend to themselves, in one call if FlashInfer has kernels; then each attends to its prefix. A
prefix is processed in pieces. A kernel on a side stream gathers pages from pinned memory into one of two stages, while
the device attends to the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fluxion_sglang.device import flashinfer
from fluxion_sglang.device.library import DeviceLibrary
from fluxion_sglang.device.streams import Streams
from fluxion_sglang.executor.merge import attention_in_pieces, attention_with_lse
from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.kv.host_pool import HostPool
from fluxion_sglang.kv.placement import PAGE

STAGES = 2
STREAM_PAGES = 512
"""Pages of a prefix per stage: large enough for the matrix kernels, small compared to the prefix."""


def stage_tokens() -> int:
    """Tokens of one layer that the stages hold in device memory."""
    return STAGES * STREAM_PAGES * PAGE


class Prefix(NamedTuple):
    """The first `tokens` tokens of a request. pages: [>= ceil(tokens / 16)] int32, readable by the device."""

    pages: torch.Tensor
    tokens: int


class Piece(NamedTuple):
    """Pages [first, stop) of a prefix."""

    prefix: int
    first: int
    stop: int


class PrefixStream:
    """Two stages of STREAM_PAGES pages, filled in turn from the host pool."""

    def __init__(self, library: DeviceLibrary, streams: Streams, pool: HostPool, device: torch.device) -> None:
        self._library, self._pool = library, pool
        self._side = streams.side()
        size = (STREAM_PAGES * PAGE, pool.shape.kv_heads, pool.shape.head_dim)
        self._stages = [
            tuple(torch.empty(size, dtype=pool.shape.dtype, device=device) for _ in range(2)) for _ in range(STAGES)
        ]

    def pieces(self, layer: int, prefixes: Sequence[Prefix]) -> Iterator[tuple[int, bool, torch.Tensor, torch.Tensor]]:
        """Iterate over the pieces of the prefixes in order: the prefix's index, whether this is its last piece, and K
        and V [n, H, D] of the piece. These may be read on the main stream until the next piece is requested.

        The first copies are launched before this returns. Page lists are read until the pass ends.
        """
        pieces = []
        for index, prefix in enumerate(prefixes):
            count = -(-prefix.tokens // PAGE)
            spans = ((first, min(first + STREAM_PAGES, count)) for first in range(0, count, STREAM_PAGES))
            pieces += [Piece(index, *span) for span in spans]
        marks = [self._fetch(layer, prefixes, pieces, i) for i in range(min(STAGES, len(pieces)))]
        return self._hand_out(layer, prefixes, pieces, marks)

    def _fetch(self, layer: int, prefixes: Sequence[Prefix], pieces: list[Piece], i: int) -> object:
        index, first, stop = pieces[i]
        k, v = self._stages[i % STAGES]
        rows = (stop - first) * PAGE
        pages = prefixes[index].pages[first:stop]
        self._side.follow_main()  # wait for the main stream's attention to the stage's old contents
        self._library.gather(self._side.handle, self._pool.tiles(layer), pages, k[:rows], v[:rows])
        return self._side.mark()

    def _hand_out(
        self, layer: int, prefixes: Sequence[Prefix], pieces: list[Piece], marks: list[object]
    ) -> Iterator[tuple[int, bool, torch.Tensor, torch.Tensor]]:
        for i, (index, first, stop) in enumerate(pieces):
            self._side.main_waits(marks[i])
            # The prefix may end inside a page, whose later slots are undefined.
            tokens = prefixes[index].tokens
            rows = min(stop * PAGE, tokens) - first * PAGE
            k, v = self._stages[i % STAGES]
            yield index, stop * PAGE >= tokens, k[:rows], v[:rows]
            if i + STAGES < len(pieces):
                marks.append(self._fetch(layer, prefixes, pieces, i + STAGES))


class ExtendAttention:
    """Attention of extend passes: `begin`, then `run` for every layer.

    Args:
        pool: pinned.
        scale: multiplies q.k in every layer.
        flash: use FlashInfer (`flashinfer.serves`); otherwise torch.
    """

    def __init__(
        self,
        library: DeviceLibrary,
        streams: Streams,
        pool: HostPool,
        device: torch.device,
        *,
        q_heads: int,
        scale: float,
        flash: bool,
    ) -> None:
        self._library, self._streams, self._scale = library, streams, scale
        self._prefix = PrefixStream(library, streams, pool, device)
        shape = pool.shape
        self.chunks: flashinfer.Chunks | None = None
        if flash:
            self.chunks = flashinfer.Chunks(
                q_heads=q_heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                dtype=shape.dtype,
                scale=scale,
                device=device,
            )
        self._tokens: list[slice] = []
        self._prefixed: list[tuple[slice, Prefix]] = []

    def begin(self, requests: Sequence[ExtendRequest], pages: Sequence[torch.Tensor]) -> None:
        """Begin a pass.

        Args:
            requests: in the order of their tokens.
            pages: of every request, int32, readable by the device until the pass ends.
        """
        there = [pair for pair in zip(requests, pages, strict=True) if pair[0].stop > pair[0].start]
        self._tokens = [request.tokens for request, _ in there]
        self._prefixed = [(request.tokens, Prefix(own, request.start)) for request, own in there if request.start > 0]
        if self.chunks is not None and self._tokens:
            self.chunks.plan(self._tokens)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of a layer's chunks over their prefixes and themselves.

        Args:
            q: [T, Hq, D]. k, v: [T, H, D]; tokens of all requests.

        Returns:
            [T, Hq, D] in q's dtype; undefined for tokens of no request.
        """
        out = torch.empty_like(q)
        if not self._tokens:
            return out
        pieces = self._prefix.pieces(layer, [prefix for _, prefix in self._prefixed])
        lse = self._of_chunks(q, k, v, out)
        between: torch.Tensor | None = None  # accumulates the pieces of one prefix
        for index, last, piece_k, piece_v in pieces:
            tokens = self._prefixed[index][0]
            own = out[tokens] if between is None else between
            # Keep float32 until the last piece, because a long prefix is merged many times.
            to = out[tokens] if last else own
            if not last and own.dtype != torch.float32:
                to = torch.empty_like(own, dtype=torch.float32)
            part = self._of_piece(q[tokens], piece_k, piece_v)
            base2 = self.chunks is not None
            self._library.merge(self._streams.main, own, lse[tokens], *part, base2, to, lse[tokens])
            between = None if last else to
        return out

    def _of_chunks(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Attention of the chunks to themselves, into `out`; returns the LSE [T, Hq]."""
        if self.chunks is not None:
            return self.chunks.run(q, k, v, out)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for tokens in self._tokens:
            out[tokens], lse[tokens] = attend(q[tokens], k[tokens], v[tokens], self._scale, causal=True)
        return lse

    def _of_piece(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.chunks is not None:
            return flashinfer.prefill(q, k, v, self._scale)
        o, lse = attend(q, k, v, self._scale, causal=False)
        return o.contiguous(), lse.contiguous()


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's attention of q [T, Hq, D] to k, v [S, H, D]; o [T, Hq, D], lse [T, Hq] float32, natural log."""
    if q.device.type == "cpu":
        return attention_with_lse(q, k.transpose(0, 1), v.transpose(0, 1), scale, causal)
    return attention_in_pieces(q, k, v, scale, causal)
