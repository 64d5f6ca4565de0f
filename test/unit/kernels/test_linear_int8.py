"""Linear layers with weights of 8 bits on every ISA, against torch in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import DTYPES, dtypes, few, own_isas, seeds
from test_linear import WORKERS, error_bound, strided

from fluxion_sglang.native import NativeLayers, NativeProgram, Workers
from fluxion_sglang.sglang.steps.int8_weights import GROUP, rounded

inputs = st.sampled_from([64, 128, 192, 576, 1024, 4096])
outputs = st.one_of(st.integers(1, 60), st.sampled_from([127, 257, 700]))


def drawn(generator: torch.Generator, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights [n, k] in 8 bits, their scales, and what both stand for, float64."""
    integers = torch.randint(-127, 128, (n, k), generator=generator).to(torch.int8)
    scales = torch.rand(n, k // GROUP, generator=generator).to(torch.bfloat16)
    return integers, scales, wide(integers, scales)


def wide(integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (integers.double().unflatten(1, (-1, GROUP)) * scales.double().unsqueeze(-1)).flatten(1)


def bound(x: torch.Tensor, w: torch.Tensor, want: torch.Tensor, few_rows: bool) -> torch.Tensor:
    """Beside that of sums: x loses 2^-16 of the largest of its group, or weights are rounded to the dtype of x."""
    most = x.double().abs().unflatten(1, (-1, GROUP)).amax(-1, keepdim=True) * 2.0**-15
    of_x = most.expand(-1, -1, GROUP).flatten(1) @ w.abs().T
    of_w = (x.double().abs() @ w.abs().T) * (2.0**-8 if x.dtype == torch.bfloat16 else 2.0**-23)
    return error_bound(x, w, want) + (of_x if few_rows else of_w)


@few
@own_isas
@given(m=st.integers(1, 18), k=inputs, n=outputs, gap=st.sampled_from([0, 1, 7]), bias=st.booleans(), seed=seeds)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_linear_int8(isa: str, dtype: torch.dtype, m: int, k: int, n: int, gap: int, bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = strided(generator, m, k, gap, dtype)
    integers, scales, w = drawn(generator, n, k)
    b = torch.randn(n, generator=generator).to(dtype) if bias else None
    whole = torch.full((m + 2, n + gap), math.nan, dtype=dtype)
    out = whole[1:-1, :n]
    NativeLayers(WORKERS, isa).linear_int8(x, integers, scales, b, out)
    want = x.double() @ w.T + (0 if b is None else b.double())
    assert ((out.double() - want).abs() <= bound(x, w, want, m <= 8)).all()
    assert whole[:, n:].isnan().all() and whole[[0, -1]].isnan().all(), "wrote beyond its outputs"


@own_isas
@dtypes
def test_a_row_of_a_small_batch_does_not_depend_on_others(isa: str, dtype: torch.dtype) -> None:
    """Up to eight rows, or more than eight: the same bits, with any number of workers."""
    generator = torch.Generator().manual_seed(3)
    integers, scales, _ = drawn(generator, 700, 1024)
    x, layers = torch.randn(20, 1024, generator=generator).to(dtype), NativeLayers(WORKERS, isa)
    eight, all_rows = layers.linear_int8(x[:8], integers, scales), layers.linear_int8(x, integers, scales)
    for count in (1, 2, 3, 5, 7):
        assert torch.equal(layers.linear_int8(x[:count], integers, scales), eight[:count])
    for count in (9, 16):
        assert torch.equal(layers.linear_int8(x[:count], integers, scales), all_rows[:count])
    alone = NativeLayers(Workers(1), isa)
    assert torch.equal(alone.linear_int8(x[:8], integers, scales), eight)
    assert torch.equal(alone.linear_int8(x, integers, scales), all_rows)


@own_isas
@dtypes
@pytest.mark.parametrize("m", [3, 12])
def test_what_is_not_finite_stays_in_its_row(isa: str, dtype: torch.dtype, m: int) -> None:
    x = torch.ones(m, 128, dtype=dtype)
    x[1, 70], x[2, 3] = math.nan, math.inf
    integers, scales = torch.full((40, 128), 127, dtype=torch.int8), torch.ones(40, 2, dtype=torch.bfloat16)
    out = NativeLayers(WORKERS, isa).linear_int8(x, integers, scales)
    others = [row for row in range(m) if row not in (1, 2)]
    assert not out[[1, 2]].isfinite().any() and (out[others] == 127 * 128).all()


@own_isas
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("n", [1, 17, 300])
def test_widen(isa: str, dtype: torch.dtype, n: int) -> None:
    integers, scales, w = drawn(torch.Generator().manual_seed(n), n, 192)
    out = torch.full((n, 192), math.nan, dtype=dtype)
    NativeLayers(WORKERS, isa).widen(integers, scales, out)
    assert torch.equal(out, w.to(dtype)), "an integer times a scale is exact in float32"


def test_a_program_has_them() -> None:
    layers = NativeLayers(WORKERS)
    integers, scales, _ = drawn(torch.Generator().manual_seed(1), 90, 128)
    x, out = torch.randn(2, 128), torch.empty(2, 90)
    program = NativeProgram(layers)
    program.add("linear_int8", x, integers, scales, None, out)
    for _ in range(2):
        x.normal_()
        program.run(0, 1)
        assert torch.equal(out, layers.linear_int8(x, integers, scales))


def test_wrong_arguments_are_refused() -> None:
    layers = NativeLayers(WORKERS)
    x, integers, scales = torch.randn(2, 128), torch.ones(9, 128, dtype=torch.int8), torch.ones(9, 2).bfloat16()
    with pytest.raises(ValueError, match="multiple of 64"):
        layers.linear_int8(x[:, :96], integers[:, :96].contiguous(), scales)
    with pytest.raises(ValueError, match="scales"):
        layers.linear_int8(x, integers, scales[:, :1])
    with pytest.raises(ValueError, match="scales"):
        layers.linear_int8(x, integers, scales.float())
    with pytest.raises(ValueError, match="x has the shape"):
        layers.linear_int8(x[:, :64], integers, scales)


# --- Rounding ---


@few
@given(n=st.integers(1, 5), groups=st.integers(1, 4), power=st.integers(-30, 30), seed=seeds)
@dtypes
def test_weights_are_rounded_to_the_nearest(dtype: torch.dtype, n: int, groups: int, power: int, seed: int) -> None:
    w = (torch.randn(n, groups * GROUP, generator=torch.Generator().manual_seed(seed)) * 2.0**power).to(dtype)
    integers, scales = rounded(w)
    step = scales.double().repeat_interleave(GROUP, 1)
    assert ((wide(integers, scales) - w.double()).abs() <= step / 2 * (1 + 1e-6)).all()
    largest = integers.abs().unflatten(1, (-1, GROUP)).amax(-1)
    assert ((largest >= 126) & (largest <= 127)).all(), "a scale is not larger than it has to be"


def test_nothing_tiny_and_what_is_not_finite() -> None:
    w = torch.zeros(3, GROUP)
    w[1, 5], w[2, 0] = 1e-38, -3.0
    integers, scales = rounded(w)
    assert not integers[0].any() and float(scales[0, 0]) == 0
    assert integers[2, 0] == -127 and not integers[2, 1:].any()
    w[0, 1] = math.inf
    with pytest.raises(ValueError, match=r"some weights are not finite, .* leave it out"):
        rounded(w)
