"""A weight of 8 or 4 bits whose inputs share scales in groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

PANEL = 16
"""Outputs whose weights are packed together (`csrc/kernels/table.h`, kIntegerPanel)."""
BLOCK = 32
"""Inputs that the kernels multiply together (`csrc/kernels/table.h`, kIntegerBlock)."""


@dataclass(frozen=True)
class Format:
    """How a weight is stored.

    Attributes:
        bits: 4 (integers 0 to 15) or 8 (integers -128 to 127).
        group: inputs of an output that share a scale: 16 (8 bits alone), or a multiple of 32.
        minima: whether a group has a minimum beside its scale.
    """

    bits: int
    group: int
    minima: bool

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"weights of {self.bits} bits have no kernels; they have 4 or 8.")
        if self.group % BLOCK and (self.bits, self.group) != (8, 16):
            raise ValueError(f"a group has {self.group} inputs; it has a multiple of {BLOCK}, or 16 with 8 bits.")

    def groups(self, inputs: int) -> int:
        """Groups of an output with so many inputs; the last one may be shorter."""
        return -(-inputs // self.group)

    def panel_bytes(self, inputs: int) -> int:
        """Bytes of a panel with so many inputs."""
        return inputs * PANEL * self.bits // 8 + self.groups(inputs) * PANEL * 2 * (1 + self.minima)


@dataclass(frozen=True)
class Quantised:
    """A weight as integers: weight = scale * integer + minimum.

    Attributes:
        integers: [outputs, inputs], uint8 with 4 bits (0 to 15, one a byte), int8 with 8.
        scales: [outputs, groups] float32; minima: the same, or None where all are 0. The kernels have both as float16.
        format: how it is stored.
    """

    integers: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    format: Format

    def __post_init__(self) -> None:
        outputs, inputs = self.integers.shape
        expected = torch.uint8 if self.format.bits == 4 else torch.int8
        if self.integers.dtype is not expected:
            raise ValueError(f"integers of {self.format.bits} bits are {expected}, and these are {self.integers.dtype}.")
        if inputs % BLOCK:
            raise ValueError(f"a weight has {inputs} inputs; the kernels take a multiple of {BLOCK}.")
        shape = (outputs, self.format.groups(inputs))
        if (self.minima is not None) != self.format.minima or any(
            part is not None and (part.shape != shape or part.dtype is not torch.float32)
            for part in (self.scales, self.minima)
        ):
            raise ValueError(f"scales, and minima if the format has them, are float32 {list(shape)}.")

    def wide(self) -> torch.Tensor:
        """The weight, [outputs, inputs] float32."""
        inputs = self.integers.shape[1]

        def each(part: torch.Tensor) -> torch.Tensor:
            return part.repeat_interleave(self.format.group, 1)[:, :inputs]

        weight = self.integers.float() * each(self.scales)
        return weight if self.minima is None else weight + each(self.minima)


def pack(weight: Quantised) -> torch.Tensor:
    """The weight in the order in which the kernels read it, [panels, bytes of a panel] uint8.

    A panel has `PANEL` outputs; those that the last one lacks are 0. It is a stream of blocks of `BLOCK` inputs: before
    the block with which a group begins lie the scales of its outputs, then their minima, all float16; a group of 16
    inputs has half a block, and the scales of both come before it. Integers of 8 bits lie as [8][output 16][input 2]
    [2]: in element [j][o][e][n] that of input 4 j + 2 n + e. Those of 4 bits lie as [4][output][2][4], the first of
    [4] in the lowest bits: [j][o][e][n] is that of input 8 j + 2 n + e.

    Raises:
        ValueError: a scale or minimum has no float16.
    """
    form = weight.format
    outputs, inputs = weight.integers.shape
    panels, blocks = -(-outputs // PANEL), inputs // BLOCK

    def padded(part: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(part, (0, 0, 0, panels * PANEL - outputs)).view(panels, PANEL, -1)

    kinds = [weight.scales] if weight.minima is None else [weight.scales, weight.minima]
    halves = torch.stack([padded(part) for part in kinds], 1)  # [panels, kinds, PANEL, groups]
    small = halves.to(torch.float16)
    if not bool(small.isfinite().all()):
        raise ValueError("a scale of the weights is not finite or above 65504, and the kernels have scales as float16.")
    across = 16 // form.bits  # integers of a word
    lines = padded(weight.integers).view(panels, PANEL, blocks, -1, across, 2)  # [.., j, n, e]
    lines = lines.permute(0, 2, 3, 1, 5, 4)  # [panels, blocks, j, o, e, n]
    if form.bits == 4:
        lines = lines[..., 0::2] | lines[..., 1::2] << 4
    stream = lines.reshape(panels, blocks, -1).view(torch.uint8)
    per_block = max(BLOCK // form.group, 1)
    groups = small.permute(0, 3, 1, 2).reshape(panels, -1, per_block * len(kinds) * PANEL)
    if per_block > 1:  # scales of both halves, then minima of both
        groups = small.view(panels, len(kinds), PANEL, -1, per_block).permute(0, 3, 1, 4, 2)
        groups = groups.reshape(panels, -1, per_block * len(kinds) * PANEL)
    heads = groups.contiguous().view(torch.uint8)  # [panels, heads, bytes]
    span = max(form.group // BLOCK, 1)  # blocks behind a head
    whole = blocks // span
    line = span * stream.shape[-1]
    first = torch.cat([heads[:, :whole], stream[:, : whole * span].reshape(panels, whole, line)], -1)
    rest = [heads[:, whole:].flatten(1), stream[:, whole * span :].flatten(1)]
    return torch.cat([first.flatten(1), *rest], -1).contiguous()


def unpack(packed: torch.Tensor, form: Format, outputs: int, inputs: int) -> Quantised:
    """The weight that `pack` packed, its scales rounded to float16."""
    panels, blocks = len(packed), inputs // BLOCK
    span, per_block = max(form.group // BLOCK, 1), max(BLOCK // form.group, 1)
    kinds = 1 + form.minima
    head, line = per_block * kinds * PANEL * 2, BLOCK * PANEL * form.bits // 8
    whole, left = divmod(blocks, span)
    cut = whole * (head + span * line)
    first = packed[:, :cut].unflatten(1, (whole, -1)) if whole else packed[:, :0].view(panels, 0, head + span * line)
    heads, stream = [first[..., :head]], [first[..., head:].reshape(panels, whole * span, line)]
    if left:
        heads.append(packed[:, cut : cut + head].view(panels, 1, head))
        stream.append(packed[:, cut + head :].view(panels, left, line))
    small = torch.cat(heads, 1).contiguous().view(torch.float16).view(panels, -1, kinds, per_block, PANEL)
    small = small.permute(2, 0, 4, 1, 3).reshape(kinds, panels * PANEL, -1)[:, :outputs].float()
    bytes_ = torch.cat(stream, 1)
    if form.bits == 4:
        lines = bytes_.view(panels, blocks, 4, PANEL, 2, 2)
        lines = torch.stack([lines & 15, lines >> 4], -1).flatten(-2)  # n
    else:
        lines = bytes_.view(torch.int8).view(panels, blocks, 8, PANEL, 2, 2)
    integers = lines.permute(0, 3, 1, 2, 5, 4).reshape(panels * PANEL, inputs)[:outputs]
    return Quantised(integers.contiguous(), small[0].contiguous(), small[1].contiguous() if form.minima else None, form)


def slices(outputs: int, inputs: int, most: int = 16 << 20) -> Iterator[slice]:
    """Rows of a weight, whole panels and about `most` elements at a time: what is computed of them may be large."""
    count = max(most // inputs // PANEL, 1) * PANEL
    for first in range(0, outputs, count):
        yield slice(first, min(first + count, outputs))
