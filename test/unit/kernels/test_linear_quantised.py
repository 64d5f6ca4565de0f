"""Linear layers with quantised weights on every ISA, against torch in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import DTYPES, dtypes, few, own_isas, seeds
from quantised_world import FORMATS, drawn, formats
from test_linear import WORKERS, error_bound, strided

from fluxion_sglang.native import NativeLayers, NativeProgram, Workers
from fluxion_sglang.weights.quantised import BLOCK, Format, Quantised, pack

inputs = st.sampled_from([32, 64, 160, 576, 1024, 4096])
outputs = st.one_of(st.integers(1, 60), st.sampled_from([127, 257, 700]))


def bound(x: torch.Tensor, weight: Quantised, want: torch.Tensor) -> torch.Tensor:
    """Bound in addition to that of sums: x loses 2^-16 of the largest element of its block, and minima cancel scaled
    integers."""
    w = weight.wide().double().abs()
    most = x.double().abs().unflatten(1, (-1, BLOCK)).amax(-1, keepdim=True) * 2.0**-15
    span = w if weight.minima is None else w + 2 * weight.minima.double().abs().amax()
    return error_bound(x, span, want) + most.expand(-1, -1, BLOCK).flatten(1) @ span.T


@few
@own_isas
@given(
    form=formats,
    m=st.integers(1, 18),
    k=inputs,
    n=outputs,
    gap=st.sampled_from([0, 1, 7]),
    bias=st.booleans(),
    seed=seeds,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_linear_quantised(
    isa: str, dtype: torch.dtype, form: Format, m: int, k: int, n: int, gap: int, bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = strided(generator, m, k, gap, dtype), drawn(form, n, k, seed)
    b = torch.randn(n, generator=generator).to(dtype) if bias else None
    whole = torch.full((m + 2, n + gap), math.nan, dtype=dtype)
    out = whole[1:-1, :n]
    NativeLayers(WORKERS, isa).linear_quantised(x, pack(weight), form, b, out)
    want = x.double() @ weight.wide().double().T + (0 if b is None else b.double())
    assert ((out.double() - want).abs() <= bound(x, weight, want)).all()
    assert whole[:, n:].isnan().all() and whole[[0, -1]].isnan().all(), "wrote beyond its outputs"


@own_isas
@dtypes
@pytest.mark.parametrize("form", FORMATS[:2] + FORMATS[-2:])
def test_a_row_does_not_depend_on_others(isa: str, dtype: torch.dtype, form: Format) -> None:
    """Equal bits for any number of rows and workers."""
    packed = pack(drawn(form, 700, 1024, 3))
    x, layers = torch.randn(20, 1024, generator=torch.Generator().manual_seed(3)).to(dtype), NativeLayers(WORKERS, isa)
    want = layers.linear_quantised(x, packed, form, outputs=700)
    for count in (1, 2, 3, 5, 8, 9):
        assert torch.equal(layers.linear_quantised(x[:count], packed, form, outputs=700), want[:count])
    assert torch.equal(NativeLayers(Workers(1), isa).linear_quantised(x, packed, form, outputs=700), want)


@own_isas
@dtypes
@pytest.mark.parametrize("m", [3, 12])
def test_what_is_not_finite_stays_in_its_row(isa: str, dtype: torch.dtype, m: int) -> None:
    x = torch.ones(m, 128, dtype=dtype)
    x[1, 70], x[2, 3] = math.nan, math.inf
    form = Format(8, 64, False)
    packed = pack(Quantised(torch.full((40, 128), 127, dtype=torch.int8), torch.ones(40, 2), None, form))
    out = NativeLayers(WORKERS, isa).linear_quantised(x, packed, form, outputs=40)
    others = [row for row in range(m) if row not in (1, 2)]
    assert not out[[1, 2]].isfinite().any() and (out[others] == 127 * 128).all()


@own_isas
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMATS)
def test_widen(isa: str, dtype: torch.dtype, form: Format) -> None:
    weight = drawn(form, 53, 192, 5)
    out = torch.full((53, 192), math.nan, dtype=dtype)
    NativeLayers(WORKERS, isa).widen(pack(weight), form, out)
    torch.testing.assert_close(out, weight.wide().to(dtype), rtol=2**-7 if dtype is torch.bfloat16 else 1e-6, atol=1e-5)


def test_a_program_has_them() -> None:
    layers, form = NativeLayers(WORKERS), Format(4, 32, True)
    packed = pack(drawn(form, 90, 128, 1))
    x, out = torch.randn(2, 128), torch.empty(2, 90)
    program = NativeProgram(layers)
    program.add("linear_quantised", x, packed, form.bits, form.group, form.minima, None, out)
    for _ in range(2):
        x.normal_()
        program.run(0, 1)
        assert torch.equal(out, layers.linear_quantised(x, packed, form, outputs=90))


def test_wrong_arguments_are_refused() -> None:
    layers, form = NativeLayers(WORKERS), Format(8, 32, False)
    x, packed, out = torch.randn(2, 128), pack(drawn(form, 20, 128, 1)), torch.empty(2, 20)
    with pytest.raises(ValueError, match="x has 100 columns; quantised weights have a multiple of 32"):
        layers.linear_quantised(x[:, :100], packed, form, out=out)
    with pytest.raises(ValueError, match="weights has the shape"):
        layers.linear_quantised(x[:, :64], packed, form, out=out)
    with pytest.raises(ValueError, match="weights has the shape"):
        layers.linear_quantised(x, packed, form, outputs=33)
    for wrong in ((5, 32, False), (8, 48, False), (4, 16, False), (8, 16, True)):
        with pytest.raises(ValueError, match="The kernels have no weights of"):
            layers.compute("linear_quantised", x, packed, *wrong, None, out)
