"""`--quantization fluxion-int8`: linear layers and experts whose weights are rounded to 8 bits when they are loaded.

A decode step reads every weight, so it takes half as long as in bfloat16 where weights are most of what it reads. 32
inputs of an output share a scale, which rounds a weight by 0.54% (root mean square). Of the layer that makes logits,
which may be the embedding as well, there is a rounded copy. Layers whose inputs are no multiple of 32 stay as they are,
and so do experts that the kernels do not compute (`computes_experts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from torch import nn

from fluxion_sglang.config import ConfigError
from fluxion_sglang.sglang.compat import INT8_WEIGHTS as NAME
from fluxion_sglang.sglang.weights.methods import (
    Native,
    Part,
    QuantisedMethod,
    computes_experts,
    drop,
    hold,
    packed,
    parts_of,
    wide_slices,
)
from fluxion_sglang.weights.quantised import BLOCK, Format, Quantised, slices

FORMAT = Format(8, BLOCK, minima=False)


def rounded(weight: torch.Tensor) -> Quantised:
    """A weight [outputs, inputs] in 8 bits. A scale is the smallest float16 by which its largest weight is at most 127.

    Raises:
        ConfigError: a weight is not finite.
    """
    groups = weight.float().unflatten(1, (-1, FORMAT.group))
    least = groups.abs().amax(-1) / 127
    if not bool(least.isfinite().all()):
        raise ConfigError(
            f"--enable-fluxion cannot round these weights (--quantization {NAME}), because some are not finite; leave "
            "that option out, or give another checkpoint of the model."
        )
    nearest = least.to(torch.float16)
    above = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
    scales = torch.where(nearest.float() < least, above, nearest).float()
    unit = scales.clamp(min=torch.finfo(torch.float16).smallest_normal * 2.0**-10).unsqueeze(-1)
    integers = (groups / unit).round().clamp(-127, 127).to(torch.int8)
    return Quantised(integers.flatten(1), scales, None, FORMAT)


def _parts(weight: torch.Tensor) -> Iterator[Quantised]:
    """A weight rounded some rows at a time: what is computed of them in float32 is large."""
    return (rounded(weight[rows]) for rows in slices(*weight.shape))


def register() -> None:
    """Tell SGLang what the name means."""
    QUANTIZATION_METHODS[NAME] = RoundingConfig


class RoundingConfig(QuantizationConfig):
    """What SGLang asks about the name."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RoundingConfig:
        return cls()

    def get_scaled_act_names(self) -> list[str]:
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, FusedMoE):
            return RoundingExpertsMethod(layer.use_triton_kernels)
        return RoundingMethod() if isinstance(layer, LinearBase) else None


