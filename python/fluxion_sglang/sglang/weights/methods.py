"""Layers whose weights are integers of 8 or 4 bits.

A layer holds one packed weight, or several where the checkpoint quantised parts of it in different ways (such as the
values of a layer that makes queries, keys and values). `layers.install` gives its method the native kernels; without
them PyTorch computes, a slice of the weight in the model's dtype at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from torch import nn
from torch.nn import functional as F

from fluxion_sglang.weights.quantised import PANEL, Format, Quantised, pack, slices, unpack


@dataclass(frozen=True)
class Part:
    """Some outputs of a layer, those after its other parts' outputs.

    Attributes:
        packed: as of `pack`; a parameter of the layer. outputs, inputs: its size. format: how it is packed.
    """

    packed: torch.Tensor
    outputs: int
    inputs: int
    format: Format

    def panels(self, rows: slice) -> torch.Tensor:
        """The panels of some rows, which begin with a panel's first."""
        return self.packed[rows.start // PANEL : -(-rows.stop // PANEL)]

    def wide(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """These rows of the weight, in this dtype."""
        return unpack(self.panels(rows), self.format, rows.stop - rows.start, self.inputs).wide().to(dtype)


class Native(Protocol):
    """What `layers.install` gives a method."""

    def __call__(self, x: torch.Tensor, parts: Sequence[Part], bias: torch.Tensor | None) -> torch.Tensor | None:
        """x weight^T + bias, or None where that is PyTorch's to compute."""

    def wide(self, part: Part, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """As of `Part.wide`, until the next call."""


def hold(layer: nn.Module, weights: Iterable[Quantised], name: str = "packed") -> None:
    """Give a layer weights, the outputs of one after those of another, packed as they come.

    Those of one format become one parameter: `name`, the next one that with a 1 behind it, and so on.

    Raises:
        ValueError: a scale has no float16.
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
        pieces[-1].append(pack(weight))
    for (key, *_), packed in zip(shapes, pieces, strict=True):
        setattr(layer, key, nn.Parameter(torch.cat(packed) if len(packed) > 1 else packed[0], requires_grad=False))
    layer.quantised = tuple(shapes)  # type: ignore[assignment]


def parts_of(layer: nn.Module) -> list[Part]:
    """The weights that a layer holds; none if it has not been given any."""
    found: Any = getattr(layer, "quantised", ())
    return [Part(getattr(layer, name), outputs, inputs, form) for name, outputs, inputs, form in found]


def drop(layer: nn.Module) -> None:
    """Take a layer's weights away."""
    for name, *_ in getattr(layer, "quantised", ()):
        delattr(layer, name)
    layer.quantised = ()  # type: ignore[assignment]


class QuantisedMethod(LinearMethodBase):
    """Computes layers that hold quantised weights. What loads them is a subclass's.

    Attributes:
        native: the kernels; None: PyTorch computes.
    """

    native: Native | None = None

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        parts = parts_of(layer)
        if not parts:  # it waits for weights, or cannot be quantised
            assert isinstance(layer.weight, torch.Tensor)
            return F.linear(x, layer.weight, bias)
        return product(self.native, x, parts, bias)


def product(native: Native | None, x: torch.Tensor, parts: Sequence[Part], bias: torch.Tensor | None) -> torch.Tensor:
    """x weight^T + bias of the weights' parts."""
    if native is not None and (out := native(x, parts, bias)) is not None:
        return out
    if x.numel() == 0:
        return x.new_empty(*x.shape[:-1], sum(part.outputs for part in parts))
    rows = [F.linear(x, wide) for part in parts for wide in wide_slices(native, part, x.dtype)]
    whole = rows[0] if len(rows) == 1 else torch.cat(rows, -1)
    return whole if bias is None else whole + bias


def wide_slices(native: Native | None, part: Part, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The weight's rows in this dtype, some at a time; each until the next."""
    for rows in slices(part.outputs, part.inputs):
        yield part.wide(rows, dtype) if native is None else native.wide(part, rows, dtype)
