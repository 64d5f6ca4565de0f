"""`--quantization fluxion-int8`: linear layers whose weights are rounded to 8 bits when they are loaded.

A decode step reads every weight, so it takes half as long as in bfloat16 where weights are most of what it reads. 64
inputs of an output share a scale, which rounds a weight by 0.6% (root mean square). Of the layer that makes logits,
which may be the embedding as well, there is a rounded copy. Experts and layers whose inputs are no multiple of 64 stay
as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from torch import nn
from torch.nn import functional as F

from fluxion_sglang.sglang.compat import INT8_WEIGHTS as NAME

GROUP = 64
"""Inputs of an output that share a scale (`csrc/kernels/table.h`, kInt8Group)."""
_SLICE = 16 << 20
"""Weights that are widened at a time, to be multiplied with many rows of x."""


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [outputs, in] in 8 bits: integers [outputs, in] int8, scales [outputs, in / 64] bfloat16.

    A scale is the smallest bfloat16 by which the largest of its weights becomes at most 127.

    Raises:
        ValueError: a weight is not finite.
    """
    parts = [_rounded(weight[rows]) for rows in _slices(weight)]
    integers, scales = (torch.cat(kind) for kind in zip(*parts, strict=True))
    return integers, scales


def _slices(weight: torch.Tensor) -> list[slice]:
    """Rows of a weight, some at a time: what is computed of them in float32 is large."""
    count = max(_SLICE // weight.shape[1], 1)
    return [slice(first, first + count) for first in range(0, max(len(weight), 1), count)]


def _rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.float().unflatten(1, (-1, GROUP))
    least = groups.abs().amax(-1) / 127
    if not bool(least.isfinite().all()):
        raise ValueError(f"some weights are not finite, and --quantization {NAME} cannot round them; leave it out.")
    scales = least.to(torch.bfloat16)
    scales = torch.where(scales.float() < least, torch.nextafter(scales, torch.full_like(scales, torch.inf)), scales)
    unit = scales.float().clamp(min=torch.finfo(torch.bfloat16).tiny).unsqueeze(-1)
    integers = (groups / unit).round().clamp(-127, 127).to(torch.int8)
    return integers.flatten(1), scales


def register() -> None:
    """Tell SGLang what the name means."""
    QUANTIZATION_METHODS[NAME] = Int8Config


class Int8Config(QuantizationConfig):
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
    def from_config(cls, config: dict[str, Any]) -> Int8Config:
        return cls()

    def get_scaled_act_names(self) -> list[str]:
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return Int8LinearMethod() if isinstance(layer, LinearBase) else None


class Int8LinearMethod(UnquantizedLinearMethod):
    """Loads a weight as it is in the checkpoint and rounds it when all are loaded, at each update of weights again.

    Attributes:
        native: what multiplies few rows and widens weights (`layers.install`); None: PyTorch does.
    """

    native: Any = None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        if weight.dtype is torch.int8 or weight.shape[1] % GROUP:
            return
        integers, scales = rounded(weight.data)
        layer.weight = nn.Parameter(integers, requires_grad=False)
        layer.weight.loaded = weight.dtype, dict(vars(weight))  # type: ignore[attr-defined]
        layer.weight.weight_loader = _refuse  # type: ignore[attr-defined]
        layer.weight_scale = nn.Parameter(scales, requires_grad=False)

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        weight, scales = layer.weight, getattr(layer, "weight_scale", None)
        if not isinstance(weight, nn.Parameter) or not isinstance(scales, nn.Parameter):
            return
        dtype, attributes = weight.loaded  # type: ignore[attr-defined]
        wide = torch.cat([rows.clone() for rows in self._wide(weight.data, scales.data, dtype)])
        layer.weight = nn.Parameter(wide, requires_grad=False)
        vars(layer.weight).update(attributes)
        del layer.weight_scale

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight, scales = layer.weight, getattr(layer, "weight_scale", None)
        assert isinstance(weight, torch.Tensor)
        if scales is None:  # its inputs are no multiple of a group, or it waits for other weights
            return F.linear(x, weight, bias)
        if self.native is not None and (out := self.native(x, weight, scales, bias)) is not None:
            found: torch.Tensor = out
            return found
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], len(weight))
        parts = [F.linear(x, rows) for rows in self._wide(weight, scales, x.dtype)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return whole if bias is None else whole + bias

    def _wide(self, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The weight's rows times their scales, some at a time; each until the next."""
        for rows in _slices(weight):
            integers, units = weight[rows], scales[rows]
            if self.native is not None:
                yield self.native.wide(integers, units, dtype)
            else:
                yield (integers.unflatten(1, (-1, GROUP)) * units.float().unsqueeze(-1)).flatten(1).to(dtype)


class Int8HeadMethod(UnquantizedEmbeddingMethod):
    """Multiplies few rows by a rounded copy of the weight, and keeps the copy as new as the weight.

    Args:
        native: multiplies, as of `Int8LinearMethod`.
    """

    def __init__(self, native: Any) -> None:
        super().__init__()
        self._native = native

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        integers, scales = rounded(weight.data)
        layer.rounded = nn.Parameter(integers, requires_grad=False)
        layer.rounded_scale = nn.Parameter(scales, requires_grad=False)
        load = getattr(weight, "weight_loader", None)
        if load is not None and not isinstance(load, _Loads):
            weight.weight_loader = _Loads(layer, load)  # type: ignore[attr-defined]

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert isinstance(layer.weight, torch.Tensor)
        x = x.to(layer.weight.dtype)
        copy = getattr(layer, "rounded", None)
        out = None if copy is None else self._native(x, copy, layer.rounded_scale, bias)
        found: torch.Tensor = super().apply(layer, x, bias) if out is None else out
        return found


class _Loads:
    """Loads a weight of which there is a rounded copy, which goes until all weights are loaded."""

    def __init__(self, layer: nn.Module, load: Any) -> None:
        self._layer, self._load = layer, load

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self._layer, "rounded"):
            del self._layer.rounded, self._layer.rounded_scale
        return self._load(*args, **kwargs)


def _refuse(*_: Any, **__: Any) -> None:
    raise ValueError(
        f"the weights are rounded to 8 bits (--quantization {NAME}); begin the update of weights before new ones are "
        "loaded (SGLang's begin_weight_update), and end it after."
    )
