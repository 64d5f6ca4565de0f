"""PyTorch in place of kernels that some models call by name and SGLang has for GPUs alone; LoRA in ordinary memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from fluxion_sglang.sglang.compat import Need, check


def install() -> None:
    """Put them in, where the module with the kernel has been imported. Raises CompatError."""
    for need, function in _FUNCTIONS.items():
        if (module := sys.modules.get(need.module)) is not None and getattr(module, need.name, None) is not function:
            check((need,))
            setattr(module, need.name, function)


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
    """gate * sigmoid(alpha * gate) * (up + 1) of columns that alternate, clamped (gpt-oss); SGLang compiles its own.

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
        sums: [2 * rows], of `sums_of_squares`, added up over the ranks. Each rank has an equal share of a row.
    """
    parts = zip((q, k), (q_weight, k_weight), sums.split(len(q)), strict=True)
    return tuple(
        (x.float() * torch.rsqrt(total / x.shape[1] / ranks + epsilon).unsqueeze(-1) * weight.float()).to(x.dtype)
        for x, weight, total in parts
    )


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
}


# --- LoRA ---


def make_lora_manager(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """AROUND LoRAManager.__init__. PyTorch refuses to pin memory on a machine without an accelerator; SGLang's code for
    adapters gets ordinary memory there."""
    if not torch.accelerator.is_available():
        torch.Tensor.pin_memory = _as_it_is  # type: ignore[assignment]
        for name in ("lora", "layers", "backend.torch_backend"):
            sys.modules[f"sglang.srt.lora.{name}"].torch = _Unpinned()  # type: ignore[attr-defined]
    original(*args, **kwargs)


def _as_it_is(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


class _Unpinned:
    """PyTorch, whose tensors are made without pinning their memory."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch, name)
        if name not in ("tensor", "zeros", "empty"):
            return function

        def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            made: torch.Tensor = function(*args, **kwargs)
            return made

        return make
