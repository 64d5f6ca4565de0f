"""Mixtures of experts on every ISA, against torch in float64 and against separate linear layers."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import DTYPES, dtypes, few, own_isas, seeds
from quantised_world import FORMATS, drawn
from test_linear import WORKERS, strided
from torch.nn import functional as F

from fluxion_sglang.native import NativeLayers, NativeProgram, Workers
from fluxion_sglang.weights.quantised import Format, Quantised, pack

EIGHT = Format(8, 32, False)
forms = st.one_of(st.none(), st.sampled_from(FORMATS))


class Experts(NamedTuple):
    """Weights in kernel format and in float64; quantised if formats are given."""

    gate_up: torch.Tensor
    down: torch.Tensor
    forms: tuple[Format, Format] | None
    exact_gate_up: torch.Tensor
    exact_down: torch.Tensor
    biases: tuple[torch.Tensor, torch.Tensor] | None = None
    clamped: tuple[float, float] | None = None

    def run(self, layers: NativeLayers, x: torch.Tensor, choice: Choice, gelu: bool = False) -> torch.Tensor:
        act = {"biases": self.biases, "clamped": self.clamped, "gelu": gelu}
        return layers.experts(x, *choice, self.gate_up, self.down, self.forms, **act)


class Choice(NamedTuple):
    ids: torch.Tensor
    weights: torch.Tensor


def made(count: int, hidden: int, inner: int, dtype: torch.dtype, form: Format | None, seed: int) -> Experts:
    if form is None:
        generator = torch.Generator().manual_seed(seed)
        gate_up = torch.randn(count, 2 * inner, hidden, generator=generator).to(dtype) * hidden**-0.5
        down = torch.randn(count, hidden, inner, generator=generator).to(dtype) * inner**-0.5
        return Experts(gate_up, down, None, gate_up.double(), down.double())
    small = [
        [smaller(drawn(form, n, k, seed + e), k) for e in range(count)]
        for n, k in ((2 * inner, hidden), (hidden, inner))
    ]
    packed = [torch.stack([pack(expert) for expert in experts]) for experts in small]
    exact = [torch.stack([expert.wide().double() for expert in experts]) for experts in small]
    return Experts(*packed, (form, form), *exact)


def biased(of: Experts, clamped: tuple[float, float] | None, seed: int) -> Experts:
    generator = torch.Generator().manual_seed(seed)
    biases = [
        torch.randn(len(of.gate_up), n, generator=generator)
        for n in (of.exact_gate_up.shape[1], of.exact_down.shape[1])
    ]
    return of._replace(biases=tuple(biases), clamped=clamped)


def smaller(weight: Quantised, inputs: int) -> Quantised:
    """The same weights, scaled to about 1 / sqrt(inputs)."""
    factor = 2.0 ** -round(math.log2(inputs) / 2 + (6 if weight.format.bits == 8 else 3))
    least = None if weight.minima is None else weight.minima * factor
    return Quantised(weight.integers, weight.scales * factor, least, weight.format)


def chosen(rows: int, k: int, count: int, seed: int, repeat: bool = False) -> Choice:
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, count, generator=generator).argsort(1)[:, :k]
    ids = torch.randint(0, count, (rows, k), generator=generator) if repeat else order
    return Choice(ids.int().contiguous(), torch.rand(rows, k, generator=generator))


def exactly(x: torch.Tensor, choice: Choice, of: Experts, gelu: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the magnitude to which its rounding errors are relative."""
    act = (lambda g: F.gelu(g, approximate="tanh")) if gelu else F.silu
    bias, down_bias = (
        (part.double() for part in of.biases)
        if of.biases
        else (0 * of.exact_gate_up[..., 0], 0 * of.exact_down[..., 0])
    )
    out, size = torch.zeros(x.shape, dtype=torch.float64), torch.zeros(x.shape, dtype=torch.float64)
    for row, (ids, weights) in enumerate(zip(*choice, strict=True)):
        for expert, weight in zip(ids.tolist(), weights.double(), strict=True):
            both = of.exact_gate_up[expert] @ x[row].double() + bias[expert]
            most = of.exact_gate_up[expert].abs() @ x[row].double().abs() + bias[expert].abs()
            down = of.exact_down[expert]
            if of.clamped is None:
                (gate, up), (gates, ups) = both.chunk(2), most.chunk(2)
                inner = act(gate) * up
            else:
                alpha, limit = of.clamped
                (gate, up), (gates, ups) = both.view(-1, 2).T, most.view(-1, 2).T + 1
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                inner = gate * torch.sigmoid(alpha * gate) * (up + 1)
            out[row] += weight * (down @ inner + down_bias[expert])
            size[row] += weight * (down.abs() @ ((gates + 1) * ups) + down_bias[expert].abs())
    return out, size


