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
    last = scales.flatten(1).contiguous().view(torch.uint8)
    return torch.cat([integers.view(torch.uint8).flatten(1), last], 1).contiguous()


def unpack_tiles(packed: Tensor, D: int) -> Tensor:
    """The inverse, exactly: [P, 2, 16, D] float32."""
    integers = packed[:, : 32 * D].view(torch.int8).unflatten(1, (2, 16, D))
    scales = packed[:, 32 * D :].contiguous().view(torch.bfloat16).unflatten(1, (2, 16))
    return unpack(integers, scales)
