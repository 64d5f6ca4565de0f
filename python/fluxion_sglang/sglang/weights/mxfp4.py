"""gpt-oss's published checkpoints on a CPU: experts in MXFP4, which the kernels multiply as 8-bit integers.

MXFP4 numbers are integers from -12 to 12 times half a power of two, so 8 bits represent them exactly
(`weights/checkpoints.py`). With its scales a weight takes 8.5 bits, twice as much as in the file.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import nn

from fluxion_sglang.config import ConfigError
from fluxion_sglang.sglang.weights.experts import (
    WEIGHTS,
    PackedExpertsMethod,
    computes_experts,
    formats_of,
    hold_experts,
)
from fluxion_sglang.sglang.weights.methods import OnCpu
from fluxion_sglang.weights import checkpoints
from fluxion_sglang.weights.quantised import pack

_NO_UPDATE = (
    "The weights are those of an MXFP4 checkpoint, which cannot be updated while the server runs; start a server with "
    "the other checkpoint."
)


class Mxfp4CpuConfig(OnCpu, Mxfp4Config):
    """SGLang's configuration class of the format."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, FusedMoE):
            return Mxfp4ExpertsMethod(layer.use_triton_kernels)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


class Mxfp4ExpertsMethod(PackedExpertsMethod):
    """Packs a layer's two weights. A weight is loaded as two tensors, numbers and scales, and packed when both are
    present."""

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **extra_weight_attrs: Any,
    ) -> None:
        if not computes_experts(layer):
            raise ValueError(
                "experts in MXFP4 are computed in one process by kernels of the CPU alone, and options ask for other "
                "ones; leave --moe-runner-backend and --ep-size out."
            )
        inner = intermediate_size_per_partition
        if inner % 32:
            raise ConfigError(
                f"--enable-fluxion cannot serve this checkpoint with this --tp-size, because a rank has {inner} inputs "
                "of each expert, and 32 of them share a scale; use a smaller --tp-size."
            )
        for name, (outputs, inputs) in zip(WEIGHTS, [(2 * inner, hidden_size), (hidden_size, inner)], strict=True):
            found: dict[str, torch.Tensor] = {}
            for part, divisor in (("", 2), ("_scale", 32)):
                size = num_experts, outputs, inputs // divisor
                empty = nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
                empty.weight_loader = partial(_gather, layer, name, part, size, found)  # type: ignore[attr-defined]
                layer.register_parameter(name + part, empty)
            bias = nn.Parameter(torch.zeros(num_experts, outputs, dtype=torch.float32), requires_grad=False)
            bias.weight_loader = _load_bias  # type: ignore[attr-defined]
            layer.register_parameter(f"{name}_bias", bias)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if formats_of(layer) is None:
            raise _unserved("a layer lacks the weights of its experts")
        layer._derived_weight_cache_error = _NO_UPDATE  # type: ignore[assignment]  # SGLang asks before an update


def _gather(
    layer: nn.Module,
    name: str,
    part: str,
    size: tuple[int, int, int],
    found: dict[str, torch.Tensor],
    parameter: nn.Parameter,
    loaded: torch.Tensor,
    **_: Any,
) -> None:
    """Keep a part of a weight, and pack the weight when both parts are present."""
    try:
        # Copy, because SGLang's loaders may reuse the memory for the next tensor.
        found[part] = loaded.reshape(size).clone()
    except RuntimeError:
        raise _unserved(
            f"it has a tensor of {' x '.join(map(str, loaded.shape))} where its configuration says "
            f"{' x '.join(map(str, size))}"
        ) from None
    if len(found) < 2:
        return
    try:
        experts = [pack(checkpoints.mxfp4(*each)) for each in zip(found[""], found["_scale"], strict=True)]
    except ValueError as error:
        raise _unserved(str(error).rstrip(".")) from None
    inputs = 32 * found["_scale"].shape[2]
    weight = hold_experts(layer, name, torch.stack(experts), (size[1], inputs), checkpoints.MXFP4)
    weight.weight_loader = _refuse
    delattr(layer, f"{name}_scale")
    found.clear()


def _load_bias(parameter: nn.Parameter, loaded: torch.Tensor, **_: Any) -> None:
    if loaded.shape != parameter.shape:
        raise _unserved(
            f"it has biases of {' x '.join(map(str, loaded.shape))} for {' x '.join(map(str, parameter.shape))}"
        )
    parameter.data.copy_(loaded)


def _refuse(*_: Any, **__: Any) -> None:
    raise ValueError(_NO_UPDATE)


def _unserved(why: str) -> ConfigError:
    return ConfigError(
        f"--enable-fluxion cannot serve this checkpoint on a CPU, because {why}; give the model as it is published, or "
        "in bfloat16."
    )
