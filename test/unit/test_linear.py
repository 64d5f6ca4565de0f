"""Layers of the model on every ISA, against torch in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import DTYPES, dtypes, few, isas, seeds

from fluxion_sglang.native import NativeLayers, Workers

WORKERS = Workers(2)
sizes = st.one_of(st.integers(1, 80), st.sampled_from([127, 128, 257, 1024, 2049, 4100]))
rows = st.one_of(st.integers(1, 18))


def error_bound(x: torch.Tensor, w: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Of sums in float32 in any order, rounded once; instructions may take denormals for zero."""
    sums = (x.double().abs() @ w.double().abs().T) * (x.shape[1] + 8) * 2.0**-24
    unit = 2.0**-8 if x.dtype == torch.bfloat16 else 2.0**-23
    return sums + want.abs() * unit + 1e-30


def strided(generator: torch.Generator, n: int, size: int, gap: int, dtype: torch.dtype) -> torch.Tensor:
    """[n, size] with rows `gap` elements apart, poison between them."""
    whole = torch.full((n, size + gap), math.nan, dtype=dtype)
    whole[:, :size] = torch.randn(n, size, generator=generator).to(dtype)
    return whole[:, :size]


@few
@isas
@given(m=rows, k=sizes, n=sizes, gap=st.sampled_from([0, 1, 7]), bias=st.booleans(), seed=seeds)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_linear(isa: str, dtype: torch.dtype, m: int, k: int, n: int, gap: int, bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, w = strided(generator, m, k, gap, dtype), strided(generator, n, k, gap, dtype)
    b = torch.randn(n, generator=generator).to(dtype) if bias else None
    whole = torch.full((m + 2, n + gap), math.nan, dtype=dtype)
    out = whole[1:-1, :n]
    NativeLayers(WORKERS, isa).linear(x, w, b, out)
    want = x.double() @ w.double().T + (0 if b is None else b.double())
    assert ((out.double() - want).abs() <= error_bound(x, w, want)).all()
    assert whole[:, n:].isnan().all() and whole[[0, -1]].isnan().all(), "wrote beyond its outputs"


@isas
@dtypes
@pytest.mark.parametrize(("n", "k"), [(2816, 1024), (1024, 2816), (700, 4096)])
def test_a_row_does_not_depend_on_others(isa: str, dtype: torch.dtype, n: int, k: int) -> None:
    """Nor on who computes it: the same bits alone, in a batch of any size, and with any number of workers."""
    generator = torch.Generator().manual_seed(n)
    x, w = torch.randn(13, k, generator=generator).to(dtype), torch.randn(n, k, generator=generator).to(dtype)
    layers = NativeLayers(WORKERS, isa)
    whole = layers.linear(x, w)
    for count in (1, 2, 3, 5, 8, 9):
        assert torch.equal(layers.linear(x[:count], w), whole[:count])
    assert torch.equal(NativeLayers(Workers(1), isa).linear(x, w), whole)


@isas
@dtypes
def test_what_is_not_finite_stays_in_its_row(isa: str, dtype: torch.dtype) -> None:
    x, w = torch.ones(3, 70, dtype=dtype), torch.ones(40, 70, dtype=dtype)
    x[1, 69] = math.nan
    w[7, 3] = math.inf
    out = NativeLayers(WORKERS, isa).linear(x, w)
    assert out[1].isnan().all() and not out[[0, 2]].isnan().any()
    assert (out[[0, 2], 7] == math.inf).all() and (out[0][:7] == 70).all() and (out[2][8:] == 70).all()


def test_bad_arguments() -> None:
    layers = NativeLayers(WORKERS)
    x, w = torch.zeros(2, 16), torch.zeros(4, 16)
    assert layers.linear(x[:0], w).shape == (0, 4)
    with pytest.raises(ValueError, match="weights has the shape"):
        layers.linear(x, torch.zeros(4, 8))
    with pytest.raises(ValueError, match="weights has the dtype"):
        layers.linear(x, w.bfloat16())
    with pytest.raises(ValueError, match="x has the dtype float16"):
        layers.linear(x.half(), w.half())
    with pytest.raises(ValueError, match="must be contiguous in its last 1"):
        layers.linear(x, torch.zeros(16, 4).T)
    with pytest.raises(ValueError, match="bias has the shape"):
        layers.linear(x, w, torch.zeros(3))
    with pytest.raises(ValueError, match="cannot run the instruction set"):
        NativeLayers(WORKERS, "sse2")
