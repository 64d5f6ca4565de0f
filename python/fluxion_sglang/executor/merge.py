"""Attention over part of the keys, and the exact merge of two parts by log-sum-exp (LSE).

LSE is the natural log of the sum of exp(scaled score) everywhere in this project.
"""

from __future__ import annotations

import torch


def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Grouped-query attention with its LSE, on the CPU.

    Args:
        q: [T, Hq, D]. k, v: [H, S, D] with Hq = H * G; any strides with a contiguous last dimension.
        causal: query t sees keys 0..t (then S = T); otherwise every key.

    Returns:
        o [T, Hq, D] in q's dtype, lse [T, Hq] float32.
    """
    tokens, q_heads, dim = q.shape
    heads, keys = k.shape[0], k.shape[1]
    group = q_heads // heads
    # KV heads are the kernel's batch dimension. A group shares its keys through a zero stride, so GQA needs no copy.
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.view(tokens, heads, group, dim).permute(1, 2, 0, 3),
        k.unsqueeze(1).expand(heads, group, keys, dim),
        v.unsqueeze(1).expand(heads, group, keys, dim),
        0.0,
        causal,
        scale=scale,
    )
    return o.permute(2, 0, 1, 3).reshape(tokens, q_heads, dim), lse.permute(2, 0, 1).reshape(tokens, q_heads)


def merge_state(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets from their partial results (FlashInfer's merge_state).

    Args:
        o_a, o_b: [..., D]. lse_a, lse_b: [...] float32; -inf marks an empty part.

    Returns:
        o [..., D] float32 and lse [...] float32; both parts empty give 0 and -inf.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    # For an empty union, exp(-inf - -inf) would be nan. Shifting by 0 keeps both weights at exp(-inf) = 0.
    shift = torch.where(lse.isneginf(), torch.zeros_like(lse), lse)
    weight_a = (lse_a - shift).exp().unsqueeze(-1)
    weight_b = (lse_b - shift).exp().unsqueeze(-1)
    return o_a.float() * weight_a + o_b.float() * weight_b, lse


_PIECE = 1 << 24
"""Scores per piece of `attention_in_pieces`."""


def attention_in_pieces(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_with_lse` by matrix products in float32, for any device and dtype, with k, v: [S, H, D].

    The fallback for shapes without a kernel. It is slow; it processes few queries at a time to bound memory.
    """
    tokens, q_heads, dim = q.shape
    keys, heads, _ = k.shape
    o = torch.empty_like(q)
    lse = torch.empty(tokens, q_heads, dtype=torch.float32, device=q.device)
    k, v = k.float().permute(1, 2, 0), v.float().transpose(0, 1)  # [H, D, S], [H, S, D]
    step = max(_PIECE // (q_heads * keys), 1)
    for first in range(0, tokens, step):
        piece = q[first : first + step].float()
        rows = piece.shape[0]
        # Queries of a group are adjacent: [H, rows * G, D].
        piece = piece.view(rows, heads, -1, dim).transpose(0, 1).reshape(heads, -1, dim)
        scores = torch.matmul(piece, k) * scale
        if causal:
            seen = torch.arange(first, first + rows, device=q.device).repeat_interleave(q_heads // heads)
            scores.masked_fill_(torch.arange(keys, device=q.device) > seen.unsqueeze(1), float("-inf"))
        lse[first : first + rows] = scores.logsumexp(-1).view(heads, rows, -1).transpose(0, 1).reshape(rows, q_heads)
        out = torch.matmul(scores.softmax(-1), v).view(heads, rows, -1, dim).transpose(0, 1)
        o[first : first + rows] = out.reshape(rows, q_heads, dim).to(q.dtype)
    return o, lse
