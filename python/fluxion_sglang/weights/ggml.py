"""Weights in llama.cpp's formats: the header of a GGUF file, and its blocks as integers with scales.

Decoding is exact. The kernels take scales as float16 (`quantised.pack`). Scales of Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 are
float16 in the file. Scales of the K types are products of a float16 and an integer of 6 or 8 bits. `pack` rounds them
by at most 2^-11 of their value, or by 2^-25 if that is more, and refuses those above the largest float16.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from fluxion_sglang.weights.quantised import Format, Quantised

_Decoded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


# --- blocks ---


@dataclass(frozen=True)
class Kind:
    """A type of quantised blocks.

    Attributes:
        inputs, bytes: of a block. format: of the decoded weight.
        decode: blocks [..., bytes] uint8 to integers [..., inputs], scales [..., groups] float32, and minima or None.
    """

    inputs: int
    bytes: int
    format: Format
    decode: Callable[[torch.Tensor], _Decoded]


def decode(blocks: torch.Tensor, kind: int) -> Quantised:
    """Decode rows of blocks to a weight.

    Args:
        blocks: [outputs, bytes] uint8, some or all rows of a tensor.
        kind: the number of their type, one of `KINDS`.
    """
    found = KINDS[kind]
    integers, scales, minima = found.decode(blocks.unflatten(1, (-1, found.bytes)))
    return Quantised(
        integers.flatten(1), scales.flatten(1), None if minima is None else minima.flatten(1), found.format
    )


def _halves(blocks: torch.Tensor, first: int, count: int = 1) -> torch.Tensor:
    """`count` float16 numbers of each block from byte `first` on, [..., count] float32."""
    return blocks[..., first : first + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(lines: torch.Tensor) -> torch.Tensor:
    """The low halves of each line's bytes, followed by the high halves: [..., n] to [..., 2 n]."""
    return torch.cat([lines & 15, lines >> 4], -1)


