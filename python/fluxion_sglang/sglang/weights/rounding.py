"""`--quantization fluxion-int8`: linear layers and experts whose weights are rounded to 8 bits after loading.

A decode step reads every weight, and here half as many bytes as in bfloat16. 32 inputs of an output share a scale,
which rounds a weight by 0.54% (root mean square). The layer that makes logits, possibly the embedding, gets a rounded
copy. Layers whose inputs are no multiple of 32, and experts that the kernels cannot compute (`computes_experts`), keep
the checkpoint's weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from torch import nn

from fluxion_sglang.config import ConfigError
from fluxion_sglang.sglang.compat import INT8_WEIGHTS as NAME
from fluxion_sglang.sglang.weights.experts import (
    WEIGHTS,
    PackedExpertsMethod,
    WideExperts,
    computes_experts,
    formats_of,
    hold_experts,
)
from fluxion_sglang.sglang.weights.methods import (
    Native,
    PlainConfig,
    QuantisedMethod,
    drop,
    hold,
    packed,
    parts_of,
    wide_slices,
)
from fluxion_sglang.weights.quantised import BLOCK, Format, Quantised, slices

FORMAT = Format(8, BLOCK, minima=False)


def rounded(weight: torch.Tensor) -> Quantised:
    """A weight [outputs, inputs] in 8 bits. A scale is the smallest float16 that makes the largest integer at most 127.

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
    """A weight, rounded some rows at a time to bound the temporary memory in float32."""
    return (rounded(weight[rows]) for rows in slices(*weight.shape))


def register() -> None:
    """Register the name with SGLang."""
    QUANTIZATION_METHODS[NAME] = RoundingConfig


class RoundingConfig(PlainConfig):
    """SGLang's configuration class of the name."""

    def get_name(self) -> str:
        return NAME

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, FusedMoE):
            return RoundingExpertsMethod(layer.use_triton_kernels)
        return RoundingMethod() if isinstance(layer, LinearBase) else None


class RoundingMethod(QuantisedMethod, UnquantizedLinearMethod):
    """Rounds the weight of a linear layer when all weights are loaded; again at each update of weights."""

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


class RoundingExpertsMethod(PackedExpertsMethod):
    """Rounds the weights of experts in the same way."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        super().process_weights_after_loading(layer)
        weights: Any = {name: getattr(layer, name) for name in WEIGHTS}
        whole = all(weight.shape[2] % FORMAT.group == 0 for weight in weights.values())
        if formats_of(layer) or not whole or not computes_experts(layer):
            return
        # Pack both before either is set: an error must leave the layer unchanged.
        both = [torch.stack([packed(rounded(expert)) for expert in weight.data]) for weight in weights.values()]
        for (name, weight), experts in zip(weights.items(), both, strict=True):
            _remember(hold_experts(layer, name, experts, weight.shape[1:], FORMAT), weight)

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        if formats_of(layer):
            for name in WEIGHTS:
                held: Any = getattr(layer, name)
                dtype, shape, attributes = held.loaded
                experts, wide = WideExperts(held, self.native, dtype), torch.empty(shape, dtype=dtype)
                for expert, into in enumerate(wide):
                    into.copy_(experts[expert])
                setattr(layer, name, nn.Parameter(wide, requires_grad=False))
                vars(getattr(layer, name)).update(attributes)
        super().restore_weights_before_loading(layer)


class RoundedHeadMethod(UnquantizedEmbeddingMethod):
    """Multiplies few rows by a rounded copy of the weight, and renews the copy when the weight is loaded.

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
    """Loads a weight that has a rounded copy. The copy is dropped until all weights are loaded."""

    def __init__(self, layer: nn.Module, load: Any) -> None:
        self._layer, self._load = layer, load

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        drop(self._layer)
        return self._load(*args, **kwargs)


def _remember(packed: Any, weight: nn.Parameter) -> None:
    """Store on a rounded weight what `restore_weights_before_loading` needs."""
    packed.loaded = weight.dtype, tuple(weight.shape), dict(vars(weight))
    packed.weight_loader = _refuse


def _refuse(*_: Any, **__: Any) -> None:
    raise ValueError(
        f"the weights are rounded to 8 bits (--quantization {NAME}); begin the update of weights before new ones are "
        "loaded (SGLang's begin_weight_update), and end it after."
    )
