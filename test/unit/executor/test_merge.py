"""Partial attention and its exact merge, against softmax over everything in float64."""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxion_sglang.executor import merge
from fluxion_sglang.executor.merge import attention_in_pieces, attention_with_lse, merge_state


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = torch.einsum("thd,hsd->ths", q.double(), k) * scale
    if causal:
        keep = torch.ones(q.shape[0], k.shape[1]).tril().bool()
        scores = scores.masked_fill(~keep.unsqueeze(1), -torch.inf)
    return torch.einsum("ths,hsd->thd", scores.softmax(-1), v), scores.logsumexp(-1)


@settings(max_examples=examples(40))
@given(
    tokens=st.integers(1, 40), keys=st.integers(1, 80), heads=st.integers(1, 3), group=st.sampled_from([1, 2, 4, 7]),
    dim=st.sampled_from([32, 64, 96]), causal=st.booleans(), seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_attention_with_lse(
    tokens: int, keys: int, heads: int, group: int, dim: int, causal: bool, seed: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    keys = tokens if causal else keys
    q = torch.randn(tokens, heads * group, dim).to(dtype)
    k, v = (torch.randn(keys, heads, dim).to(dtype).transpose(0, 1) for _ in range(2))
    o, lse = attention_with_lse(q, k, v, 0.125, causal)
    want_o, want_lse = reference(q, k, v, 0.125, causal)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert o.shape == q.shape and lse.shape == q.shape[:2] and lse.dtype == torch.float32
    torch.testing.assert_close(o.double(), want_o, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3 if dtype == torch.bfloat16 else 1e-5, rtol=1e-4)


@settings(max_examples=examples(40))
@given(keys=st.integers(2, 60), cut=st.floats(0.05, 0.95), seed=st.integers(0, 2**16))
def test_merge_of_two_parts_is_the_whole(keys: int, cut: float, seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 4, 32), torch.randn(2, keys, 32) * 4, torch.randn(2, keys, 32)
    at = min(max(int(keys * cut), 1), keys - 1)
    parts = [attention_with_lse(q, k[:, s], v[:, s], 0.3, False) for s in (slice(at), slice(at, None))]
    o, lse = merge_state(*parts[0], *parts[1])
    want_o, want_lse = reference(q, k, v, 0.3, False)
    torch.testing.assert_close(o.double(), want_o, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("empty", ["a", "b", "both"])
def test_empty_parts(empty: str) -> None:
    o, lse = torch.randn(5, 8), torch.randn(5)
    nothing, never = torch.zeros(5, 8), torch.full((5,), -torch.inf)
    if empty == "both":
        got_o, got_lse = merge_state(nothing, never, nothing, never)
        assert (got_o == 0).all() and got_lse.isneginf().all()
        return
    got_o, got_lse = merge_state(nothing, never, o, lse) if empty == "a" else merge_state(o, lse, nothing, never)
    torch.testing.assert_close(got_o, o)
    torch.testing.assert_close(got_lse, lse)


@settings(max_examples=examples(40))
@given(
    tokens=st.integers(1, 40), keys=st.integers(1, 80), heads=st.integers(1, 3), group=st.sampled_from([1, 2, 4, 7]),
    causal=st.booleans(), seed=st.integers(0, 2**16), piece=st.sampled_from([1, 700, 1 << 24]),
)  # fmt: skip
def test_attention_in_pieces(
    tokens: int, keys: int, heads: int, group: int, causal: bool, seed: int, piece: int
) -> None:
    torch.manual_seed(seed)
    keys = tokens if causal else keys
    q = torch.randn(tokens, heads * group, 64)
    k, v = (torch.randn(keys, heads, 64) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "_PIECE", piece)
        o, lse = attention_in_pieces(q, k, v, 0.125, causal)
    want_o, want_lse = reference(q, k.transpose(0, 1), v.transpose(0, 1), 0.125, causal)
    assert torch.allclose(o.double(), want_o, atol=1e-5)
    assert torch.allclose(lse.double(), want_lse, atol=1e-5)
