"""Linear layers, norms and activations on every ISA, against torch in float64."""

from __future__ import annotations

import ctypes
import math
import mmap
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import DTYPES, OWN_ISAS, dtypes, few, own_isas, seeds

from fluxion_sglang.native import NativeLayers, NativeProgram, Workers

WORKERS = Workers(2)
HUGE_PAGE = 2 << 20
sizes = st.one_of(st.integers(1, 80), st.sampled_from([127, 128, 257, 1024, 2049, 4100]))
rows = st.one_of(st.integers(1, 18))


def error_bound(x: torch.Tensor, w: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Bound for float32 sums in any order, rounded once; instructions may flush denormals to zero."""
    sums = (x.double().abs() @ w.double().abs().T) * (x.shape[1] + 8) * 2.0**-24
    unit = 2.0**-8 if x.dtype == torch.bfloat16 else 2.0**-23
    return sums + want.abs() * unit + 1e-30


def strided(generator: torch.Generator, n: int, size: int, gap: int, dtype: torch.dtype) -> torch.Tensor:
    """[n, size] with rows `gap` elements apart, poison between them."""
    whole = torch.full((n, size + gap), math.nan, dtype=dtype)
    whole[:, :size] = torch.randn(n, size, generator=generator).to(dtype)
    return whole[:, :size]


@few
@own_isas
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


@own_isas
@dtypes
@pytest.mark.parametrize(("n", "k"), [(2816, 1024), (1024, 2816), (700, 4096)])
def test_a_row_does_not_depend_on_others(isa: str, dtype: torch.dtype, n: int, k: int) -> None:
    """Rows are equal bit for bit alone, in a batch of any size, and with any number of workers."""
    generator = torch.Generator().manual_seed(n)
    x, w = torch.randn(13, k, generator=generator).to(dtype), torch.randn(n, k, generator=generator).to(dtype)
    layers = NativeLayers(WORKERS, isa)
    whole = layers.linear(x, w)
    for count in (1, 2, 3, 5, 8, 9):
        assert torch.equal(layers.linear(x[:count], w), whole[:count])
    assert torch.equal(NativeLayers(Workers(1), isa).linear(x, w), whole)


@own_isas
@dtypes
def test_what_is_not_finite_stays_in_its_row(isa: str, dtype: torch.dtype) -> None:
    x, w = torch.ones(3, 70, dtype=dtype), torch.ones(40, 70, dtype=dtype)
    x[1, 69] = math.nan
    w[7, 3] = math.inf
    out = NativeLayers(WORKERS, isa).linear(x, w)
    assert out[1].isnan().all() and not out[[0, 2]].isnan().any()
    assert (out[[0, 2], 7] == math.inf).all() and (out[0][:7] == 70).all() and (out[2][8:] == 70).all()


def ulps(dtype: torch.dtype, n: float) -> float:
    """Relative error of a result after n roundings in dtype."""
    return n * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-23)


def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


@few
@own_isas
@dtypes
@given(m=rows, n=sizes, gap=st.sampled_from([0, 3]), scale=st.sampled_from([1e-3, 1.0, 1e3]), seed=seeds)
def test_norm(isa: str, dtype: torch.dtype, m: int, n: int, gap: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (strided(generator, m, n, gap, dtype) * scale for _ in range(2))
    weight = torch.randn(n, generator=generator).to(dtype)
    layers = NativeLayers(WORKERS, isa)
    rtol = ulps(dtype, 8) + n * 2.0**-24  # the sum of squares, in any order
    torch.testing.assert_close(
        layers.norm(x, weight, 1e-5).double(), normed(x.double(), weight.double(), 1e-5), rtol=rtol, atol=0
    )
    out, total = layers.add_norm(x, residual, weight, 1e-5)
    exact = x.float() + residual.float()
    assert torch.equal(total, exact.to(dtype)), "the sum is rounded once"
    want = normed(exact.double(), weight.double(), 1e-5)
    torch.testing.assert_close(out.double(), want, rtol=rtol, atol=0)
    raised = weight.double() + 1
    close = {"rtol": rtol, "atol": 0.0}
    torch.testing.assert_close(
        layers.norm(x, weight, 1e-5, gemma=True).double(), normed(x.double(), raised, 1e-5), **close
    )
    out, total = layers.add_norm(x, residual, weight, 1e-5, gemma=True)
    assert torch.equal(total, exact.to(dtype))
    torch.testing.assert_close(out.double(), normed(total.double(), raised, 1e-5), **close)


@few
@own_isas
@dtypes
@given(m=rows, n=sizes, gap=st.sampled_from([0, 3]), scale=st.sampled_from([0.1, 1.0, 30.0]), seed=seeds)
def test_gate_mul(isa: str, dtype: torch.dtype, m: int, n: int, gap: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = strided(generator, m, 2 * n, gap, dtype) * scale
    x[0, 0] = -200  # here a power of the wrong sign would overflow; below -87 the power is 0
    want = torch.nn.functional.silu(x[:, :n].double()) * x[:, n:].double()
    layers = NativeLayers(WORKERS, isa)
    torch.testing.assert_close(layers.gate_mul(x).double(), want, rtol=ulps(dtype, 8), atol=1e-33)
    want = torch.nn.functional.gelu(x[:, :n].double(), approximate="tanh") * x[:, n:].double()
    got = layers.gate_mul(x, gelu=True).double()
    # Far below 0 a GELU is the difference of nearly equal numbers, so float32 has few correct digits.
    close = (got - want).abs() <= ulps(dtype, 16) * want.abs() + 2e-6 * x[:, n:].double().abs()
    assert close.all()


def test_silu_of_what_is_no_number() -> None:
    x = torch.tensor([[math.nan, math.inf, -math.inf, 1.0, 1.0, 1.0]])
    for gelu in (False, True):
        got = NativeLayers(WORKERS).gate_mul(x, gelu=gelu)[0]
        assert got[0].isnan() and got[1] == math.inf


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, halves: bool) -> torch.Tensor:
    """RoPE as SGLang computes it: every product and sum is rounded to the dtype."""
    a, b = x.chunk(2, -1) if halves else (x[..., ::2], x[..., 1::2])
    parts = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat(parts, -1) if halves else torch.stack(parts, -1).flatten(-2)


@few
@own_isas
@dtypes
@given(
    m=rows, heads=st.tuples(st.integers(1, 5), st.integers(1, 3)), head_dim=st.sampled_from([16, 64, 80, 128]),
    part=st.sampled_from([1.0, 0.5]), halves=st.booleans(), seed=seeds,
)  # fmt: skip
def test_rope_has_the_bits_of_torch(
    isa: str, dtype: torch.dtype, m: int, heads: tuple[int, int], head_dim: int, part: float, halves: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rotary = int(part * head_dim)
    widths = [h * head_dim for h in heads]
    both = torch.randn(m, sum(widths) + 5, generator=generator).to(dtype)
    q, k, _ = both.split([*widths, 5], -1)
    angles = torch.rand(33, rotary // 2, generator=generator) * 6.3
    table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    positions = torch.randint(0, 33, (m,), generator=generator)
    got = NativeLayers(WORKERS, isa).rope(positions, q, k, table, head_dim, halves)
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
    for x, out in zip((q, k), got, strict=True):
        x = x.reshape(m, -1, head_dim)
        want = torch.cat((turned(x[..., :rotary], cos, sin, halves), x[..., rotary:]), -1)
        assert out.is_contiguous() and torch.equal(out.view_as(want), want)


def test_many_rows_are_divided() -> None:
    """As in prefill: a row's result does not depend on the number of rows."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(700, 1024, generator=generator), torch.randn(512, generator=generator)
    layers, one = NativeLayers(WORKERS), NativeLayers(Workers(1))
    assert torch.equal(layers.gate_mul(x), one.gate_mul(x))
    left, right = x.chunk(2, -1)
    for a, b in zip(layers.add_norm(left, right, weight, 1e-6), one.add_norm(left, right, weight, 1e-6), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(layers.norm(left, weight, 1e-6)[5:6], layers.norm(left[5:6], weight, 1e-6))


# --- Packed weights ---

PACKING = [isa for isa in OWN_ISAS if NativeLayers(WORKERS, isa).panel]
packing_isas = pytest.mark.parametrize("isa", PACKING)
outputs = st.one_of(st.integers(1, 80), st.sampled_from([24, 48, 96, 257]))
inputs = st.sampled_from([32, 64, 480, 512, 544, 1024, 1056, 2048, 2272])


def bits(generator: torch.Generator, *size: int) -> torch.Tensor:
    """Any bfloat16 bit patterns, including infinities and NaN; compared as integers."""
    return torch.randint(-(2**15), 2**15, size, generator=generator, dtype=torch.int16).view(torch.bfloat16)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@few
@packing_isas
@given(n=outputs, k=inputs, seed=seeds)
def test_packed_weights_come_back(isa: str, n: int, k: int, seed: int) -> None:
    layers = NativeLayers(WORKERS, isa)
    weights = bits(torch.Generator().manual_seed(seed), n, k)
    rows, packed, unpacked = weights.clone(), torch.empty_like(weights), torch.empty_like(weights)
    layers.repack(weights, packed)
    assert same_bits(weights, rows)
    whole = n // layers.panel * layers.panel
    assert same_bits(packed[whole:], rows[whole:])
    assert k == 32 or whole == 0 or not same_bits(packed[:whole], rows[:whole])
    layers.repack(packed, unpacked, unpack=True)
    assert same_bits(unpacked, rows)
    layers.repack(weights)
    assert same_bits(weights, packed)
    layers.repack(weights, unpack=True)
    assert same_bits(weights, rows)


@packing_isas
def test_panels_are_packed_by_themselves(isa: str) -> None:
    """Panels can be unpacked separately; packing is the same with any number of workers."""
    layers, one = NativeLayers(WORKERS, isa), NativeLayers(Workers(1), isa)
    weights = bits(torch.Generator().manual_seed(0), 5 * layers.panel + 7, 1056)
    packed, part = weights.clone(), slice(2 * layers.panel, 4 * layers.panel)
    one.repack(packed)
    rows = torch.empty_like(weights[part])
    layers.repack(packed[part], rows, unpack=True)
    assert same_bits(rows, weights[part])


@few
@packing_isas
@given(m=st.integers(1, 40), n=outputs, k=inputs, gap=st.sampled_from([0, 7]), bias=st.booleans(), seed=seeds)
def test_packed_weights_give_the_same_bits(isa: str, m: int, n: int, k: int, gap: int, bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layers = NativeLayers(WORKERS, isa)
    x, w = strided(generator, m, k, gap, torch.bfloat16), torch.randn(n, k, generator=generator).to(torch.bfloat16)
    b = torch.randn(n, generator=generator).to(torch.bfloat16) if bias else None
    want = layers.linear(x, w, b)
    whole = torch.full((m + 2, n + gap), math.nan, dtype=torch.bfloat16)
    order = torch.zeros(1, dtype=torch.int32)
    assert same_bits(layers.linear(x, w, b, order=order), want)
    layers.repack(w)
    order.fill_(1)
    got = layers.linear(x, w, b, whole[1:-1, :n], order)
    assert same_bits(got, want)
    assert whole[:, n:].isnan().all() and whole[[0, -1]].isnan().all(), "wrote beyond its outputs"


@packing_isas
@pytest.mark.parametrize(("n", "k"), [(1000, 4096), (130, 14336)])
def test_large_packed_layers_give_the_same_bits(isa: str, n: int, k: int) -> None:
    """For every number of rows that the kernels treat differently, and any number of workers."""
    generator = torch.Generator().manual_seed(n)
    x, w = (torch.randn(count, k, generator=generator).to(torch.bfloat16) for count in (40, n))
    layers, one = NativeLayers(WORKERS, isa), NativeLayers(Workers(1), isa)
    assert layers.gains_from_packing(w)
    want, order = layers.linear(x, w), torch.ones(1, dtype=torch.int32)
    layers.repack(w)
    for count in range(1, 41):
        assert same_bits(layers.linear(x[:count], w, order=order), want[:count])
    assert same_bits(one.linear(x, w, order=order), want)


@packing_isas
def test_a_program_looks_up_the_order_when_it_runs(isa: str) -> None:
    layers = NativeLayers(WORKERS, isa)
    program, order = NativeProgram(layers), torch.zeros(1, dtype=torch.int32)
    x, w = (torch.randn(count, 2112).to(torch.bfloat16) for count in (5, 100))
    want, out = layers.linear(x, w), torch.empty(5, 100, dtype=torch.bfloat16)
    program.add("linear", x, w, order, None, out)
    for packed in (0, 1, 1, 0):
        if packed != int(order):
            layers.repack(w, unpack=not packed)
            order.fill_(packed)
        out.fill_(math.nan)
        program.run(0, 1)
        assert same_bits(out, want)


@own_isas
@dtypes
def test_what_gains_from_being_packed(isa: str, dtype: torch.dtype) -> None:
    """Only weights with inputs so wide that eight rows of x exceed the nearest cache, on an ISA with panels, in
    bfloat16."""
    layers = NativeLayers(WORKERS, isa)
    packs = bool(layers.panel) and dtype == torch.bfloat16
    assert layers.gains_from_packing(torch.empty(100, 1 << 16, dtype=dtype)) == packs
    for rows, columns in ((100, 512), (layers.panel - 1, 1 << 16), (100, (1 << 16) + 16)):
        assert not layers.gains_from_packing(torch.empty(max(rows, 0), columns, dtype=dtype))
    assert not layers.gains_from_packing(torch.empty(100, 1 << 17, dtype=dtype)[:, : 1 << 16])


@own_isas
def test_bad_arguments_of_packing(isa: str) -> None:
    layers, w = NativeLayers(WORKERS, isa), torch.zeros(48, 64, dtype=torch.bfloat16)
    x, order = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="No weights of this dtype are packed"):
        layers.repack(w.float())
    if not layers.panel:
        with pytest.raises(ValueError, match="No weights of this dtype are packed"):
            layers.repack(w)
        with pytest.raises(ValueError, match="No weights of this dtype are packed"):
            layers.linear(x, w, order=order)
        return
    wide = torch.zeros(48, 96, dtype=torch.bfloat16)
    for call, sentence in (
        (lambda: layers.repack(wide[:, :48].contiguous()), "weights has 48 columns; packed ones have a multiple of 32"),
        (lambda: layers.repack(w[:, :0].contiguous()), "columns"),
        (lambda: layers.linear(x, wide[:, :64], order=order), "must be contiguous"),
        (lambda: layers.repack(w[1:], w[:-1]), "out overlaps"),
        (lambda: layers.linear(x, w, order=order.long()), "order has the dtype"),
        (lambda: layers.linear(x, w, order=torch.zeros(2, dtype=torch.int32)), "order has the shape"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
    layers.repack(w[:0])


def test_bad_arguments() -> None:
    """Combinations that do not fit; test_arguments.py tests single arguments."""
    layers = NativeLayers(WORKERS)
    x, w, table = torch.zeros(2, 16), torch.zeros(4, 16), torch.ones(4, 8)
    assert layers.linear(x[:0], w).shape == (0, 4)
    with pytest.raises(ValueError, match="x has the dtype float16"):
        layers.linear(x.half(), w.half())
    with pytest.raises(IndexError, match="Position 4 is not among the 4"):
        layers.rope(torch.tensor([0, 4]), x, x, table, 8, True)
    with pytest.raises(ValueError, match="q has 16 columns"):
        layers.rope(torch.tensor([0, 1]), x, x, table, 6, True)
    with pytest.raises(ValueError, match="cannot run the instruction set"):
        NativeLayers(WORKERS, "sse2")


def test_a_program_computes_its_layers_again() -> None:
    """It uses the current contents of its tensors, for any range of its layers."""
    layers = NativeLayers(WORKERS)
    program = NativeProgram(layers)
    x, w, h, out = torch.randn(2, 16), torch.randn(32, 16), torch.empty(2, 32), torch.empty(2, 16)
    program.add("linear", x, w, None, None, h)
    program.add("gate_mul", h, False, out)
    assert len(program) == 2
    for _ in range(3):
        x.normal_()
        out.fill_(math.nan)
        program.run(0, 1)
        assert torch.equal(h, layers.linear(x, w)) and out.isnan().all()
        program.run(1, 2)
        assert torch.equal(out, layers.gate_mul(h))
    program.run(1, 1)
    for first, last in ((0, 3), (-1, 1), (2, 1)):
        with pytest.raises(IndexError, match="among the program's 2"):
            program.run(first, last)


def test_a_program_takes_what_layers_take() -> None:
    program = NativeProgram(NativeLayers(WORKERS))
    x, table, positions = torch.zeros(1, 16), torch.ones(4, 8), torch.tensor([3])
    with pytest.raises(ValueError, match="weights has the shape"):
        program.add("linear", x, torch.zeros(4, 8), None, None, torch.zeros(1, 4))
    assert len(program) == 0
    program.add("rope", positions, x, x, table, 8, True, torch.zeros(1, 16), torch.zeros(1, 16))
    program.run(0, 1)
    positions.fill_(4)  # a tensor's contents count when the layer is computed
    with pytest.raises(IndexError, match="Position 4 is not among the 4"):
        program.run(0, 1)


MADV_NOHUGEPAGE, MADV_COLLAPSE = 15, 25


def in_huge_pages(t: torch.Tensor) -> int:
    """Bytes in huge pages of the mappings that contain t."""
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) < t.data_ptr() + t.nbytes and t.data_ptr() < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) << 10
    return total


def needs_huge_pages_when_asked() -> None:
    beside = torch.ones(1 << 24, dtype=torch.uint8)
    start = -(-beside.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(4 * HUGE_PAGE), MADV_COLLAPSE):
        pytest.skip("this kernel moves nothing into huge pages when asked (Linux 6.1 does)")


def test_weights_move_into_huge_pages_and_stay_as_they_are() -> None:
    weights = torch.randn(3001, 4099).to(torch.bfloat16)[:, :4096]
    before = weights.clone()
    NativeLayers.into_huge_pages(weights)
    assert torch.equal(weights, before)
    needs_huge_pages_when_asked()
    assert in_huge_pages(weights) >= weights.nbytes - 2 * HUGE_PAGE


def test_weights_beside_what_stays_in_small_pages_move() -> None:
    """Memory before and after them, in the same huge pages, may be a thread's stack, which the kernel refuses to
    collapse."""
    memory = mmap.mmap(-1, 8 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.bfloat16)
    start = -whole.data_ptr() % HUGE_PAGE
    for apart in (start, start + 6 * HUGE_PAGE + HUGE_PAGE // 2):
        memory.madvise(MADV_NOHUGEPAGE, apart, HUGE_PAGE // 2)
    weights = whole[(start + HUGE_PAGE // 2) // 2 :][: 6 * HUGE_PAGE // 2].view(-1, 4096).normal_()
    before = weights.clone()
    NativeLayers.into_huge_pages(weights)
    assert torch.equal(weights, before)
    needs_huge_pages_when_asked()
    assert in_huge_pages(weights) == 5 * HUGE_PAGE


def test_what_is_smaller_than_a_huge_page_may_be_asked_for() -> None:
    for weights in (torch.randn(0, 8), torch.randn(3, 8), torch.randn(3, 8)[1:2]):
        before = weights.clone()
        NativeLayers.into_huge_pages(weights)
        assert torch.equal(weights, before)
    with pytest.raises(ValueError, match="weights"):
        NativeLayers.into_huge_pages(torch.zeros(2, 2, 2))
