"""Layers with a state per request, on every ISA, against torch in float64, one token at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import DTYPES, few, own_isas, seeds
from test_linear import WORKERS, strided
from torch.nn import functional as F

from fluxion_sglang.native import NativeLayers

dtypes = st.sampled_from(DTYPES)
lengths = st.lists(st.sampled_from([0, 1, 2, 15, 64, 65, 300]), min_size=1, max_size=4)


def unit_of(dtype: torch.dtype) -> float:
    return 2.0**-8 if dtype == torch.bfloat16 else 2.0**-23


def placed(counts: list[int], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """First rows of requests with these numbers of tokens, and their slots in any order among two more."""
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return starts, torch.randperm(len(counts) + 2, generator=generator)[: len(counts)].int()


@few
@own_isas
@given(
    counts=lengths, channels=st.sampled_from([1, 7, 16, 100, 300]), taps=st.integers(1, 4), gap=st.sampled_from([0, 3]),
    bias=st.booleans(), dtype=dtypes, seed=seeds,
)  # fmt: skip
def test_convolve(
    isa: str, counts: list[int], channels: int, taps: int, gap: int, bias: bool, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    starts, slots = placed(counts, generator)
    x = strided(generator, sum(counts), channels, gap, dtype)
    weights = torch.randn(channels, taps, generator=generator).to(dtype)
    b = torch.randn(channels, generator=generator).to(dtype) if bias else None
    states = torch.randn(len(counts) + 2, channels, taps - 1, generator=generator).to(dtype)
    goes_on = torch.rand(len(counts), generator=generator) < 0.5
    before = states.clone()
    out = NativeLayers(WORKERS, isa).convolve(x, weights, b, states, slots, starts, goes_on)
    for i, slot in enumerate(slots.tolist()):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        old = before[slot] if goes_on[i] else torch.zeros_like(before[slot])
        past = torch.cat([old, x[rows].T], 1)
        if counts[i]:
            sums = F.conv1d(past[None].double(), weights[:, None].double(), groups=channels)[0].T
            most = F.conv1d(past[None].double().abs(), weights[:, None].double().abs(), groups=channels)[0].T
            want = F.silu(sums + (0 if b is None else b.double()))
            error = (out[rows].double() - want).abs()
            assert (error <= want.abs() * unit_of(dtype) + (most + 4) * 2.0**-20).all()
        assert torch.equal(states[slot], past[:, past.shape[1] - taps + 1 :])
    others = [slot for slot in range(len(states)) if slot not in slots.tolist()]
    assert torch.equal(states[others], before[others])


class Problem(NamedTuple):
    """Arguments of `NativeLayers.delta_rule`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    states: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    gates: tuple[torch.Tensor, torch.Tensor] | None

    def run(self, layers: NativeLayers, snapshots: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        return layers.delta_rule(*self[:8], gates=self.gates, snapshots=snapshots)


def problem(
    counts: list[int], key_heads: int, group: int, keys: int, values: int, dtype: torch.dtype, gated: bool, seed: int
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    starts, slots = placed(counts, generator)
    rows, heads = sum(counts), key_heads * group

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    mixed = strided(generator, rows, 2 * key_heads * keys + heads * values, 5, dtype)
    q, k, v = mixed.split([key_heads * keys, key_heads * keys, heads * values], 1)
    if gated:
        a, b, gates = drawn(rows, heads), drawn(rows, heads), (drawn(heads), drawn(heads))
    else:
        a, b, gates = -drawn(rows, heads).abs(), torch.rand(rows, heads, generator=generator), None
    states = drawn(len(counts) + 2, heads, values, keys)
    return Problem(q, k, v, a, b, states, slots, starts, gates)


def exactly(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and states in float64, from the definition."""
    states = p.states.double()
    heads, values, keys = states.shape[1:]
    q, k = (x.double().unflatten(1, (x.shape[1] // keys, keys)) for x in (p.q, p.k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q / math.sqrt(keys), k))
    v = p.v.double().unflatten(1, (heads, values))
    decay, strength = p.a.double().exp(), p.b.double()
    if p.gates is not None:
        a_log, dt_bias = (x.double() for x in p.gates)
        decay, strength = (-a_log.exp() * F.softplus(p.a.double() + dt_bias)).exp(), p.b.double().sigmoid()
    out = torch.zeros(len(q), heads, values, dtype=torch.float64)
    for i, slot in enumerate(p.slots.tolist()):
        for t in range(int(p.starts[i]), int(p.starts[i + 1])):
            state = states[slot] * decay[t][:, None, None]
            change = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * strength[t][:, None]
            states[slot] = state + change[..., None] * k[t][:, None]
            out[t] = torch.einsum("hvk,hk->hv", states[slot], q[t])
    return out.flatten(1), states


shapes = {
    "counts": lengths, "key_heads": st.integers(1, 3), "group": st.integers(1, 3),
    "keys": st.sampled_from([16, 32, 128]), "values": st.sampled_from([1, 16, 33, 128]), "dtype": dtypes,
    "gated": st.booleans(), "seed": seeds,
}  # fmt: skip


@few
@own_isas
@given(**shapes)
def test_delta_rule(isa: str, **shape: object) -> None:
    p = problem(**shape)  # type: ignore[arg-type]
    want, states = exactly(p)
    others = [slot for slot in range(len(p.states)) if slot not in p.slots.tolist()]
    before = p.states[others].clone()
    out = p.run(NativeLayers(WORKERS, isa))
    # Errors of single steps decay with the state; each is a few roundings of numbers up to about 10.
    assert torch.allclose(p.states.double(), states, rtol=1e-4, atol=1e-4)
    assert torch.allclose(out.double(), want, rtol=2 * unit_of(out.dtype), atol=1e-4)
    assert torch.equal(p.states[others], before)


@few
@own_isas
@given(**shapes, cut=st.floats(0, 1))
def test_tokens_may_be_divided_among_calls(isa: str, cut: float, **shape: object) -> None:
    """Output and states are equal bit for bit, and a snapshot is the state after the first call."""
    whole, parts = problem(**shape), problem(**shape)  # type: ignore[arg-type]
    layers = NativeLayers(WORKERS, isa)
    count = whole.starts.diff()
    first = (count * cut).int()
    at = torch.where(first < count, first, -1).int()
    snapshots = torch.full((len(count), *whole.states.shape[1:]), math.nan)
    out = whole.run(layers, (at, snapshots))
    pieces = []
    for i in range(len(count)):
        start = int(whole.starts[i])
        for begin, end in ((0, int(first[i])), (int(first[i]), int(count[i]))):
            rows = slice(start + begin, start + end)
            few_rows = (x[rows] for x in parts[:5])
            starts = torch.tensor([0, end - begin], dtype=torch.int32)
            piece = Problem(*few_rows, parts.states, parts.slots[i : i + 1], starts, parts.gates)
            pieces.append(piece.run(layers))
            if end == int(first[i]) and at[i] >= 0 and begin == 0:
                assert torch.equal(snapshots[i], parts.states[int(parts.slots[i])])
    assert torch.equal(out, torch.cat(pieces)) and torch.equal(whole.states, parts.states)
    assert snapshots[at < 0].isnan().all()


def test_one_row_each_without_starts_and_rows_that_are_not_there() -> None:
    p = problem([1] * 5, 2, 2, 16, 16, torch.float32, True, 3)
    layers = NativeLayers(WORKERS)
    states = p.states.clone()
    want = layers.delta_rule(*p[:5], states, p.slots, p.starts, gates=p.gates)
    slots = p.slots.clone()
    slots[2] = -1
    out = layers.delta_rule(*p[:5], p.states, slots, gates=p.gates)
    there = [0, 1, 3, 4]
    assert torch.equal(out[there], want[there]) and not out[2].any()
    assert torch.equal(p.states[p.slots[there].long()], states[p.slots[there].long()])
    x, weights, held = torch.randn(5, 8), torch.randn(8, 4), torch.randn(7, 8, 3)
    made = layers.convolve(x, weights, None, held.clone(), p.slots, p.starts)
    found = layers.convolve(x, weights, None, held, slots)
    assert torch.equal(found[there], made[there]) and not found[2].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_a_state_that_is_not_finite_stays_its_requests_own(dtype: torch.dtype) -> None:
    p = problem([70, 70], 2, 2, 16, 16, dtype, True, 5)
    layers = NativeLayers(WORKERS)
    clean = p._replace(states=p.states.clone())
    want = clean.run(layers)
    p.states[int(p.slots[0])] = math.nan
    out = p.run(layers)
    assert out[:70].isnan().all() and torch.equal(out[70:], want[70:])


@pytest.mark.parametrize(
    ("starts", "slots", "says"),
    [
        ([0, 3, 2, 4], [0, 1, 2], "Request 1 begins at row 3 and the next one before it"),
        ([0, 1, 2, 3], [0, 1, 2], "Requests have the rows 0 to 3 of 4"),
        ([1, 2, 3, 4], [0, 1, 2], "Requests have the rows 1 to 4 of 4"),
        ([0, 1, 2, 4], [0, 5, 2], "Request 1 has state 5, which is not among the 5"),
    ],
)
def test_numbers_that_do_not_fit(starts: list[int], slots: list[int], says: str) -> None:
    p = problem([1, 1, 2], 1, 1, 16, 16, torch.float32, True, 7)
    wrong = p._replace(starts=torch.tensor(starts, dtype=torch.int32), slots=torch.tensor(slots, dtype=torch.int32))
    before = p.states.clone()
    with pytest.raises(IndexError, match=says):
        wrong.run(NativeLayers(WORKERS))
    assert torch.equal(p.states, before)
