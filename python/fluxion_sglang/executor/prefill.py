"""Exact attention of a prefill chunk: causal over the chunk, merged with the prefix streamed from the host pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fluxion_sglang.executor.merge import attention_with_lse, merge_state
from fluxion_sglang.kv.host_pool import HostPool
from fluxion_sglang.kv.placement import PAGE

STREAM_PAGES = 512
"""Pages of the prefix gathered at a time: large enough for the matrix kernels, small against the prefix."""


@dataclass(frozen=True)
class ExtendRequest:
    """One request of an extend batch.

    Attributes:
        row: its row in the request table.
        start: tokens already in the host pool (radix hit, earlier chunks); any number, page aligned or not.
        stop: tokens after this chunk.
        offset: index of its first token in the batch's flat q, k, v.
        pages: [>= ceil(stop / 16)] int32, its page list.
        queries: how many of the last new tokens' queries are wanted once the host pool has the chunk.
    """

    row: int
    start: int
    stop: int
    offset: int
    pages: torch.Tensor
    queries: int = 0

    @property
    def tokens(self) -> slice:
        """The request's tokens in the batch's flat q, k, v."""
        return slice(self.offset, self.offset + self.stop - self.start)

    @property
    def last_queries(self) -> slice:
        """Those of its tokens whose queries are wanted, in the batch's flat q."""
        tokens = self.tokens
        return slice(max(tokens.start, tokens.stop - self.queries), tokens.stop)


def extend_attention(
    pool: HostPool, layer: int, request: ExtendRequest, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of one request's chunk over its prefix and itself; exact whatever the policy.

    The chunk's own keys come as arguments, so they need no place on the device, whatever the chunk's length.

    Args:
        q: [T, Hq, D]. k, v: [T, H, D]; T = stop - start.

    Returns:
        [T, Hq, D] in q's dtype.
    """
    o, lse = attention_with_lse(q, k.transpose(0, 1), v.transpose(0, 1), scale, causal=True)
    stride = STREAM_PAGES * PAGE
    for first in range(0, request.start, stride):
        last = min(first + stride, request.start)
        pages = request.pages[first // PAGE : -(-last // PAGE)]
        prefix_k, prefix_v = pool.gather(layer, pages)
        # The prefix may end inside a page whose later slots hold nothing of this request.
        part = attention_with_lse(q, prefix_k[:, : last - first], prefix_v[:, : last - first], scale, causal=False)
        o, lse = merge_state(o, lse, *part)
    return o.to(q.dtype)
