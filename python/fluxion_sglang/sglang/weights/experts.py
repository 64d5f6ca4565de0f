"""Experts (SGLang's FusedMoE) with 8-bit or 4-bit integer weights; each expert is packed separately.

`layers.install` gives their method the native kernels. Without these, and for many rows, SGLang's loop over experts
computes, with each expert's weights unpacked to the dtype of the input.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from torch import nn

from fluxion_sglang.sglang.weights.methods import Native, Part, wide_slices
from fluxion_sglang.weights.quantised import Format

WEIGHTS = ("w13_weight", "w2_weight")
"""A layer's parameters, [experts, outputs, inputs]: gate and up projections in one, and the down projection."""


def computes_experts(layer: nn.Module) -> bool:
    """Whether the kernels support the activation and options of these experts."""
    config: Any = layer.moe_runner_config
    special = (
        config.apply_router_weight_on_input,
        config.no_combine,
        layer.use_triton_kernels,
        layer.moe_ep_size != 1,
        config.swiglu_limit is not None,
        config.gemm1_alpha is not None and not config.gate_up_interleaved,
        config.gemm1_beta not in (None, 1.0),
    )
    clamps = config.gemm1_alpha is not None, config.gemm1_clamp_limit is not None
    acts = ("silu", "gelu") if clamps == (False, False) else ("silu",) if clamps == (True, True) else ()
    return config.is_gated and config.activation in acts and not any(special)


def biases_of(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Biases of gate_up and down, [experts, outputs] float32; None: these experts have none."""
    held: Any = layer
    return (held.w13_weight_bias, held.w2_weight_bias) if held.with_bias else None


def clamps_of(layer: nn.Module) -> tuple[float, float] | None:
    """alpha and limit of gpt-oss's experts, whose rows of gate_up alternate; None for other experts."""
    config: Any = layer.moe_runner_config
    return None if config.gemm1_alpha is None else (float(config.gemm1_alpha), float(config.gemm1_clamp_limit))


def hold_experts(layer: nn.Module, name: str, packed: torch.Tensor, size: tuple[int, int], form: Format) -> Any:
    """Set one of a layer's packed weights; returns the parameter.

    Args:
        packed: [experts, panels, bytes] uint8, each expert as from `pack`. size: an expert's outputs and inputs.
    """
    weight: Any = nn.Parameter(packed, requires_grad=False)
    weight.held = *size, form
    setattr(layer, name, weight)
    return weight


def formats_of(layer: nn.Module) -> tuple[Format, Format] | None:
    """The formats of these experts' packed weights; None if they are not packed."""
    held: Any = [getattr(getattr(layer, name), "held", None) for name in WEIGHTS]
    return None if None in held else (held[0][-1], held[1][-1])


class PackedExpertsMethod(UnquantizedFusedMoEMethod):
    """Computes experts with packed or plain weights. Subclasses load them.

    Attributes:
        native: the kernels; None: PyTorch computes.
    """

    native: Native | None = None

    def forward_cpu(self, layer: nn.Module, dispatch_output: StandardDispatchOutput) -> StandardCombineInput:
        if formats_of(layer) is not None:
            layer = _WithWideExperts(layer, self.native, dispatch_output.hidden_states.dtype)  # type: ignore[assignment]
        found: StandardCombineInput = super().forward_cpu(layer, dispatch_output)
        return found

    forward_native = forward_cpu


class WideExperts:
    """The weights of packed experts in a dtype, unpacked on access."""

    def __init__(self, packed: Any, native: Native | None, dtype: torch.dtype) -> None:
        self._packed, self._native, self._dtype = packed, native, dtype

    def __getitem__(self, expert: int) -> torch.Tensor:
        part = Part(self._packed[expert], *self._packed.held)
        return torch.cat([rows.clone() for rows in wide_slices(self._native, part, self._dtype)])


class _WithWideExperts:
    """A layer whose experts are unpacked one by one, for SGLang's method."""

    def __init__(self, layer: nn.Module, native: Native | None, dtype: torch.dtype) -> None:
        self._layer = layer
        self.w13_weight, self.w2_weight = (WideExperts(getattr(layer, name), native, dtype) for name in WEIGHTS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
