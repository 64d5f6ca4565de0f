"""The needle model for training: Llama's parameters under Hugging Face's names, with a forward pass that compiles well.

Hugging Face's `LlamaForCausalLM` computes the same (`export.py` checks it). This one takes explicit positions, keeps
float32 weights with bf16 products, and can report the error of a decode step that sees only sinks and window.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fluxion_sglang.commands import needle

SINKS, WINDOW = 64, 256

Observer = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    hidden: int = 256
    inter: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    theta: float = 1e7
    vocab: int = len(needle.VOCABULARY)
    positions: int = 32768
    eps: float = 1e-5

    def hf_config(self) -> dict[str, Any]:
        """Arguments of Hugging Face's `LlamaConfig`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inter,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.positions,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
            "rms_norm_eps": self.eps,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": needle.BOS,
            "eos_token_id": needle.EOS,
            "pad_token_id": 0,
            "dtype": "bfloat16",
        }


class NeedleModel(nn.Module):
    """Parameters have the names of Hugging Face's Llama, so `state_dict()` is the checkpoint."""

    def __init__(self, shape: Shape = Shape()) -> None:
        super().__init__()
        self.shape = shape
        s = shape
        rows = s.heads * s.head_dim
        self.names: list[str] = []
        self.add("model.embed_tokens.weight", torch.randn(s.vocab, s.hidden) * 0.5 / math.sqrt(s.hidden))
        for i in range(s.layers):
            p = f"model.layers.{i}."
            self.add(p + "self_attn.q_proj.weight", _linear(rows, s.hidden))
            self.add(p + "self_attn.k_proj.weight", _linear(s.kv_heads * s.head_dim, s.hidden))
            self.add(p + "self_attn.v_proj.weight", _linear(s.kv_heads * s.head_dim, s.hidden))
            # Depth-scaled as in GPT-2: the residual stream starts as the embedding.
            self.add(p + "self_attn.o_proj.weight", _linear(s.hidden, rows) / math.sqrt(2 * s.layers))
            self.add(p + "mlp.gate_proj.weight", _linear(s.inter, s.hidden))
            self.add(p + "mlp.up_proj.weight", _linear(s.inter, s.hidden))
            self.add(p + "mlp.down_proj.weight", _linear(s.hidden, s.inter) / math.sqrt(2 * s.layers))
            self.add(p + "input_layernorm.weight", torch.ones(s.hidden))
            self.add(p + "post_attention_layernorm.weight", torch.ones(s.hidden))
        self.add("model.norm.weight", torch.ones(s.hidden))

    def add(self, name: str, value: Tensor) -> None:
        self.register_parameter(name.replace(".", "__"), nn.Parameter(value))
        self.names.append(name)

    def weight(self, name: str) -> Tensor:
        return getattr(self, name.replace(".", "__"))

    def weights(self) -> dict[str, Tensor]:
        """Weights by Hugging Face's names."""
        return {name: self.weight(name) for name in self.names}

    def forward(
        self, tokens: Tensor, positions: Tensor, probes: Tensor | None = None, observe: Observer | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits of every token, and the dependence of heads on the middle.

        Args:
            tokens, positions: [B, T] int64.
            probes: [B, N] int64, positions whose heads are examined; None for none.
            observe: called in every layer with its index, q [B, Hq, T, D], k and v [B, H, T, D] and the outputs [B, Hq,
                T, D].

        Returns:
            logits [B, T, vocab] float32; and [2, L, B, Hq, N] float32 (empty without probes): the deviation of a head's
            output from full attention's when it sees only the first 64 and the last 256 tokens, and the head's output
            itself. Both are norms over the largest output of the layer (Fluxion, Eq. 2).
        """
        s = self.shape
        B, T = tokens.shape
        even = torch.arange(0, s.head_dim, 2, dtype=torch.float32, device=tokens.device)
        frequency = s.theta ** (-even / s.head_dim)
        angle = positions[..., None].float() * frequency
        cos, sin = (torch.cat([f, f], -1)[:, None].bfloat16() for f in (angle.cos(), angle.sin()))
        x = F.embedding(tokens, self.weight("model.embed_tokens.weight"))
        heads = []
        for i in range(s.layers):
            p = f"model.layers.{i}."
            h = self._norm(x, p + "input_layernorm.weight")
            q, k, v = (
                self._linear(h, f"{p}self_attn.{name}_proj.weight").view(B, T, -1, s.head_dim).transpose(1, 2)
                for name in "qkv"
            )
            q, k = _rope(q, cos, sin), _rope(k, cos, sin)
            o = _attention(q, k, v)
            if observe is not None:
                observe(i, q, k, v, o)
            if probes is not None:
                heads.append(_head_norms(q, k, v, o, probes))
            x = x + self._linear(o.transpose(1, 2).reshape(B, T, -1), p + "self_attn.o_proj.weight").float()
            h = self._norm(x, p + "post_attention_layernorm.weight")
            h = F.silu(self._linear(h, p + "mlp.gate_proj.weight")) * self._linear(h, p + "mlp.up_proj.weight")
            x = x + self._linear(h, p + "mlp.down_proj.weight").float()
        logits = F.linear(self._norm(x, "model.norm.weight"), self.weight("model.embed_tokens.weight").bfloat16())
        return logits.float(), torch.stack(heads, 1) if heads else torch.zeros(2, 0, device=tokens.device)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.shape.eps)
        return (scaled * self.weight(name)).bfloat16()

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weight(name).bfloat16())


def _linear(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns) / math.sqrt(columns)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.is_cuda:  # its fast kernels need equal numbers of KV heads and query heads
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def _head_norms(q: Tensor, k: Tensor, v: Tensor, o: Tensor, probes: Tensor) -> Tensor:
    """[2, B, Hq, N] float32; see `NeedleModel.forward`. Probes lie at SINKS + WINDOW or later."""
    B, Hq, _, D = q.shape
    H, N = k.shape[1], probes.shape[1]
    near = torch.cat(
        [
            torch.arange(SINKS, device=q.device).expand(B, N, SINKS),
            probes[..., None] - torch.arange(WINDOW - 1, -1, -1, device=q.device),
        ],
        -1,
    )  # [B, N, S]
    index = near.reshape(B, 1, -1, 1).expand(B, H, -1, D)
    near_k, near_v = (t.gather(2, index).view(B, H, N, -1, D).float() for t in (k, v))
    at = probes.view(B, 1, N, 1)
    query = q.gather(2, at.expand(B, Hq, N, D)).view(B, H, Hq // H, N, D).float()
    full = o.gather(2, at.expand(B, Hq, N, D)).float()
    weights = (torch.einsum("bhgnd,bhnsd->bhgns", query, near_k) / math.sqrt(D)).softmax(-1)
    resident = torch.einsum("bhgns,bhnsd->bhgnd", weights, near_v).reshape(B, Hq, N, D)
    largest = full.norm(dim=-1).amax(1, keepdim=True).clamp(min=1e-6)
    return torch.stack([(resident - full).norm(dim=-1), full.norm(dim=-1)]) / largest
