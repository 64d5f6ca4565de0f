"""Unpacks weights of quantised checkpoints into `Quantised`.

GPTQ, AWQ and compressed-tensors use the same formula in different layouts: weight = scale * (integer - zero). A group
of inputs of an output shares scale and zero; integer and zero are unsigned. Here 8-bit integers become signed, and the
minimum is -scale * zero. A weight whose zeros are all in the middle of the range has no minima. In every layout an
int32 holds adjacent values, the first in its lowest bits.
"""

from __future__ import annotations

import torch

from fluxion_sglang.weights.quantised import Format, Quantised

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""The positions of eight adjacent outputs in an int32 of AWQ."""


def gptq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, bits: int, v2: bool) -> Quantised:
    """Unpack a weight of GPTQ, or of AutoRound in that packing.

    Args:
        qweight: [inputs * bits / 32, outputs] int32, packed along inputs.
        qzeros: [groups, outputs * bits / 32] int32, packed along outputs.
        scales: [groups, outputs].
        v2: whether qzeros are the zeros; in the first version of the format they are zero - 1, modulo 2^bits.
    """
    zeros = _unpacked(qzeros, bits)
    if not v2:
        zeros = zeros + 1 & (1 << bits) - 1
    return _quantised(_unpacked(qweight.T, bits), zeros.T, scales.T, bits)


def awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> Quantised:
    """Unpack a 4-bit weight of AWQ.

    Args:
        qweight: [inputs, outputs / 8] int32, packed along outputs in the order 0, 2, 4, 6, 1, 3, 5, 7.
        qzeros: [groups, outputs / 8] int32, packed the same way.
        scales: [groups, outputs].
    """
    integers, zeros = (
        _unpacked(part, 4).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1).T for part in (qweight, qzeros)
    )
    return _quantised(integers, zeros, scales.T, 4)


def pack_quantised(packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int) -> Quantised:
    """Unpack a weight of compressed-tensors in the format pack-quantized.

    Args:
        packed: [outputs, inputs * bits / 32] int32, packed along inputs; integers and zeros have an offset of half
            their range.
        scales: [outputs, groups].
        zeros: [outputs * bits / 32, groups] int32, packed along outputs; None: the middle of the range.
    """
    middle = torch.full(scales.shape, 1 << bits - 1, dtype=torch.uint8)
    return _quantised(_unpacked(packed, bits), middle if zeros is None else _unpacked(zeros.T, bits).T, scales, bits)


_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
"""Twice the value of each 4-bit number (E2M1)."""
MXFP4 = Format(8, 32, minima=False)
"""The format of the results of `mxfp4`."""
_LEAST_EXPONENT = -24
"""Exponent of the smallest positive float16."""


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> Quantised:
    """Convert a weight of MXFP4 to 8 bits. Exact, but numbers below 2^-24 are rounded to a multiple of it.

    Args:
        blocks: [outputs, inputs / 2] uint8, two numbers (E2M1) a byte, the first in its lower half.
        scales: [outputs, inputs / 32] uint8, exponents of 32 inputs (E8M0) plus 127.

    Raises:
        ValueError: a scale is not a number, or too large for the kernels.
    """
    exponents = scales.int() - 128  # of half the value
    if int(exponents.max()) > 15:
        raise ValueError(
            "a scale of the weights is above 65504 or not a number, and the kernels take scales as float16."
        )
    integers = torch.stack([_E2M1[(blocks & 15).int()], _E2M1[(blocks >> 4).int()]], -1).flatten(1)
    if (below := (_LEAST_EXPONENT - exponents).clamp(min=0)).any():
        factor = torch.exp2(-below.float()).repeat_interleave(32, 1)
        integers = (integers * factor).round().to(torch.int8)
    return Quantised(integers, torch.exp2((exponents + below).float()), None, MXFP4)


def int_quantised(weight: torch.Tensor, scales: torch.Tensor) -> Quantised:
    """Unpack a weight of compressed-tensors in the format int-quantized.

    Args:
        weight: [outputs, inputs] int8. scales: [outputs, 1].
    """
    return Quantised(weight.contiguous(), scales.float(), None, Format(8, weight.shape[1], False))


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack [rows, words] int32 to [rows, 32 / bits * words] uint8."""
    values = packed.contiguous().view(torch.uint8)
    return values if bits == 8 else torch.stack([values & 15, values >> 4], -1).flatten(1)


def _quantised(integers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, bits: int) -> Quantised:
    """The weight from integers [outputs, inputs] uint8, zeros [outputs, groups] uint8 and scales [outputs, groups]."""
    scales, inputs = scales.float().contiguous(), integers.shape[1]
    integers = integers.contiguous() if bits == 4 else (integers ^ 128).view(torch.int8).contiguous()
    offsets = zeros.float() - (0 if bits == 4 else 128)
    group, plain = inputs // scales.shape[1], 8 if bits == 4 else 0
    if bool((offsets == plain).all()):
        return Quantised(integers, scales, None, Format(bits, group, minima=False))
    return Quantised(integers, scales, -scales * offsets, Format(bits, group, minima=True))
