"""Keys and values in 8 bits as the host pool stores them (`DType` in csrc/kernels/table.h), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

INT8 = torch.int8
"""Denotes this format where a test lists the dtypes of a pool."""

SCALE = 2
"""Bytes of a bfloat16 scale."""


def pair_bytes(dim: int, dtype: torch.dtype) -> int:
    """Bytes of a key and a value in a pool of this dtype."""
    return 2 * (dim + SCALE if dtype == INT8 else dim * dtype.itemsize)


def entry_bytes(dim: int, dtype: torch.dtype) -> int:
    """Bytes of the metadata of a block."""
    return 2 * dim * (2 if dtype == INT8 else dtype.itemsize)


def pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """bfloat16 [..., D] -> integers [..., D] int8, scales [...] bfloat16."""
    x = x.float()
    finite = x.isfinite().all(-1)
    largest = torch.where(finite, x.abs().amax(-1), 0.0)
    scales = (largest / 127).clamp_min(1e-37).to(torch.bfloat16)
    integers = (x * (1 / scales.float())[..., None]).round().clamp(-127, 127)
    integers = torch.where(finite[..., None], integers, 0.0)
    return integers.to(torch.int8), torch.where(finite, scales, torch.nan)


def unpack(integers: Tensor, scales: Tensor) -> Tensor:
    """The stored values, exactly, in float32."""
    return integers.float() * scales.float()[..., None]


def multiplied_queries(q: Tensor) -> Tensor:
    """bfloat16 [G, D] -> float64: multiplicands of kernels for few heads, 16-bit integers with a scale per head."""
    most = q.float().abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 1e-30, torch.tensor(32767.0) / most, 0.0)
    return (q.float() * inverse).round().double() * (most.double() / 32767)


def stored(x: Tensor) -> Tensor:
    """bfloat16 after storing and reading; same shape."""
    return unpack(*pack(x)).to(torch.bfloat16)


def pack_tiles(tiles: Tensor) -> Tensor:
    """bfloat16 [P, 2, 16, D] -> [P, bytes] uint8."""
    integers, scales = pack(tiles)
    P, D = len(tiles), tiles.shape[-1]
    keys = integers[:, 0].view(P, 16, D // 2, 2).transpose(1, 2)
    values = integers[:, 1].view(P, 4, 4, D).transpose(2, 3)
    parts = (keys, values, scales)
    return torch.cat([part.reshape(P, -1).contiguous().view(torch.uint8) for part in parts], 1).contiguous()


def unpack_tiles(packed: Tensor, D: int) -> Tensor:
    """The exact inverse of `pack_tiles`: [P, 2, 16, D] float32."""
    P = len(packed)
    integers, last = packed[:, : 32 * D].view(torch.int8), packed[:, 32 * D :]
    keys = integers[:, : 16 * D].view(P, D // 2, 16, 2).transpose(1, 2).reshape(P, 16, D)
    values = integers[:, 16 * D :].view(P, 4, D, 4).transpose(2, 3).reshape(P, 16, D)
    scales = last.contiguous().view(torch.bfloat16).view(P, 2, 16)
    return unpack(torch.stack([keys, values], 1), scales)


def bytes_of_rows(rows: Tensor, D: int) -> Tensor:
    """[..., 32] -> [..., bytes of a tile]: for each byte, the entry of its key or value."""
    keys, values = rows[..., :16], rows[..., 16:]
    return torch.cat(
        [
            keys.repeat_interleave(2, -1).repeat(*[1] * (rows.dim() - 1), D // 2),
            values.unflatten(-1, (4, 4)).repeat_interleave(D, -2).flatten(-2),
            rows.repeat_interleave(SCALE, -1),
        ],
        -1,
    )
