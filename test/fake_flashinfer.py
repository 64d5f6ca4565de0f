"""FlashInfer in torch: the parts that `device/flashinfer.py` calls, with its signatures, layouts and base-2 LSE.

The LSE of an empty list in a decode step is NOTHING.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch

NOTHING = -math.inf
"""The LSE of an empty list; FlashInfer before 0.7 had about -5e4."""

CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, keep: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, Hq, D], k and v [S, H, D]; LSE of base 2; without keys 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->ths", q.double(), k) * scale
    if keep is not None:
        scores = scores.masked_fill(~keep.unsqueeze(1), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num()
    return torch.einsum("ths,shd->thd", weights, v).to(q.dtype).contiguous(), (lse / math.log(2)).float().contiguous()


# Different names for the same function, which tests can replace separately.
_attend_to_chunks = _attend_to_pages = _attend


def single_prefill_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, sm_scale: float | None = None,
    backend: str = "auto", return_lse: bool = False,
) -> Any:  # fmt: skip
    assert sm_scale is not None and return_lse and backend == "fa2"
    keep = torch.ones(len(q), len(k)).tril(len(k) - len(q)).bool() if causal else None
    return _attend(q, k, v, sm_scale, keep)


class BatchPrefillWithRaggedKVCacheWrapper:
    """`calls`: how often it ran."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert not float_workspace_buffer.any(), "the workspace must be zeroed before its first use"
        assert kv_layout == "NHD" and backend == "fa2"
        self.calls = 0

    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        *, causal: bool = False, sm_scale: float | None = None, q_data_type: Any = "float16", kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        for indptr in (qo_indptr, kv_indptr):
            assert indptr.dtype == torch.int32 and indptr.device.type == "cpu" and indptr.is_contiguous()
            assert indptr[0] == 0 and bool((indptr.diff() > 0).all())
        assert torch.equal(qo_indptr, kv_indptr) and len(qo_indptr) > 1 and causal and sm_scale is not None
        assert num_qo_heads % num_kv_heads == 0 and q_data_type == kv_data_type
        self.indptr, self.heads, self.dim = qo_indptr.tolist(), (num_qo_heads, num_kv_heads), head_dim_qk
        self.dtype, self.scale = q_data_type, sm_scale

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:  # fmt: skip
        assert q.shape == (self.indptr[-1], self.heads[0], self.dim) and q.dtype == k.dtype == self.dtype
        assert k.shape == v.shape == (self.indptr[-1], self.heads[1], self.dim) and return_lse
        assert out is not None and out.shape == q.shape and out.is_contiguous()
        self.calls += 1
        lse = torch.empty(q.shape[:2])
        for first, stop in pairwise(self.indptr):
            keep = torch.ones(stop - first, stop - first).tril().bool()
            own = _attend_to_chunks(q[first:stop], k[first:stop], v[first:stop], self.scale, keep)
            out[first:stop], lse[first:stop] = own
        return out, lse


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, use_tensor_cores: bool = False,
        backend: str = "auto",
    ) -> None:  # fmt: skip
        assert not float_workspace_buffer.any(), "the workspace must be zeroed before its first use"
        assert kv_layout == "HND" and backend == "fa2"
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, q_data_type: Any = "float16", kv_data_type: Any = None,
        sm_scale: float | None = None,
    ) -> None:  # fmt: skip
        for tensor in (indptr, indices, last_page_len):
            assert tensor.dtype == torch.int32 and tensor.device.type == "cpu" and tensor.is_contiguous()
        assert len(indptr) == len(last_page_len) + 1 and indptr[-1] == len(indices) and sm_scale is not None
        assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())
        assert self.use_tensor_cores or num_qo_heads // num_kv_heads in CUDA_CORE_GROUPS
        assert q_data_type == kv_data_type
        self.lists, self.heads, self.dim = (indptr, indices, last_page_len), (num_qo_heads, num_kv_heads), head_dim
        self.page, self.dtype, self.scale = page_size, q_data_type, sm_scale

    def run(
        self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, q_scale: float | None = None, return_lse: bool = False
    ) -> Any:
        indptr, indices, last = self.lists
        pages, two, kv_heads, page, dim = paged_kv_cache.shape
        assert (two, kv_heads, page, dim) == (2, self.heads[1], self.page, self.dim) and return_lse
        assert q.shape == (len(last), self.heads[0], dim) and q.dtype == self.dtype == paged_kv_cache.dtype
        assert int(indices.min()) >= 0 and int(indices.max()) < pages
        parts = []
        for i in range(len(last)):
            own = indices[indptr[i] : indptr[i + 1]].long()
            if not len(own):
                parts.append((torch.zeros_like(q[i : i + 1]), torch.full((1, q.shape[1]), NOTHING)))
                continue
            length = (len(own) - 1) * page + int(last[i])
            k, v = paged_kv_cache[own].permute(1, 0, 3, 2, 4).reshape(2, -1, kv_heads, dim)[:, :length]
            parts.append(_attend_to_pages(q[i : i + 1], k, v, self.scale * (1.0 if q_scale is None else q_scale)))
        return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts])
