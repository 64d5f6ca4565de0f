"""Queries, keys and values as the attention of a Transformers model gets them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class States(NamedTuple):
    """One layer's, rotated, in the model's dtype.

    Attributes:
        q: [Hq, T, D] of the tokens given. k, v: [H, S, D], S >= T: those of the cache come first.
        scale: multiplies q.k.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


def capture(model: Any, tokens: list[int], cache: Any = None) -> list[States]:
    """What `tokens` give in every layer, after those of `cache` (a Transformers cache, which takes them in)."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    found = []

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        scale = float(kwargs.get("scaling") or query.shape[-1] ** -0.5)
        found.append(States(query[0], key[0], value[0], scale))
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("fluxion_capture", attention)
    # A name without a mask of its own would be given none, and tokens after a cache would see the wrong ones.
    AttentionMaskInterface.register("fluxion_capture", sdpa_mask)
    model.set_attn_implementation("fluxion_capture")
    with torch.no_grad():
        model(torch.tensor([tokens]), past_key_values=cache, use_cache=cache is not None, logits_to_keep=1)
    return found
