"""Attention of extend passes on a device: chunks in one call, prefixes in pieces, merged; with torch and FlashInfer."""

from __future__ import annotations

import fake_flashinfer
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from world import World

from fluxion_sglang.device import extend, flashinfer
from fluxion_sglang.device.extend import ExtendAttention
from fluxion_sglang.device.library import load
from fluxion_sglang.device.pinned import Pinned
from fluxion_sglang.device.streams import streams
from fluxion_sglang.executor.prefill import ExtendRequest


@settings(max_examples=examples(40), deadline=None)
@given(
    chunks=st.lists(
        st.tuples(st.sampled_from([0, 1, 15, 16, 64, 100, 333, 512]), st.sampled_from([0, 1, 5, 16, 40])),
        min_size=1, max_size=4,
    ),
    flash=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16]), group=st.sampled_from([1, 3, 4]),
    stage=st.sampled_from([4, 8, 512]), gap=st.sampled_from([0, 2]), seed=st.integers(0, 100),
)  # fmt: skip
def test_extends_are_exact(
    chunks: list[tuple[int, int]], flash: bool, dtype: torch.dtype, group: int, stage: int, gap: int, seed: int
) -> None:
    """Prefixes of no, one and several pieces, also ending inside a page; empty chunks; tokens that belong to no
    request."""
    world = World(layers=1, group=group, dtype=dtype, tokens=8192, rows=6, seed=seed)
    library = load("sim")
    pinned = Pinned(library, world.pool.memory)
    requests, offset = [], gap
    for row, (start, count) in enumerate(chunks, 1):
        if start:
            world.extend(row, start)
        pages = world.page_list(row, start + count)
        requests.append(ExtendRequest(row, start, start + count, offset, pages))
        offset += count + gap
    q_heads, cpu = world.heads * group, torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extend, "STREAM_PAGES", stage)
        patch.setattr(flashinfer, "module", lambda: fake_flashinfer)
        attention = ExtendAttention(
            library, streams(library, cpu), world.pool, cpu, q_heads=q_heads, scale=world.scale, flash=flash
        )
        for turn in range(2):
            attention.begin(requests, [request.pages for request in requests])
            qkv = world.randn(offset, q_heads + 2 * world.heads, world.dim)
            q, k, v = qkv.split([q_heads, world.heads, world.heads], 1)
            out = attention.run(0, q, k, v)
            assert out.shape == q.shape and out.dtype == dtype
            if attention.chunks is not None:  # one call for all requests of a pass
                assert attention.chunks._wrapper.calls == (turn + 1) * any(count for _, count in chunks)
            for request in requests:
                new = request.tokens
                old_k, old_v = (kept[request.row][0] if request.start else k[:0] for kept in (world.keys, world.values))
                keys, values = (
                    torch.cat(pair).double().repeat_interleave(group, 1) for pair in ((old_k, k[new]), (old_v, v[new]))
                )
                scores = torch.einsum("thd,shd->ths", q[new].double(), keys) * world.scale
                unseen = torch.arange(request.stop) > torch.arange(request.start, request.stop).view(-1, 1, 1)
                want = torch.einsum("ths,shd->thd", scores.masked_fill(unseen, -torch.inf).softmax(-1), values)
                assert torch.allclose(out[new].double(), want, atol=1e-5 if dtype == torch.float32 else 2e-2)
    pinned.release()
