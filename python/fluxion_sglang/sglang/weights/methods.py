"""Layers with 8-bit or 4-bit integer weights.

A layer holds one packed weight, or several if a GGUF file has its parts in different types (such as the values in
`qkv_proj`). `layers.install` gives the layer's method the native kernels. Without them PyTorch computes with one slice
of the weight at a time, in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from torch import nn
from torch.nn import functional as F

from fluxion_sglang.config import ConfigError
from fluxion_sglang.weights.quantised import PANEL, Format, Quantised, pack, slices, unpack


@dataclass(frozen=True)
class Part:
    """The packed weight of consecutive outputs of a layer; its parts are concatenated along the outputs.

    Attributes:
        packed: the result of `pack`, a parameter of the layer. outputs, inputs: its size. format: of the weight.
    """

    packed: torch.Tensor
    outputs: int
    inputs: int
    format: Format

    def panels(self, rows: slice) -> torch.Tensor:
        """The panels of some rows, which begin on a panel."""
        return self.packed[rows.start // PANEL : -(-rows.stop // PANEL)]

    def wide(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """These rows of the weight, in this dtype."""
        return unpack(self.panels(rows), self.format, rows.stop - rows.start, self.inputs).wide().to(dtype)


class Native(Protocol):
    """The native kernels, which `layers.install` gives to a method."""

    def __call__(self, x: torch.Tensor, parts: Sequence[Part], bias: torch.Tensor | None) -> torch.Tensor | None:
        """x weight^T + bias, or None if PyTorch must compute it."""

    def wide(self, part: Part, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """The same as `Part.wide`. The next call overwrites the result."""


def packed(weight: Quantised) -> torch.Tensor:
    """The result of `pack`. Raises ConfigError with one sentence if a scale does not fit into float16."""
    try:
        return pack(weight)
    except ValueError as error:
        raise ConfigError(
            f"--enable-fluxion cannot serve these weights on a CPU, because {str(error).rstrip('.')}; give another "
            "checkpoint of the model, or one in bfloat16."
        ) from None


def hold(layer: nn.Module, weights: Iterable[Quantised], name: str = "packed") -> None:
    """Pack weights and set them on a layer. Their outputs are the layer's outputs, in this order.

    Adjacent weights of one format become one parameter. Parameters are called `name`, `name`1, `name`2 and so on.

    Raises:
        ConfigError: a scale is not finite as float16.
    """
    pieces: list[list[torch.Tensor]] = []
    shapes: list[tuple[str, int, int, Format]] = []
    for weight in weights:
        outputs, inputs = weight.integers.shape
        if shapes and shapes[-1][2:] == (inputs, weight.format) and shapes[-1][1] % PANEL == 0:
            key, before, *_ = shapes[-1]
            shapes[-1] = (key, before + outputs, inputs, weight.format)
        else:
            shapes.append((f"{name}{len(shapes) or ''}", outputs, inputs, weight.format))
            pieces.append([])
        pieces[-1].append(packed(weight))
    for (key, *_), each in zip(shapes, pieces, strict=True):
        setattr(layer, key, nn.Parameter(torch.cat(each) if len(each) > 1 else each[0], requires_grad=False))
    layer.quantised = tuple(shapes)  # type: ignore[assignment]


def parts_of(layer: nn.Module) -> list[Part]:
    """The weights that `hold` has set on a layer."""
    found: Any = getattr(layer, "quantised", ())
    return [Part(getattr(layer, name), outputs, inputs, form) for name, outputs, inputs, form in found]


def drop(layer: nn.Module) -> None:
    """Remove a layer's packed weights."""
    for name, *_ in getattr(layer, "quantised", ()):
        delattr(layer, name)
    layer.quantised = ()  # type: ignore[assignment]


class OnCpu:
    """Answers of SGLang's format interface for the CPU."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    def get_scaled_act_names(self) -> list[str]:
        return []


class PlainConfig(OnCpu, QuantizationConfig):
    """The configuration of a format without options. Subclasses define its name and the methods of layers."""

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls()


class QuantisedMethod(LinearMethodBase):
    """Computes layers that hold quantised weights. Subclasses load them.

    Attributes:
        native: the kernels; None: PyTorch computes.
    """

    native: Native | None = None

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        parts = parts_of(layer)
        if not parts:  # weights are not loaded yet, or cannot be quantised
            assert isinstance(layer.weight, torch.Tensor)
            return F.linear(x, layer.weight, bias)
        return product(self.native, x, parts, bias)


def product(native: Native | None, x: torch.Tensor, parts: Sequence[Part], bias: torch.Tensor | None) -> torch.Tensor:
    """x weight^T + bias for a weight in parts."""
    if native is not None and (out := native(x, parts, bias)) is not None:
        return out
    if x.numel() == 0:
        return x.new_empty(*x.shape[:-1], sum(part.outputs for part in parts))
    dtype = multiplied_in(x.dtype)
    return multiply(x, (wide for part in parts for wide in wide_slices(native, part, dtype)), bias)


def multiplied_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which PyTorch multiplies many rows of this dtype. On a CPU without bfloat16 kernels in oneDNN
    (AVX2), PyTorch multiplies bfloat16 at a fifth of the speed of float32."""
    return torch.float32 if dtype is torch.bfloat16 and SLOW_BFLOAT16 else dtype


SLOW_BFLOAT16: Final = not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def multiply(x: torch.Tensor, weights: Iterable[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
    """x weight^T + bias in the dtype of x. The weight comes as consecutive slices of rows, in the dtype of
    `multiplied_in`."""
    wide = x.to(multiplied_in(x.dtype))
    columns = [F.linear(wide, rows).to(x.dtype) for rows in weights]
    whole = columns[0] if len(columns) == 1 else torch.cat(columns, -1)
    return whole if bias is None else whole + bias


def wide_slices(native: Native | None, part: Part, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The weight's rows in this dtype, one slice at a time. The next slice may overwrite the previous one."""
    for rows in slices(part.outputs, part.inputs):
        yield part.wide(rows, dtype) if native is None else native.wide(part, rows, dtype)
