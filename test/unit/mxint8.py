"""What the host pool makes of keys and values in 8 bits (`DType` in csrc/kernels/table.h), in torch: to be checked by
reading.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 32
NO_NUMBERS = 255
MXINT8 = torch.int8
"""Stands for it where a test names the dtypes of a pool."""


def pair_bytes(dim: int, dtype: torch.dtype) -> int:
    """Of a key and a value, as a pool of this dtype stores them."""
    return 2 * (dim + -(-dim // BLOCK) if dtype == MXINT8 else dim * dtype.itemsize)


def entry_bytes(dim: int, dtype: torch.dtype) -> int:
    """Of the metadata of a block."""
    return 2 * dim * (2 if dtype == MXINT8 else dtype.itemsize)


def pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """bfloat16 [..., D] -> integers [..., D] int8, exponents [..., ceil(D / 32)] uint8."""
    D = x.shape[-1]
    blocks = F.pad(x.double(), (0, -D % BLOCK)).unflatten(-1, (-1, BLOCK))
    finite = blocks.isfinite().all(-1)
    largest = torch.where(finite, blocks.abs().amax(-1), 0.0)
    # 64 to 127 stand for the largest number of a block.
    exponents = (torch.frexp(largest).exponent - 1 - 6 + 127).clamp(1, 248)
    exponents = torch.where(largest == 0, 1, exponents)
    integers = (blocks * torch.exp2(127.0 - exponents)[..., None]).round().clamp(-127, 127)
    integers = torch.where(finite[..., None], integers, 0.0)
    exponents = torch.where(finite, exponents, NO_NUMBERS)
    return integers.flatten(-2)[..., :D].to(torch.int8), exponents.to(torch.uint8)


def unpack(integers: Tensor, exponents: Tensor) -> Tensor:
    D = integers.shape[-1]
    factors = torch.exp2(exponents.double() - 127).repeat_interleave(BLOCK, -1)[..., :D]
    factors = torch.where(exponents.repeat_interleave(BLOCK, -1)[..., :D] == NO_NUMBERS, torch.inf, factors)
    wide = integers.double() * factors
    x = wide.to(torch.bfloat16)
    assert torch.equal(x.double().nan_to_num(0.125), wide.nan_to_num(0.125)), "every such number is a bfloat16 number"
    return x


def multiplied_queries(q: Tensor) -> Tensor:
    """bfloat16 [G, D] -> float64: what kernels of few heads multiply, integers of 14 bits in each head's own unit."""
    most = q.float().abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 1e-30, torch.tensor(8191.0) / most, 0.0)
    return (q.float() * inverse).round().double() * (most.double() / 8191)


def multiplied_keys(keys: Tensor) -> Tensor:
    """Stored keys [..., D] -> float64: with another 6 bits below the last place of a key's largest block, no more."""
    integers, exponents = pack(keys)
    top = exponents.amax(-1, keepdim=True).int()
    shifts = (top - exponents.int()).repeat_interleave(BLOCK, -1)[..., : keys.shape[-1]]
    words = (integers.int() * 256 * (8192 >> shifts.clamp(0, 13)) + 0x4000) >> 15
    return torch.where(shifts > 13, 0, words).double() * torch.exp2(top.double() - 127 - 6)


def stored(x: Tensor) -> Tensor:
    """What is read of what was appended: bfloat16, of the same shape."""
    return unpack(*pack(x))


def pack_tiles(tiles: Tensor) -> Tensor:
    """bfloat16 [P, 2, 16, D] -> [P, bytes] uint8."""
    integers, exponents = pack(tiles)
    last = exponents.flatten(1, 2).transpose(1, 2)  # [P, blocks, 32 rows]
    return torch.cat([integers.view(torch.uint8).flatten(1), last.flatten(1)], 1).contiguous()


def unpack_tiles(packed: Tensor, D: int) -> Tensor:
    """The inverse: [P, 2, 16, D] bfloat16."""
    integers = packed[:, : 32 * D].view(torch.int8).unflatten(1, (2, 16, D))
    exponents = packed[:, 32 * D :].unflatten(1, (-1, 2, 16)).permute(0, 2, 3, 1)
    return unpack(integers, exponents)
