"""The model's layers on the native workers, where the CPU is the device (option `model_kernels`).

A decode step reads every weight once for a row or a few. PyTorch's matrix products are made for many rows and read
weights at a fraction of what memory gives. So each module with unquantised weights gets a method of ours in place of
SGLang's: few rows go to the workers, and everything else goes to SGLang's method as before. What lies between the
linear layers takes PyTorch many passes over its tensors; SGLang lets a platform bring functions of its own for these
operations, and ours take one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.platforms import current_platform
from torch import nn

from fluxion_sglang.native import NativeLayers, Workers

MAX_ROWS = 32
"""The most rows that were measured; PyTorch is slower up to there (`benchmark/linears.py`)."""

_DTYPES = (torch.bfloat16, torch.float32)


def install(model: nn.Module, workers: Workers) -> int:
    """Have the workers compute the model's layers; returns how many of them are linear.

    What is quantised or of another dtype stays as it is. Of a layer with adapters (LoRA) the base is computed here, and
    what adapters add is SGLang's.
    """
    native = NativeLayers(workers)
    _register_operations(model, native)
    linear, head = _Linear(native), _Head(native)
    heads = _rounds_logits_once(model)
    count = 0
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or type(weight.data) is not torch.Tensor:
            continue
        if weight.dtype not in _DTYPES or weight.device.type != "cpu":
            continue
        # Exactly these: a subclass does something else.
        if type(method) is UnquantizedLinearMethod:
            module.quant_method = linear
        elif type(method) is UnquantizedEmbeddingMethod and heads:
            module.quant_method = head
        else:
            continue
        if weight.stride(1) == 1:
            native.into_huge_pages(weight.data)
        count += 1
    return count


# --- Linear layers ---


def _rounds_logits_once(model: nn.Module) -> bool:
    """Whether logits are the product of hidden states and weights in the model's dtype, and nothing else."""
    processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    special = ("use_fp32_lm_head", "use_fp32_lm_head_output", "rl_on_policy_target")
    return not any(getattr(processor, name, None) for processor in processors for name in special)


def _product(native: NativeLayers, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """What the layer makes of x, or None where that is SGLang's to compute."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    few = (
        x.dim() == 2
        and 0 < x.shape[0] <= MAX_ROWS
        and x.dtype is weight.dtype
        and x.stride(1) == 1
        and weight.stride(1) == 1
        and not torch.compiler.is_compiling()
    )
    return native.linear(x, weight, bias) if few else None


class _Linear(UnquantizedLinearMethod):
    def __init__(self, native: NativeLayers) -> None:
        super().__init__()
        self._native = native

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = _product(self._native, layer, x, bias)
        return super().apply(layer, x, bias) if out is None else out


class _Head(UnquantizedEmbeddingMethod):
    """An embedding, or the layer that makes logits: SGLang multiplies by any method that is not its own."""

    def __init__(self, native: NativeLayers) -> None:
        super().__init__()
        self._native = native

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert isinstance(layer.weight, torch.Tensor)
        x = x.to(layer.weight.dtype)  # as SGLang does before its own product
        out = _product(self._native, layer, x, bias)
        return super().apply(layer, x, bias) if out is None else out


# --- What lies between them ---


def _register_operations(model: nn.Module, native: NativeLayers) -> None:
    key = current_platform.get_dispatch_key_name()
    for module in model.modules():
        for base, operation in _OPERATIONS.items():
            # A subclass with a formula of its own keeps it.
            if isinstance(module, base) and type(module).forward_native is base.forward_native:
                # A function, which SGLang binds to the module.
                BaseFusedOp.register_oot_forward(type(module), _method(partial(operation, native)), key)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return forward


def _rows(*tensors: torch.Tensor) -> bool:
    """Whether these are matrices that the kernels take, of one dtype."""
    first = tensors[0]
    return first.dtype in _DTYPES and all(
        t.dim() == 2 and t.dtype is first.dtype and t.stride(1) == 1 and t.device.type == "cpu" for t in tensors
    )


def _rms_norm(
    native: NativeLayers,
    norm: RMSNorm,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: nn.Module | None = None,
) -> Any:
    plain = (
        post_residual_addition is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
        and norm.variance_size_override is None
        and norm.weight.dtype is x.dtype
        and x.shape[-1] == norm.hidden_size
    )
    if not plain or not _rows(x, *(() if residual is None else (residual,))):
        return norm.forward_native(x, residual, post_residual_addition, quant_linear)
    if residual is None:
        return native.norm(x, norm.weight, norm.variance_epsilon)
    return native.add_norm(x, residual, norm.weight, norm.variance_epsilon)


def _silu_mul(native: NativeLayers, activation: SiluAndMul, x: torch.Tensor) -> torch.Tensor:
    if not _rows(x):
        return activation.forward_native(x)
    return native.silu_mul(x)


def _rope(
    native: NativeLayers,
    rotary: RotaryEmbedding,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    plain = (
        offsets is None
        and fused_set_kv_buffer_arg is None
        and positions.dim() == 1
        and positions.dtype is torch.int64
        and not hasattr(rotary, "sin_cos_cache")
    )
    if not plain or not _rows(query, key, rotary.cos_sin_cache):
        return rotary.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    return native.rope(positions, query, key, rotary.cos_sin_cache, rotary.head_size, rotary.is_neox_style)


_OPERATIONS: dict[type[BaseFusedOp], Callable[..., Any]] = {
    RMSNorm: _rms_norm,
    SiluAndMul: _silu_mul,
    RotaryEmbedding: _rope,
}
