"""The format of the native kernels: a weight of 4 or 8 bits, in which groups of inputs share a scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

PANEL = 16
"""Outputs whose weights are packed together (`csrc/kernels/table.h`, kQuantisedPanel)."""
BLOCK = 32
"""Inputs that the kernels multiply at once (`csrc/kernels/table.h`, kQuantisedBlock)."""


@dataclass(frozen=True)
class Format:
    """The storage format of a weight.

    Attributes:
        bits: 4 (integers 0 to 15) or 8 (integers -128 to 127).
        group: inputs of an output that share a scale: a multiple of 32, or 16 with 8 bits and without minima.
        minima: whether a group also has a minimum: weight = scale * integer + minimum. Without minima, weight = scale *
            integer with 8 bits, and scale * (integer - 8) with 4.
    """

    bits: int
    group: int
    minima: bool

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"weights of {self.bits} bits have no kernels; the kernels take 4 or 8 bits.")
        half = (self.bits, self.group, self.minima) == (8, BLOCK // 2, False)
        if self.group < 1 or (self.group % BLOCK and not half):
            found = f"a group has {self.group} inputs"
            raise ValueError(
                f"{found}; the kernels take a multiple of {BLOCK}, or {BLOCK // 2} with 8 bits and no minima."
            )

    @property
    def zero(self) -> int:
        """The integer that represents 0, or, with minima, the minimum."""
        return 8 if self.bits == 4 and not self.minima else 0

    def groups(self, inputs: int) -> int:
        """Groups of an output that has `inputs` inputs; the last group may be shorter."""
        return -(-inputs // self.group)

    @property
    def per_head(self) -> int:
        """Groups whose scales are stored in one head of a packed panel (`pack`)."""
        return 1 if self.minima else 2


@dataclass(frozen=True)
class Quantised:
    """A weight as integers (`Format`).

    Attributes:
        integers: [outputs, inputs], uint8 with 4 bits (0 to 15, one a byte), int8 with 8.
        scales: [outputs, groups] float32. minima: the same, or None if the format has none. `pack` rounds both to
            float16.
        format: the storage format.
    """

    integers: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    format: Format

    def __post_init__(self) -> None:
        outputs, inputs = self.integers.shape
        expected = torch.uint8 if self.format.bits == 4 else torch.int8
        if self.integers.dtype is not expected:
            raise ValueError(
                f"integers of {self.format.bits} bits are {expected}, and these are {self.integers.dtype}."
            )
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

        weight = (self.integers.float() - self.format.zero) * each(self.scales)
        return weight if self.minima is None else weight + each(self.minima)


def pack(weight: Quantised) -> torch.Tensor:
    """The weight in the kernels' order (`QuantisedFormat` of csrc/kernels/table.h).

    Returns:
        [panels, bytes of a panel] uint8. A panel has `PANEL` outputs; missing outputs of the last panel are 0.

    Raises:
        ValueError: a scale or minimum is not finite as float16.
    """
    form = weight.format
    outputs, inputs = weight.integers.shape
    panels, blocks, each = -(-outputs // PANEL), inputs // BLOCK, form.per_head

    def padded(part: torch.Tensor, columns: int) -> torch.Tensor:
        size = (0, columns - part.shape[1], 0, panels * PANEL - outputs)
        return torch.nn.functional.pad(part, size).view(panels, PANEL, -1)

    heads = -(-form.groups(inputs) // each)
    kinds = [weight.scales] if weight.minima is None else [weight.scales, weight.minima]
    small = torch.stack([padded(part, heads * each) for part in kinds], 1).to(torch.float16)
    if not bool(small.isfinite().all()):
        raise ValueError("a scale of the weights is not finite or above 65504, and the kernels take scales as float16.")
    small = small.view(panels, len(kinds), PANEL, heads, each).permute(
        0, 3, 1, 4, 2
    )  # [panels, heads, kinds, each, 16]
    head = small.reshape(panels, heads, -1).contiguous().view(torch.uint8)
    lines = padded(weight.integers, inputs).view(panels, PANEL, blocks, -1, 16 // form.bits, 2)  # [.., j, n, e]
    lines = lines.permute(0, 2, 3, 1, 5, 4)  # [panels, blocks, j, output, e, n]
    if form.bits == 4:
        lines = lines[..., 0::2] | lines[..., 1::2] << 4
    stream = lines.reshape(panels, blocks, -1).contiguous().view(torch.uint8)
    span = each * form.group // BLOCK
    pieces = [
        piece
        for index in range(heads)
        for piece in (head[:, index], stream[:, index * span : (index + 1) * span].flatten(1))
    ]
    return torch.cat(pieces, 1)


def unpack(packed: torch.Tensor, form: Format, outputs: int, inputs: int) -> Quantised:
    """The inverse of `pack`; scales stay rounded to float16."""
    panels, blocks, each = len(packed), inputs // BLOCK, form.per_head
    span, groups = each * form.group // BLOCK, form.groups(inputs)
    heads = -(-groups // each)
    line, head = BLOCK * PANEL * form.bits // 8, each * (1 + form.minima) * PANEL * 2
    cuts = [size for index in range(heads) for size in (head, min(span, blocks - index * span) * line)]
    pieces = packed.split(cuts, 1)
    small = torch.stack(pieces[::2], 1).contiguous().view(torch.float16).view(panels, heads, -1, each, PANEL)
    small = small.permute(2, 0, 4, 1, 3).reshape(-1, panels * PANEL, heads * each)[:, :outputs, :groups].float()
    stream = torch.cat(pieces[1::2], 1)
    if form.bits == 4:
        lines = stream.view(panels, blocks, 4, PANEL, 2, 2)
        lines = torch.stack([lines & 15, lines >> 4], -1).flatten(-2)
    else:
        lines = stream.view(torch.int8).view(panels, blocks, 8, PANEL, 2, 2)
    integers = lines.permute(0, 3, 1, 2, 5, 4).reshape(panels * PANEL, inputs)[:outputs]
    return Quantised(integers.contiguous(), small[0].contiguous(), small[1].contiguous() if form.minima else None, form)


def slices(outputs: int, inputs: int, most: int = 16 << 20) -> Iterator[slice]:
    """Cut the rows of a weight into slices of whole panels, about `most` elements each, to bound temporary memory."""
    count = max(most // inputs // PANEL, 1) * PANEL
    for first in range(0, outputs, count):
        yield slice(first, min(first + count, outputs))