def _fifths(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """5-bit integers: 4 bytes hold their high bits, 16 bytes their low four."""
    bits = blocks[..., first : first + 4].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return _nibbles(blocks[..., first + 4 :]) | bits.flatten(-2) << 4


def _q4_0(blocks: torch.Tensor) -> _Decoded:
    return _nibbles(blocks[..., 2:]), _halves(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> _Decoded:
    return _nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> _Decoded:
    return _fifths(blocks, 2).view(torch.int8) - 16, _halves(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> _Decoded:
    return _fifths(blocks, 4).view(torch.int8), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> _Decoded:
    return blocks[..., 2:].contiguous().view(torch.int8), _halves(blocks, 0), None


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of the 8 groups of a block of Q4_K or Q5_K: two float16 times 6-bit integers."""
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)
    return scales * _halves(blocks, 0), minima * -_halves(blocks, 2)


def _q4_k(blocks: torch.Tensor) -> _Decoded:
    return _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2), *_k_scales(blocks)


def _q5_k(blocks: torch.Tensor) -> _Decoded:
    bits = blocks[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1) & 1
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    return (low | bits.flatten(-2) << 4).view(torch.int8), *_k_scales(blocks)


def _q6_k(blocks: torch.Tensor) -> _Decoded:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1) & 3
    integers = (low | high.flatten(-2) << 4).flatten(-2).view(torch.int8) - 32
    return integers, blocks[..., 192:208].contiguous().view(torch.int8) * _halves(blocks, 208), None


_FOUR, _EIGHT, _EIGHT_MINIMA = Format(4, 32, True), Format(8, 32, False), Format(8, 32, True)
KINDS = {
    2: Kind(32, 18, Format(4, 32, False), _q4_0),
    3: Kind(32, 20, _FOUR, _q4_1),
    6: Kind(32, 22, _EIGHT, _q5_0),
    7: Kind(32, 24, _EIGHT_MINIMA, _q5_1),
    8: Kind(32, 34, _EIGHT, _q8_0),
    12: Kind(256, 144, _FOUR, _q4_k),
    13: Kind(256, 176, _EIGHT_MINIMA, _q5_k),
    14: Kind(256, 210, Format(8, 16, False), _q6_k),
}
"""The types by ggml's number."""
DENSE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
SERVED = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K"


# --- files ---


class GGUFError(ValueError):
    """A file is no readable GGUF file. The message is one sentence."""


@dataclass(frozen=True)
class Array:
    """An array in a header; only its length is kept."""

    length: int


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file.

    Attributes:
        shape: in PyTorch's order, of elements. kind: number of its type. offset: in the file.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def outputs(self) -> int:
        """Rows of a tensor of blocks."""
        return prod(self.shape[:-1])

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of its bytes; requires a served type."""
        if (dtype := DENSE.get(self.kind)) is not None:
            return *self.shape[:-1], self.shape[-1] * dtype.itemsize
        kind = KINDS[self.kind]
        return self.outputs, self.shape[-1] // kind.inputs * kind.bytes


@dataclass(frozen=True)
class Header:
    """The header of a file.

    Attributes:
        values: by key. tensors: by name.
    """

    path: Path
    values: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", "none"))

    def value(self, key: str, otherwise: Any = None) -> Any:
        """The value of a key of the file's architecture, such as `llama.block_count` for `block_count`."""
        return self.values.get(f"{self.architecture}.{key}", otherwise)

    def read(self, name: str) -> torch.Tensor:
        """A tensor in its dtype and shape, or its blocks [outputs, bytes] uint8, memory-mapped with copy-on-write.

        Raises:
            GGUFError: the file ends before the tensor does.
        """
        self.expect(name)
        tensor = self.tensors[name]
        dtype = DENSE.get(tensor.kind)
        stored = torch.from_numpy(np.memmap(self.path, np.uint8, "c", tensor.offset, tensor.stored))
        return stored if dtype is None else stored.view(dtype)

    def expect(self, *names: str) -> None:
        """Raise GGUFError unless the file contains these tensors completely."""
        size = self.path.stat().st_size
        for name in names:
            if (tensor := self.tensors[name]).offset + prod(tensor.stored) > size:
                raise GGUFError(f"{self.path} ends before its tensor {name} does; download it again.")


_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


def read_header(path: Path) -> Header:
    """The header of a file.

    Raises:
        GGUFError: the file has no header of version 2 or 3, or ends within it.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        try:
            return _Reader(file, path.stat().st_size).header(path)
        except (struct.error, KeyError, UnicodeDecodeError, ArithmeticError, MemoryError):
            raise GGUFError(f"{path} ends in its header or is damaged; download it again.") from None


class _Reader:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def header(self, path: Path) -> Header:
        if self._file.read(4) != b"GGUF" or (version := self._number("I")) not in (2, 3):
            raise GGUFError(f"{path} is not a little-endian GGUF file of version 2 or 3; convert the model again.")
        tensors, values = self._number("Q"), self._number("Q")
        said = {self._text(): self._value(self._number("I")) for _ in range(values)}
        found = {self._text(): self._tensor() for _ in range(tensors)}
        alignment = said.get("general.alignment", 32)
        if len(found) != tensors or type(alignment) is not int or alignment < 1:  # duplicate names are ambiguous
            raise KeyError(alignment)
        start = -(-self._file.tell() // alignment) * alignment
        placed = {name: Tensor(shape, kind, start + offset) for name, (shape, kind, offset) in found.items()}
        return Header(path, said | {"GGUF.version": version}, placed)

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._file.read(struct.calcsize(f"<{form}")))[0]

    def _text(self) -> str:
        return str(self._file.read(self._number("Q")), "utf-8")

    def _skip(self, count: int) -> None:
        if count > self._size:
            raise KeyError(count)
        self._file.seek(count, 1)

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._number(_NUMBERS[kind])
        kind, count = self._number("I"), self._number("Q")
        if kind == _TEXT:
            for _ in range(count):
                self._skip(self._number("Q"))
        else:  # llama.cpp has no nested arrays
            self._skip(count * struct.calcsize(f"<{_NUMBERS[kind]}"))
        return Array(count)

    def _tensor(self) -> tuple[tuple[int, ...], int, int]:
        if not 0 < (count := self._number("I")) <= 4:
            raise KeyError(count)
        dimensions = [self._number("Q") for _ in range(count)]
        return tuple(reversed(dimensions)), self._number("I"), self._number("Q")