class RoundingMethod(QuantisedMethod, UnquantizedLinearMethod):
    """Loads a weight as it is in the checkpoint and rounds it when all are loaded, at each update of weights again."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        if parts_of(layer) or weight.shape[1] % FORMAT.group:
            return
        hold(layer, _parts(weight.data), "weight")
        _remember(layer.weight, weight)

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        if not (parts := parts_of(layer)):
            return
        held: Any = layer.weight
        dtype, _, attributes = held.loaded
        wide = torch.cat([rows.clone() for part in parts for rows in wide_slices(self.native, part, dtype)])
        drop(layer)
        layer.weight = nn.Parameter(wide, requires_grad=False)
        vars(layer.weight).update(attributes)


class RoundingExpertsMethod(UnquantizedFusedMoEMethod):
    """The same of experts, whose weights are then uint8 [experts, panels, bytes], each expert packed alone.

    Attributes:
        native: the kernels; None: PyTorch computes.
    """

    native: Native | None = None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        super().process_weights_after_loading(layer)
        if is_rounded(layer) or not computes_experts(layer) or any(w.shape[2] % FORMAT.group for w in _weights(layer)):
            return
        weights = _weights(layer)
        rounds = [torch.stack([packed(rounded(expert)) for expert in weight.data]) for weight in weights]
        for name, weight, experts in zip(_EXPERTS, weights, rounds, strict=True):  # both, or neither
            setattr(layer, name, nn.Parameter(experts, requires_grad=False))
            _remember(getattr(layer, name), weight)

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        if is_rounded(layer):
            for name, held in zip(_EXPERTS, _weights(layer), strict=True):
                dtype, shape, attributes = held.loaded
                experts, wide = _WideExperts(held, self.native, dtype), torch.empty(shape, dtype=dtype)
                for expert, into in enumerate(wide):
                    into.copy_(experts[expert])
                setattr(layer, name, nn.Parameter(wide, requires_grad=False))
                vars(getattr(layer, name)).update(attributes)
        super().restore_weights_before_loading(layer)

    def forward_cpu(self, layer: nn.Module, dispatch_output: StandardDispatchOutput) -> StandardCombineInput:
        if is_rounded(layer):
            layer = _WithWideExperts(layer, self.native, dispatch_output.hidden_states.dtype)  # type: ignore[assignment]
        found: StandardCombineInput = super().forward_cpu(layer, dispatch_output)
        return found

    forward_native = forward_cpu


_EXPERTS = ("w13_weight", "w2_weight")


def _weights(layer: nn.Module) -> tuple[Any, Any]:
    return layer.w13_weight, layer.w2_weight


def is_rounded(layer: nn.Module) -> bool:
    """Whether the weights of these experts are rounded now."""
    return layer.w13_weight.dtype is torch.uint8


class _WideExperts:
    """The weights of experts in a dtype, each when it is asked for."""

    def __init__(self, packed: Any, native: Native | None, dtype: torch.dtype) -> None:
        self._packed, self._native, self._dtype = packed, native, dtype

    def __getitem__(self, expert: int) -> torch.Tensor:
        _, (_, outputs, inputs), _ = self._packed.loaded
        part = Part(self._packed[expert], outputs, inputs, FORMAT)
        return torch.cat([rows.clone() for rows in wide_slices(self._native, part, self._dtype)])


class _WithWideExperts:
    """A layer whose experts SGLang's method may take one by one."""

    def __init__(self, layer: nn.Module, native: Native | None, dtype: torch.dtype) -> None:
        self._layer = layer
        self.w13_weight, self.w2_weight = (_WideExperts(packed, native, dtype) for packed in _weights(layer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class RoundedHeadMethod(UnquantizedEmbeddingMethod):
    """Multiplies few rows by a rounded copy of the weight, and keeps the copy as new as the weight.

    Args:
        native: the kernels.
    """

    def __init__(self, native: Native) -> None:
        super().__init__()
        self._native = native

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        hold(layer, _parts(weight.data))
        load = getattr(weight, "weight_loader", None)
        if load is not None and not isinstance(load, _Loads):
            weight.weight_loader = _Loads(layer, load)  # type: ignore[attr-defined]

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert isinstance(layer.weight, torch.Tensor)
        x = x.to(layer.weight.dtype)
        parts = parts_of(layer)
        out = self._native(x, parts, bias) if parts else None
        found: torch.Tensor = super().apply(layer, x, bias) if out is None else out
        return found


class _Loads:
    """Loads a weight of which there is a rounded copy, which goes until all weights are loaded."""

    def __init__(self, layer: nn.Module, load: Any) -> None:
        self._layer, self._load = layer, load

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        drop(self._layer)
        return self._load(*args, **kwargs)


def _remember(packed: Any, weight: nn.Parameter) -> None:
    """What a rounded weight was, until it is loaded anew."""
    packed.loaded = weight.dtype, tuple(weight.shape), dict(vars(weight))
    packed.weight_loader = _refuse


def _refuse(*_: Any, **__: Any) -> None:
    raise ValueError(
        f"the weights are rounded to 8 bits (--quantization {NAME}); begin the update of weights before new ones are "
        "loaded (SGLang's begin_weight_update), and end it after."
    )
