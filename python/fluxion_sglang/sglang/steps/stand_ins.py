"""PyTorch code in place of GPU-only kernels that some models call by name; and no pinned memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from fluxion_sglang.sglang.compat import Need, check


def install() -> None:
    """Install the replacements in modules that are already imported. Raises CompatError."""
    for need, function in _FUNCTIONS.items():
        if (module := sys.modules.get(need.module)) is None:
            continue
        *owners, name = need.name.split(".")
        owner = reduce(getattr, owners, module)
        if getattr(owner, name, None) is not function:
            check((need,))
            setattr(owner, name, function)


def softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(logits / cap), in place (Gemma 2's last operation)."""
    return logits.div_(cap).tanh_().mul_(cap)


def gate_sigmoid_mul_add(x: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor, out: torch.Tensor) -> None:
    """out += sigmoid(x weight^T) * shared, in float32 rounded once (Qwen2-MoE's shared expert).

    Args:
        x: [rows, hidden]. weight: [hidden]. shared, out: as x.
    """
    gate = torch.sigmoid(x.float() @ weight.float()).unsqueeze(-1)
    out.copy_(torch.addcmul(out.float(), gate, shared.float()))


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1) of alternating columns, clamped (gpt-oss); SGLang's version is compiled.

    Args:
        x: [rows, 2 * inner].
    """
    gate, up = x[..., ::2].float().clamp(max=limit), x[..., 1::2].float().clamp(-limit, limit)
    return (gate * torch.sigmoid(gate * alpha) * (up + 1)).to(x.dtype)


def sums_of_squares(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each row of q, then of each row of k, in float32 (MiniMax-M2's norms of queries and keys).

    Args:
        q, k: [rows, size], sizes may differ.

    Returns:
        [2 * rows].
    """
    return torch.cat([x.float().square().sum(-1) for x in (q, k)])


def rms_apply(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    sums: torch.Tensor,
    ranks: int = 1,
    epsilon: float = 1e-5,
) -> tuple[torch.Tensor, ...]:
    """RMSNorm of the rows of q and of k.

    Args:
        q, k: [rows, size]. q_weight, k_weight: [size].
        sums: [2 * rows], from `sums_of_squares`, summed over the ranks. Each rank has an equal share of a row.
    """
    parts = zip((q, k), (q_weight, k_weight), sums.split(len(q)), strict=True)
    return tuple(
        (x.float() * torch.rsqrt(total / x.shape[1] / ranks + epsilon).unsqueeze(-1) * weight.float()).to(x.dtype)
        for x, weight, total in parts
    )


def split_projections(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, ...]:
    """Split the projections of a Qwen3.5 layer with a state.

    Args:
        mixed_qkvz: [rows, queries, keys, values and gates of all heads]. mixed_ba: [rows, b and a of all heads].

    Returns:
        Queries, keys and values, [rows, columns]; gates, [rows, value heads, head_v]; b and a, [rows, value heads].
    """
    values = num_heads_v * head_v
    mixed, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + values, values], -1)
    b, a = mixed_ba.split([num_heads_v, num_heads_v], -1)
    return mixed, z.unflatten(-1, (num_heads_v, head_v)), b.contiguous(), a.contiguous()


def sigmoid_mul(
    attn_output: torch.Tensor, gate: torch.Tensor, inplace: bool = False, quant: bool = False
) -> torch.Tensor:
    """attn_output * sigmoid(gate), in float32 rounded once (Qwen3.5's attention).

    Args:
        attn_output: [rows, columns]. gate: as many elements. quant: GPUs only, ignored.
    """
    made = (attn_output.float() * torch.sigmoid(gate.reshape(attn_output.shape).float())).to(attn_output.dtype)
    return attn_output.copy_(made) if inplace else made


def norm_then_gate(self: Any, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
    """RMSNorm of the rows of x times SiLU (or sigmoid) of z, in float32 rounded once.

    Args:
        self: SGLang's module. x, z: [rows, size].
    """
    wide = x.float()
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
    if z is not None:
        gate = z.float()
        out = out * torch.sigmoid(gate) * (gate if self.activation in ("swish", "silu") else 1.0)
    return out.to(x.dtype)


_FUNCTIONS: dict[Need, Callable[..., Any]] = {
    Need("sglang.srt.layers.logits_processor", "fused_softcap", ("full_logits", "final_logit_softcapping")): softcap,
    Need(
        "sglang.srt.models.qwen2_moe",
        "fused_gate_sigmoid_mul_add",
        ("hidden_states", "gate_weight", "shared_output", "final_hidden_states"),
    ): gate_sigmoid_mul_add,
    Need(
        "sglang.srt.layers.moe.fused_moe_native", "swiglu_gpt_oss_sigmoid_alpha", ("x", "gemm1_alpha", "gemm1_limit")
    ): clamped_swiglu,
    Need("sglang.srt.models.minimax_m2", "rms_sumsq_serial", ("x1", "x2")): sums_of_squares,
    Need(
        "sglang.srt.models.minimax_m2", "rms_apply_serial", ("x1", "x2", "w1", "w2", "sum_sq", "tp_world", "eps")
    ): rms_apply,
    Need(
        "sglang.srt.models.qwen3_5",
        "fused_qkvzba_split_reshape_cat_contiguous",
        ("mixed_qkvz", "mixed_ba", "num_heads_qk", "num_heads_v", "head_qk", "head_v"),
    ): split_projections,
    Need("sglang.srt.models.qwen3_5", "fused_sigmoid_mul", ("attn_output", "gate", "inplace", "quant")): sigmoid_mul,
    Need("sglang.kernels.ops.attention.fla.layernorm_gated", "RMSNorm.forward", ("self", "x", "z")): norm_then_gate,
}


# --- pinned memory, which PyTorch refuses on a machine without an accelerator ---


def make_lora_manager(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """AROUND LoRAManager.__init__: ordinary memory for SGLang's adapter code."""
    if not torch.accelerator.is_available():
        pin_nothing()
        for name in ("lora", "layers", "backend.torch_backend"):
            sys.modules[f"sglang.srt.lora.{name}"].torch = _Unpinned()  # type: ignore[attr-defined]
    original(*args, **kwargs)


def pin_nothing() -> None:
    """Make pinning of tensors a no-op."""
    torch.Tensor.pin_memory = _as_it_is  # type: ignore[assignment]


def _as_it_is(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


class _Unpinned:
    """The torch module without pinned memory."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch, name)
        if name not in ("tensor", "zeros", "empty"):
            return function

        def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            made: torch.Tensor = function(*args, **kwargs)
            return made

        return make