def one_by_one(layers: NativeLayers, x: torch.Tensor, choice: Choice, of: Experts, gelu: bool) -> torch.Tensor:
    """The same by linear layers: every row and expert separately, in ascending order of experts."""
    out = torch.empty_like(x)
    for row, (ids, weights) in enumerate(zip(*choice, strict=True)):
        total = torch.zeros(x.shape[1])
        for slot in ids.sort(stable=True).indices.tolist():
            gate_up, down = of.gate_up[ids[slot]], of.down[ids[slot]]
            bias, down_bias = (part[ids[slot]] for part in of.biases) if of.biases else (None, None)
            if of.forms is None:
                both = layers.linear(x[row : row + 1], gate_up)
            else:
                both = layers.linear_quantised(x[row : row + 1], gate_up, of.forms[0], outputs=len(gate_up) * 16)
            both = both if bias is None else (both.float() + bias).to(x.dtype)
            inner = layers.gate_mul(both, gelu=gelu)
            if of.forms is None:
                one = layers.linear(inner, down)
            else:
                one = layers.linear_quantised(inner, down, of.forms[1], outputs=x.shape[1])
            one = one if down_bias is None else (one.float() + down_bias).to(x.dtype)
            total += weights[slot] * one[0].float()
        out[row] = total.to(x.dtype)
    return out


