"""Exact attention of a prefill chunk on a device, over a prefix that only the host has.

The prefix comes a piece at a time: a kernel gathers pages from pinned memory into one of two stages, on a stream of
its own, while the device attends to the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fluxion_sglang.device import flashinfer
from fluxion_sglang.device.library import DeviceLibrary
from fluxion_sglang.device.streams import Streams
from fluxion_sglang.executor.extend import STREAM_PAGES, ExtendRequest
from fluxion_sglang.executor.merge import attention_in_pieces, attention_with_lse, merge_state
from fluxion_sglang.kv.host_pool import HostPool
from fluxion_sglang.kv.placement import PAGE

STAGES = 2


def stage_tokens() -> int:
    """Tokens of one layer that the stages hold in device memory."""
    return STAGES * STREAM_PAGES * PAGE


class PrefixStream:
    """Two stages of STREAM_PAGES pages, filled in turn from the host pool."""

    def __init__(self, library: DeviceLibrary, streams: Streams, pool: HostPool, device: torch.device) -> None:
        self._library, self._pool = library, pool
        self._side = streams.side()
        size = (STREAM_PAGES * PAGE, pool.shape.kv_heads, pool.shape.head_dim)
        self._stages = [
            tuple(torch.empty(size, dtype=pool.shape.dtype, device=device) for _ in range(2)) for _ in range(STAGES)
        ]

    def pieces(self, layer: int, pages: torch.Tensor, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """K and V [n, H, D] of the first `tokens` tokens of a request, in order; each may be read on the main stream
        until the next is asked for. The first are on their way when this returns.

        Args:
            pages: [>= ceil(tokens / 16)] int32 where the device reads it, as long as the pass lasts.
        """
        count = -(-tokens // PAGE)
        spans = [(first, min(first + STREAM_PAGES, count)) for first in range(0, count, STREAM_PAGES)]
        marks = [self._fetch(layer, pages, spans, i) for i in range(min(STAGES, len(spans)))]
        return self._hand_out(layer, pages, tokens, spans, marks)

    def _fetch(self, layer: int, pages: torch.Tensor, spans: list[tuple[int, int]], i: int) -> object:
        first, last = spans[i]
        k, v = self._stages[i % STAGES]
        rows = (last - first) * PAGE
        self._side.follow_main()  # whose attention to what the stage held stands before this
        self._library.gather(self._side.handle, self._pool.tiles(layer), pages[first:last], k[:rows], v[:rows])
        return self._side.mark()

    def _hand_out(
        self, layer: int, pages: torch.Tensor, tokens: int, spans: list[tuple[int, int]], marks: list[object]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for i, (first, last) in enumerate(spans):
            self._side.main_waits(marks[i])
            # The prefix may end inside a page whose later slots hold nothing of this request.
            rows = min(last * PAGE, tokens) - first * PAGE
            k, v = self._stages[i % STAGES]
            yield k[:rows], v[:rows]
            if i + STAGES < len(spans):
                marks.append(self._fetch(layer, pages, spans, i + STAGES))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [T, Hq, D] to k, v [S, H, D] where they are; o [T, Hq, D], lse [T, Hq] float32, natural log."""
    if q.device.type == "cpu":
        return attention_with_lse(q, k.transpose(0, 1), v.transpose(0, 1), scale, causal)
    if flashinfer.serves(q.dtype, q.shape[-1]):
        return flashinfer.prefill(q, k, v, scale, causal)
    return attention_in_pieces(q, k, v, scale, causal)


def extend_attention(
    prefix: PrefixStream,
    layer: int,
    request: ExtendRequest,
    pages: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """As `executor.extend.extend_attention`, with q, k and v on a device and `pages` where it reads them."""
    pieces = prefix.pieces(layer, pages, request.start)
    o, lse = attend(q, k, v, scale, causal=True)
    for piece_k, piece_v in pieces:
        # In float32, unlike FlashInfer's merge: a long prefix is merged many times.
        o, lse = merge_state(o, lse, *attend(q, piece_k, piece_v, scale, causal=False))
    return o.to(q.dtype)
