"""The model's layers on the native workers, where the CPU is the device (option `model_kernels`).

A decode step reads every weight once for a row or a few. PyTorch's matrix products are made for many rows and read
weights at a fraction of what memory gives. So each module with unquantised weights gets a method of ours in place of
SGLang's: few rows go to the workers, and everything else goes to SGLang's method as before.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from torch import nn

from fluxion_sglang.native import NativeLayers, Workers

MAX_ROWS = 16
"""More rows are SGLang's: matrix products for many rows are as fast there (`benchmark/linears.py`)."""

_DTYPES = (torch.bfloat16, torch.float32)


def install(model: nn.Module, workers: Workers) -> int:
    """Have the workers compute the model's linear layers; returns how many.

    What is quantised, adapted (LoRA) or of another dtype stays as it is.
    """
    native = NativeLayers(workers)
    linear, head = _Linear(native), _Head(native)
    heads = _rounds_logits_once(model)
    count = 0
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.dtype not in _DTYPES or weight.device.type != "cpu":
            continue
        # Exactly these: a subclass does something else.
        if type(method) is UnquantizedLinearMethod:
            module.quant_method = linear
        elif type(method) is UnquantizedEmbeddingMethod and heads:
            module.quant_method = head
        else:
            continue
        count += 1
    return count


def _rounds_logits_once(model: nn.Module) -> bool:
    """Whether logits are the product of hidden states and weights in the model's dtype, and nothing else."""
    processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    special = ("use_fp32_lm_head", "use_fp32_lm_head_output", "rl_on_policy_target")
    return not any(getattr(processor, name, None) for processor in processors for name in special)


def _few(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        x.dim() == 2
        and 0 < x.shape[0] <= MAX_ROWS
        and x.dtype is weight.dtype
        and x.stride(1) == 1
        and weight.stride(1) == 1
        and not torch.compiler.is_compiling()
    )


class _Linear(UnquantizedLinearMethod):
    def __init__(self, native: NativeLayers) -> None:
        super().__init__()
        self._native = native

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = layer.weight
        if not _few(x, weight):
            return super().apply(layer, x, bias)
        return self._native.linear(x, weight, bias)


class _Head(UnquantizedEmbeddingMethod):
    """An embedding, or the layer that makes logits: SGLang multiplies by any method that is not its own."""

    def __init__(self, native: NativeLayers) -> None:
        super().__init__()
        self._native = native

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = layer.weight
        x = x.to(weight.dtype)
        if not _few(x, weight):
            return super().apply(layer, x, bias)
        return self._native.linear(x, weight, bias)