@few
@own_isas
@given(
    rows=st.integers(1, 40),
    count=st.integers(1, 9),
    k=st.integers(1, 4),
    hidden=st.sampled_from([1, 31, 64, 100, 224]),
    inner=st.sampled_from([1, 7, 33, 64, 150]),
    form=forms,
    gelu=st.booleans(),
    with_bias=st.booleans(),
    clamped=st.sampled_from([None, (1.702, 7.0), (1.0, 0.5)]),
    repeat=st.booleans(),
    gap=st.sampled_from([0, 5]),
    seed=seeds,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_experts(
    isa: str,
    dtype: torch.dtype,
    rows: int,
    count: int,
    k: int,
    hidden: int,
    inner: int,
    form: Format | None,
    gelu: bool,
    with_bias: bool,
    clamped: tuple[float, float] | None,
    repeat: bool,
    gap: int,
    seed: int,
) -> None:
    if form is not None:
        hidden, inner = -(-hidden // 32) * 32, -(-inner // 32) * 32
    x = strided(torch.Generator().manual_seed(seed), rows, hidden, gap, dtype)
    choice = chosen(rows, min(k, count), count, seed, repeat)
    of, layers = made(count, hidden, inner, dtype, form, seed), NativeLayers(WORKERS, isa)
    of = biased(of, clamped, seed) if with_bias else of._replace(clamped=clamped)
    got = of.run(layers, x, choice, gelu)
    want, size = exactly(x, choice, of, gelu)
    unit = 2.0**-6 if dtype is torch.bfloat16 else (hidden + inner) * 2.0**-23 + 2.0**-19
    spread = 1.0 if form is None else 2.0**-14
    assert ((got.double() - want).abs() <= (unit + (0 if form is None else spread)) * size + 1e-30).all()
    if clamped is None:
        assert torch.equal(got, one_by_one(layers, x, choice, of, gelu))


@own_isas
@dtypes
@pytest.mark.parametrize("form", [None, EIGHT])
@pytest.mark.parametrize("clamped", [None, (1.702, 7.0)])
def test_a_row_does_not_depend_on_others(
    isa: str, dtype: torch.dtype, form: Format | None, clamped: tuple[float, float] | None
) -> None:
    """Equal bits for any number of rows, workers, and experts chosen by other rows."""
    of, layers = biased(made(16, 512, 96, dtype, form, 3), clamped, 3), NativeLayers(WORKERS, isa)
    x = torch.randn(700, 512, generator=torch.Generator().manual_seed(3)).to(dtype)
    choice = chosen(700, 4, 16, 5)
    want = of.run(layers, x, choice)
    for rows in ([0], [5, 6], range(3, 20), range(500, 530), [699]):
        at = torch.tensor(list(rows))
        some = Choice(choice.ids[at], choice.weights[at])
        assert torch.equal(of.run(layers, x[at], some), want[at])
        assert torch.equal(of.run(NativeLayers(Workers(1), isa), x[at], some), want[at])


@own_isas
@dtypes
def test_an_expert_that_nobody_chose_is_not_read(isa: str, dtype: torch.dtype) -> None:
    of = made(5, 64, 32, dtype, None, 1)
    choice, x = Choice(torch.tensor([[4, 1], [1, 4], [1, 1]], dtype=torch.int32), torch.rand(3, 2)), torch.randn(3, 64)
    layers = NativeLayers(WORKERS, isa)
    want = of.run(layers, x.to(dtype), choice)
    for expert in (0, 2, 3):
        of.gate_up[expert] = of.down[expert] = math.nan
    assert want.isfinite().all() and torch.equal(of.run(layers, x.to(dtype), choice), want)


def test_experts_may_lie_apart() -> None:
    of, layers = made(6, 64, 32, torch.float32, None, 1), NativeLayers(WORKERS)
    x, choice = torch.randn(4, 64), chosen(4, 2, 3, 1)
    every_other = Experts(of.gate_up[::2], of.down[::2], None, of.exact_gate_up[::2], of.exact_down[::2])
    want = every_other._replace(gate_up=every_other.gate_up.contiguous(), down=every_other.down.contiguous())
    assert torch.equal(every_other.run(layers, x, choice), want.run(layers, x, choice))


@pytest.mark.parametrize("form", [None, EIGHT])
def test_a_program_has_them(form: Format | None) -> None:
    of, layers = made(8, 64, 32, torch.float32, form, 1), NativeLayers(WORKERS)
    x, choice, out = torch.randn(3, 64), chosen(3, 2, 8, 1), torch.empty(3, 64)
    program = NativeProgram(layers)
    one = () if form is None else (form.bits, form.group, form.minima)
    name = "experts" if form is None else "experts_quantised"
    program.add(name, x, *choice, of.gate_up, *one, None, of.down, *one, None, False, 0.0, 0.0, out)
    for seed in range(3):
        x.normal_()
        new = chosen(3, 2, 8, seed)
        choice.ids.copy_(new.ids)
        program.run(0, 1)
        assert torch.equal(out, of.run(layers, x, choice))


@pytest.mark.parametrize("wrong", [-1, 8, 2**31 - 1])
def test_an_expert_that_is_not_there_is_refused_before_anything_is_computed(wrong: int) -> None:
    of, layers = made(8, 64, 32, torch.float32, None, 1), NativeLayers(WORKERS)
    choice, out = chosen(3, 2, 8, 1), torch.full((3, 64), 7.0)
    choice.ids[2, 1] = wrong
    with pytest.raises(IndexError, match=f"the expert {wrong}, which is not among the 8 of the layer"):
        layers.compute("experts", torch.randn(3, 64), *choice, of.gate_up, None, of.down, None, False, 0.0, 0.0, out)
    assert (out == 7).all()


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_that_choose_no_expert_are_zeros(rows: int) -> None:
    of = made(8, 64, 32, torch.float32, None, 1)
    none, weights = torch.empty(rows, 0, dtype=torch.int32), torch.empty(rows, 0)
    assert not NativeLayers(WORKERS).experts(torch.randn(rows, 64), none, weights, of.gate_up, of.down).any()


def test_wrong_arguments_are_refused() -> None:
    layers, x, choice = NativeLayers(WORKERS), torch.randn(3, 64), chosen(3, 2, 8, 1)
    of, packed = made(8, 64, 32, torch.float32, None, 1), made(8, 64, 32, torch.float32, EIGHT, 1)
    forms = EIGHT, EIGHT
    with pytest.raises(ValueError, match="gate_up has 63 rows an expert"):
        layers.experts(x, *choice, of.gate_up[:, 1:].contiguous(), of.down)
    with pytest.raises(ValueError, match="down has the shape"):
        layers.experts(x, *choice, of.gate_up, of.down[:7])
    with pytest.raises(ValueError, match="down_bias has the shape"):
        layers.experts(x, *choice, of.gate_up, of.down, biases=(torch.zeros(8, 64), torch.zeros(8, 63)))
    with pytest.raises(ValueError, match="gate_up has 3 panels an expert; it has a multiple of 4"):
        layers.experts(x, *choice, packed.gate_up[:, 1:].contiguous(), packed.down, forms)
    with pytest.raises(ValueError, match="gate_up has the shape"):
        layers.experts(x, *choice, packed.gate_up[:, :, 1:].contiguous(), packed.down, forms)
    with pytest.raises(ValueError, match="ids has the dtype int64 and must have int32"):
        layers.experts(x, choice.ids.long(), choice.weights, of.gate_up, of.down)
    with pytest.raises(ValueError, match="x has 60 columns; quantised weights have a multiple of 32"):
        layers.experts(x[:, :60], *choice, packed.gate_up, packed.down, forms)
