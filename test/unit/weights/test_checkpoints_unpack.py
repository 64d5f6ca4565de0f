"""Weights of quantised checkpoints: our packers, which follow the published rules, and those of other projects."""

from __future__ import annotations

from types import SimpleNamespace

import packings
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from sglang.kernels.ops.quantization.awq_triton import awq_dequantize_decomposition
from sglang.srt.layers.quantization.utils import pack_cols, pack_rows, quantize_weights

from fluxion_sglang.weights import checkpoints
from fluxion_sglang.weights.quantised import Quantised, pack, unpack

OUT, IN = 48, 256


def grid(bits: int, group: int, symmetric: bool) -> packings.Grid:
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(bits + group))
    return packings.rounded(weight, bits, group, symmetric)


def check(found: Quantised, want: packings.Grid) -> None:
    middle = 1 << want.bits - 1
    assert torch.equal(found.integers.long(), want.integers - (middle if want.bits == 8 else 0))
    assert torch.equal(found.scales, want.scales.float())
    assert found.format.group == IN // want.scales.shape[1]
    assert found.format.minima == bool((want.zeros != middle).any())
    held = unpack(pack(found), found.format, OUT, IN)
    torch.testing.assert_close(held.wide(), want.wide(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_formats_of_any_group(bits: int, group: int, symmetric: bool) -> None:
    want = grid(bits, group, symmetric)
    for v2 in (False, True):
        packed = packings.gptq(want, v2)
        check(checkpoints.gptq(packed["qweight"], packed["qzeros"], packed["scales"], bits, v2), want)
    found = packings.pack_quantised(want)
    zeros = found.get("weight_zero_point")
    check(checkpoints.pack_quantised(found["weight_packed"], found["weight_scale"], zeros, bits), want)
    if bits == 4:
        packed = packings.awq(want)
        check(checkpoints.awq(packed["qweight"], packed["qzeros"], packed["scales"]), want)
    elif symmetric and group == -1:
        packed = packings.int_quantised(want)
        check(checkpoints.int_quantised(packed["weight"], packed["weight_scale"]), want)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_of_0_is_stored_as_the_largest(bits: int) -> None:
    want = packings.rounded(torch.rand(OUT, IN), bits, 64, symmetric=False)
    assert not want.zeros.any()
    packed = packings.gptq(want)
    assert (packed["qzeros"] == -1).all()
    check(checkpoints.gptq(packed["qweight"], packed["qzeros"], packed["scales"], bits, v2=False), want)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_sglang_packs(bits: int) -> None:
    """SGLang's test helpers, with weights [inputs, outputs]."""
    most, weight = (1 << bits) - 1, torch.randn(IN, OUT)
    kind = SimpleNamespace(
        is_integer=lambda: True, is_signed=lambda: False, max=lambda: most, min=lambda: 0, has_bias=lambda: False
    )
    want, integers, scales, zeros = quantize_weights(weight, kind, 64, zero_points=True)
    qweight, qzeros = pack_rows(integers, bits, IN, OUT), pack_cols(zeros, bits, IN // 64, OUT)
    found = checkpoints.gptq(qweight, qzeros, scales, bits, v2=True)
    torch.testing.assert_close(found.wide(), want.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_compressed_tensors_packs(bits: int, symmetric: bool) -> None:
    want, middle = grid(bits, 32, symmetric), 1 << bits - 1
    packed = pack_to_int32((want.integers - middle).to(torch.int8), bits)
    zeros = None if symmetric else pack_to_int32((want.zeros - middle).to(torch.int8), bits, packed_dim=0)
    check(checkpoints.pack_quantised(packed, want.scales, zeros, bits), want)


def test_what_sglang_reads_of_awq() -> None:
    want = grid(4, 64, symmetric=False)
    packed = packings.awq(want)
    parts = packed["qweight"], packed["qzeros"], packed["scales"]
    theirs = awq_dequantize_decomposition(parts[0], parts[2], parts[1])
    torch.testing.assert_close(checkpoints.awq(*parts).wide(), theirs.T.float(), rtol=1e-3, atol=1e-3)
