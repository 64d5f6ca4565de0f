"""What the host pool makes of keys and values in 8 bits (`DType` in csrc/kernels/table.h), in torch: to be checked by
reading.
"""

from __future__ import annotations

import torch
from torch import Tensor

INT8 = torch.int8
"""Stands for it where a test names the dtypes of a pool."""

SCALE = 2
"""Bytes of a scale, bfloat16."""


def pair_bytes(dim: int, dtype: torch.dtype) -> int:
    """Of a key and a value, as a pool of this dtype stores them."""
    return 2 * (dim + SCALE if dtype == INT8 else dim * dtype.itemsize)


def entry_bytes(dim: int, dtype: torch.dtype) -> int:
    """Of the metadata of a block."""
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
    """What is stored, exactly: float32."""
    return integers.float() * scales.float()[..., None]


def multiplied_queries(q: Tensor) -> Tensor:
    """bfloat16 [G, D] -> float64: what kernels of few heads multiply, integers of 16 bits in each head's own unit."""
    most = q.float().abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 1e-30, torch.tensor(32767.0) / most, 0.0)
    return (q.float() * inverse).round().double() * (most.double() / 32767)


def stored(x: Tensor) -> Tensor:
    """What is read of what was appended: bfloat16, of the same shape."""
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
    """The inverse, exactly: [P, 2, 16, D] float32."""
    P = len(packed)
    integers, last = packed[:, : 32 * D].view(torch.int8), packed[:, 32 * D :]
    keys = integers[:, : 16 * D].view(P, D // 2, 16, 2).transpose(1, 2).reshape(P, 16, D)
    values = integers[:, 16 * D :].view(P, 4, D, 4).transpose(2, 3).reshape(P, 16, D)
    scales = last.contiguous().view(torch.bfloat16).view(P, 2, 16)
    return unpack(torch.stack([keys, values], 1), scales)


def bytes_of_rows(rows: Tensor, D: int) -> Tensor:
    """[..., 32] -> [..., bytes of a tile]: for each byte, what is said of the key or the value that it belongs to."""
    keys, values = rows[..., :16], rows[..., 16:]
    return torch.cat(
        [
            keys.repeat_interleave(2, -1).repeat(*[1] * (rows.dim() - 1), D // 2),
            values.unflatten(-1, (4, 4)).repeat_interleave(D, -2).flatten(-2),
            rows.repeat_interleave(SCALE, -1),
        ],
        -1,
    )
