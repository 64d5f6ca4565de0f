"""Attention in replays of step graphs: in a native program, or layer by layer if a step is observed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fluxion_sglang.executor.host import HostDevice
from fluxion_sglang.executor.variant import PLAIN, Variant
from fluxion_sglang.native import NativeProgram
from fluxion_sglang.sglang.start import served_models

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention


class Replays:
    """`graphs.Attention` on the CPU.

    Args:
        index: index of a layer in this process's pool.
    """

    def __init__(self, device: HostDevice, index: Callable[[RadixAttention], int]) -> None:
        self._device, self._index = device, index
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # copies of sinks, with the model's tensors

    def add(self, program: NativeProgram, key: Any, arguments: Sequence[Any], out: torch.Tensor) -> Callable[[], None]:
        layer: RadixAttention = key
        q, k, v, sinks = arguments
        variant = variant_of(layer, sinks)
        if variant.sinks is not None:
            self._copies.append((variant.sinks, sinks))
        at = self._device.layer(self._index(layer), q, k, v, layer.scaling, variant, out.view(q.shape))
        self._device.add(program, at)
        return lambda: self._device.attend(at)

    def begin(self) -> bool:
        for copy, sinks in self._copies:  # the model may have changed them
            copy.copy_(sinks)
        return self._device.plan_step()

    def end(self) -> None:
        self._device.planned()


def variant_of(layer: RadixAttention, sinks: torch.Tensor | None) -> Variant:
    """The variant of a layer's attention. sinks: those that the model passes."""
    window, cap = served_models.window_of(layer), float(layer.logit_cap)
    if window is None and sinks is None and cap == 0:
        return PLAIN
    return Variant(window, None if sinks is None else sinks.detach().float().contiguous(), cap)
