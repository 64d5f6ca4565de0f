"""Quantised checkpoints on a CPU: GPTQ, AutoRound, AWQ, compressed-tensors with integers, and gpt-oss in MXFP4.

SGLang reads the configuration, decides which layers are quantised, makes the parameters of the checkpoint and shards
them between ranks. Its kernels need a GPU. Here the parameters are unpacked after loading, and the layer holds the
weight like any quantised one (`methods.py`).

W8A8 is computed as W8A16: activations keep 16 bits, which is more exact than the format requires. Scales and minima
become float16, which rounds them by at most 2^-11 of their value.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.parameter import BasevLLMParameter
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.auto_round import AutoRoundConfig
from sglang.srt.layers.quantization.awq import AWQConfig, AWQLinearMethod
from sglang.srt.layers.quantization.awq.schemes import AWQLinearScheme
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsLinearMethod,
)
from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Int8, CompressedTensorsWNA16
from sglang.srt.layers.quantization.gptq.gptq import GPTQConfig, GPTQLinearMethod
from sglang.srt.layers.quantization.gptq.schemes import GPTQLinearScheme
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.platforms import current_platform
from torch import nn

from fluxion_sglang.config import ConfigError
from fluxion_sglang.sglang.start.cpu_platform import PortableCpuPlatform
from fluxion_sglang.sglang.weights.methods import OnCpu, QuantisedMethod, hold, parts_of
from fluxion_sglang.sglang.weights.mxfp4 import Mxfp4CpuConfig
from fluxion_sglang.weights import checkpoints
from fluxion_sglang.weights.quantised import BLOCK, Quantised

_MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_OPTIONAL = ("g_idx", "weight_shape", "input_scale", "input_zero_point")
"""Optional parameters of a layer in a checkpoint. The first two are redundant."""
_INSTEAD = "give the model in another format, or in bfloat16"


def _unserved(why: str, instead: str = _INSTEAD) -> ConfigError:
    return ConfigError(f"--enable-fluxion cannot serve this checkpoint on a CPU, because {why}; {instead}.")


class _Gptq(GPTQLinearScheme):
    requires_weight_loader_v2 = True
    across_outputs = True

    def _init_kernel(self, quant_config: Any) -> Any:
        quant_config.desc_act = False  # also with static groups: SGLang would give each rank the scales of all ranks
        return SimpleNamespace()

    @property
    def bits(self) -> int:
        return int(self.quant_config.weight_bits)

    @property
    def group(self) -> int:
        return int(self.quant_config.group_size)

    def quantised(self, layer: Any) -> Quantised:
        if self.group != -1:
            groups = layer.g_idx - layer.g_idx[0]
            if not torch.equal(groups, torch.arange(len(groups), dtype=torch.int32) // self.group):
                raise _unserved("it orders inputs by activation (g_idx), so that a group is scattered over the inputs")
        return checkpoints.gptq(layer.qweight, layer.qzeros, layer.scales, self.bits, self.use_v2_format)


class _Awq(AWQLinearScheme):
    requires_weight_loader_v2 = True
    across_outputs, bits = True, 4

    def _init_kernel(self, quant_config: Any) -> Any:
        return None

    @property
    def group(self) -> int:
        return int(self.quant_config.group_size)

    def create_weights(self, layer: Any, input_size: int, **kwargs: Any) -> None:
        if self.group == -1:  # one group of all inputs, whose number SGLang does not know here
            whole = AWQConfig(self.bits, input_size, self.quant_config.zero_point)
            _Awq(whole).create_weights(layer=layer, input_size=input_size, **kwargs)
        else:
            super().create_weights(layer=layer, input_size=input_size, **kwargs)

    def quantised(self, layer: Any) -> Quantised:
        return checkpoints.awq(layer.qweight, layer.qzeros, layer.scales)


class _PackQuantised(CompressedTensorsWNA16):
    requires_weight_loader_v2 = True

    def __init__(self, weights: Any) -> None:
        super().__init__(weights.strategy, weights.num_bits, weights.group_size, weights.symmetric)
        self.bits, self.group, self.across_outputs = weights.num_bits, self.group_size, not weights.symmetric

    def quantised(self, layer: Any) -> Quantised:
        zeros = None if self.symmetric else layer.weight_zero_point
        return checkpoints.pack_quantised(layer.weight_packed, layer.weight_scale, zeros, self.bits)


class _Unused(BasevLLMParameter):
    """A parameter of a checkpoint that is ignored."""

    def _load(self, *_: Any, **__: Any) -> None:
        pass

    load_column_parallel_weight = load_row_parallel_weight = load_merged_column_weight = load_qkv_weight = _load


class _IntQuantised(CompressedTensorsW8A8Int8):
    requires_weight_loader_v2 = True
    across_outputs, bits, group = False, 8, -1

    def __init__(self, strategy: str) -> None:
        super().__init__(strategy, is_static_input_scheme=False, input_symmetric=True)

    def create_weights(self, layer: Any, weight_loader: Any, **kwargs: Any) -> None:
        super().create_weights(layer=layer, weight_loader=weight_loader, **kwargs)
        for name in ("input_scale", "input_zero_point"):  # of static activations
            layer.register_parameter(name, _Unused(torch.empty(1), weight_loader=weight_loader))

    def quantised(self, layer: Any) -> Quantised:
        scales = layer.weight_scale.data
        if scales.dim() == 1:  # one scale for each merged layer
            scales = scales.repeat_interleave(torch.tensor(layer.logical_widths)).unsqueeze(1)
        return checkpoints.int_quantised(layer.weight, scales)


def _fitting(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `load` to count loads of a parameter, and to refuse wrong shapes with a sentence (SGLang only asserts)."""

    def loading(parameter: Any, loaded: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        parameter.loads = _loads(parameter) + 1
        try:
            return load(parameter, loaded, *args, **kwargs)
        except (AssertionError, RuntimeError, IndexError):
            raise _unserved(
                f"it has a tensor of {' x '.join(map(str, loaded.shape)) or 'one number'} for a layer that, by its "
                f"configuration, has {' x '.join(map(str, parameter.shape))} there"
            ) from None

    return loading


def _loads(parameter: Any) -> int:
    return getattr(parameter, "loads", 0)


class CheckpointMethod(QuantisedMethod):
    """Loads the packed weight of a checkpoint, and repacks it for our kernels; again at each update of weights.

    Args:
        scheme: a subclass of SGLang's scheme. It makes the parameters, and `quantised` unpacks them.
    """

    def __init__(self, scheme: Any) -> None:
        self.scheme = scheme
        self._names: list[str] = []

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Make parameters for the packed weight, with float32 scales: SGLang would round float16 to bfloat16."""
        names = ("input_size_per_partition", "output_partition_sizes", "input_size", "output_size", "params_dtype")
        given = dict(zip(names, args, strict=False)) | kwargs
        self._check(layer, **given)
        loads = {name: _fitting(given[name]) for name in given if name == "weight_loader"}
        self._given = given | {"params_dtype": torch.float32} | loads
        self._make(layer)

    def _make(self, layer: nn.Module) -> None:
        self._drop(layer)
        before = set(dict(layer.named_parameters(recurse=False)))
        self.scheme.create_weights(layer=layer, **self._given)
        self._names = [name for name, _ in layer.named_parameters(recurse=False) if name not in before]
        for name in self._names:  # NaN marks parameters that the checkpoint lacks
            if (parameter := getattr(layer, name)).is_floating_point():
                parameter.data.fill_(torch.nan)

    def _check(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        **_: Any,
    ) -> None:
        """Refuse layers that split a group or a packed word. Raises ConfigError."""
        scheme, inputs, word = self.scheme, input_size_per_partition, 32 // self.scheme.bits
        ranks = max(input_size // inputs, output_size // sum(output_partition_sizes))
        group = BLOCK if scheme.group == -1 else scheme.group
        if scheme.group == -1 and isinstance(scheme, _Awq):  # SGLang would shard its scales
            group = input_size
        if inputs % group:
            why = f"a layer of {input_size} inputs has {inputs} on each of {ranks} ranks, not whole groups of {group}"
        elif not scheme.across_outputs:
            return
        elif isinstance(layer, ParallelLMHead) and output_size != layer.org_vocab_size:
            why = f"SGLang pads its quantised head from {layer.org_vocab_size} to {output_size} outputs"
        elif any(size % word for size in output_partition_sizes):
            sizes = " and ".join(map(str, output_partition_sizes))
            why = f"a layer has {sizes} outputs on each of {ranks} ranks, and {word} of them share a packed word"
        else:
            return
        raise _unserved(why, f"use a smaller --tp-size than {ranks}" if ranks > 1 else _INSTEAD)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if not all(hasattr(layer, name) for name in self._names):
            return  # no load since the last call
        (scales,) = (getattr(layer, name) for name in self._names if name in ("scales", "weight_scale"))
        if not (scales.isnan().all() and parts_of(layer)):  # else only other layers were updated
            if not scales.isfinite().all():
                raise _unserved(
                    "a layer that its configuration says is quantised lacks scales or has some that are not finite"
                )
            for name in self._names:
                if name not in _OPTIONAL and _loads(getattr(layer, name)) != _loads(scales):
                    raise _unserved(f"a layer that its configuration says is quantised lacks its {name}")
            hold(layer, [self.scheme.quantised(layer)])
        self._drop(layer)

    def _drop(self, layer: nn.Module) -> None:
        for name in self._names:
            if hasattr(layer, name):
                delattr(layer, name)

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        self._make(layer)


class _OnCpu(OnCpu):
    def get_quant_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer. For a merged layer it is looked up by the names of its parts, which the checkpoint
        uses. Raises ConfigError if the parts are quantised in different ways."""
        if isinstance(layer, FusedMoE):
            raise _unserved("quantised experts have no kernels yet")
        before, _, last = prefix.rpartition(".")
        parts = [self._method(layer, f"{before}.{part}") for part in _MERGED.get(last, ())]
        if len({_kind(part) for part in parts}) > 1:
            raise _unserved(f"it quantises the parts of {prefix} in different ways")
        try:
            method = self._method(layer, prefix)
        except ValueError:  # compressed-tensors does not know the merged name
            if not parts:
                raise
            method = parts[0]
        if parts and isinstance(method, CheckpointMethod):
            method = parts[0]
        if isinstance(layer, LinearBase | ParallelLMHead):
            layer.scheme = method.scheme if isinstance(method, CheckpointMethod) else None
        return method

    def _method(self, layer: Any, name: str) -> QuantizeMethodBase | None:
        method: QuantizeMethodBase | None = super().get_quant_method(layer, name)  # type: ignore[misc]
        if isinstance(method, GPTQLinearMethod):
            return CheckpointMethod(_Gptq(method.quant_config))
        if isinstance(method, AWQLinearMethod):
            return CheckpointMethod(_Awq(method.quant_config))
        if isinstance(method, CompressedTensorsLinearMethod):
            return CheckpointMethod(layer.scheme)
        head = isinstance(layer, ParallelLMHead) and isinstance(method, UnquantizedLinearMethod)
        return UnquantizedEmbeddingMethod() if head else method


def _kind(method: QuantizeMethodBase | None) -> Any:
    """The properties that methods of parts of one layer must share."""
    if not isinstance(method, CheckpointMethod):
        return None
    return type(method.scheme), method.scheme.bits, method.scheme.group, method.scheme.across_outputs


class _GptqConfig(_OnCpu, GPTQConfig):
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        form = config.get("checkpoint_format") or config.get("format", "")  # SGLang reads only the first key
        return super().from_config({"desc_act": False} | config | {"checkpoint_format": form})


class _AwqConfig(_OnCpu, AWQConfig):
    pass


class _AutoRoundConfig(_OnCpu, AutoRoundConfig):
    pass


class _CompressedTensorsConfig(_OnCpu, CompressedTensorsConfig):
    def _check_scheme_supported(self, min_capability: int, error: bool = True) -> bool:
        return True

    def _get_scheme_from_parts(self, weight_quant: Any, input_quant: Any, format: str | None = None) -> Any:
        if (format or self.quant_format) == "pack-quantized":
            return _PackQuantised(weight_quant)
        return _IntQuantised(weight_quant.strategy)


CONFIGS = {
    "gptq": _GptqConfig,
    "awq": _AwqConfig,
    "auto-round": _AutoRoundConfig,
    "compressed-tensors": _CompressedTensorsConfig,
    "mxfp4": Mxfp4CpuConfig,
}
"""The configurations by the names in `served_formats.NAMES`."""


def register() -> None:
    """Register these configurations with SGLang, if the platform is ours."""
    if isinstance(current_platform, PortableCpuPlatform):
        QUANTIZATION_METHODS.update(CONFIGS)
