"""Layers whose attention has a window or attention sinks (logits without value; `executor/variant.py`), on the native
engine."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from native_world import NativeWorld, Request, attention, take
from world import World

from fluxion_sglang.executor.decode import native_plan
from fluxion_sglang.executor.variant import Variant
from fluxion_sglang.kv.placement import Placement
from fluxion_sglang.native import AttentionLayer, topology
from fluxion_sglang.policy.base import LayerPlan
from fluxion_sglang.scoring.audit_file import read

ISAS: list[str] = topology()["isas"]
# Lengths before the step, around every boundary of pages, sinks 32 and window 48.
LENGTHS = [0, 1, 15, 16, 31, 47, 80, 95, 127, 250, 607]


def fused(world: NativeWorld, batch: int) -> tuple[torch.Tensor, ...]:
    return world.randn(batch, world.q_heads + 2 * world.heads, world.dim).split(
        [world.q_heads, world.heads, world.heads], dim=1
    )


def wanted(
    world: NativeWorld, requests: list[Request], layer: int, q: torch.Tensor, window: int | None,
    sinks: torch.Tensor | None, cap: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Attention to the newest tokens, float64 [B, Hq, D]; the requests include the new token."""
    out = torch.empty(len(requests), world.q_heads, world.dim, dtype=torch.float64)
    for b, request in enumerate(requests):
        seen = slice(max(len(request.keys[layer]) - (window or 1 << 30), 0), None)
        for head in range(world.q_heads):
            keys, values = (kv[layer][seen, head // world.group] for kv in (request.keys, request.values))
            o, lse = attention(q[b, head], keys, values, world.scale, cap)
            out[b, head] = o if sinks is None else o * torch.sigmoid(lse - sinks[head].double())
    return out


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=examples(20))
@given(
    lengths=st.lists(st.sampled_from(LENGTHS) | st.integers(0, 400), min_size=1, max_size=4),
    window=st.integers(1, 700) | st.sampled_from([1, 15, 16, 17, 64]),
    logits=st.booleans(),
    cap=st.sampled_from([0.0, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    heads=st.integers(1, 3),
    group=st.integers(1, 8),
    workers=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_a_layer_with_a_window(
    isa: str, lengths: list[int], window: int, logits: bool, cap: float, dtype: torch.dtype, heads: int, group: int,
    workers: int, seed: int,
) -> None:  # fmt: skip
    world = NativeWorld(heads=heads, group=group, dtype=dtype, workers=workers, isa=isa, seed=seed)
    requests = [world.add(n) for n in lengths]
    sinks = torch.randn(world.q_heads, generator=world.random) * 3 if logits else None
    for _ in range(3):
        world.begin_step(requests)
        q, k, v = fused(world, len(requests))
        out = torch.full((len(requests), world.q_heads, world.dim), math.nan, dtype=dtype)
        at = AttentionLayer(world.engine, 0, world.scale, None, sinks, cap, window)
        world.engine.layer_newest(at, q, k, v, out)
        take(requests, 0, k, v)
        world.check(out, wanted(world, requests, 0, q, window, sinks, cap))
    for request in requests:
        keys, values = world.pool.gather(0, torch.tensor(request.pages, dtype=torch.int32))
        assert torch.equal(keys[:, : len(request.keys[0])].transpose(0, 1), request.keys[0])
        assert torch.equal(values[:, : len(request.keys[0])].transpose(0, 1), request.values[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("resident_first", [False, True])
@settings(max_examples=examples(10))
@given(
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    group=st.integers(1, 8),
    cap=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 2**16),
)
def test_logits_without_value_are_part_of_the_softmax(
    isa: str, resident_first: bool, lengths: list[int], dtype: torch.dtype, group: int, cap: float, seed: int
) -> None:
    """In a layer that reads everything, fused or with the residents first. The parts do not change. The cap applies to
    scores only, not to these logits."""
    world = NativeWorld(group=group, dtype=dtype, isa=isa, seed=seed)
    requests = [world.add(n) for n in lengths]
    sinks = torch.randn(world.q_heads, generator=world.random) * 3
    sinks[0] = -math.inf
    world.begin_step(requests)
    q, k, v = fused(world, len(requests))
    out = torch.full((len(requests), world.q_heads, world.dim), math.nan, dtype=dtype)
    everything = world.plan(requests)
    plan = native_plan(LayerPlan(everything.blk, everything.budget, everything.value))
    at = AttentionLayer(world.engine, 0, world.scale, world.windows[0], sinks, cap)
    if resident_first:
        parts, plain = torch.empty(len(requests), world.q_heads, 5), torch.empty(len(requests), world.q_heads, 5)
        without = AttentionLayer(world.engine, 0, world.scale, world.windows[0], None, cap)
        world.engine.layer_resident(without, q, k, v, plain)
        world.engine.layer_resident(at, q, None, None, parts)
        assert torch.equal(parts, plain)
        world.engine.layer_begin(plan, at, q, None, None, out)
    else:
        world.engine.layer_begin(plan, at, q, k, v, out)
    world.engine.layer_finish()
    take(requests, 0, k, v)
    world.check(out, wanted(world, requests, 0, q, None, sinks, cap))


def test_what_cannot_be_is_refused_and_loses_nothing() -> None:
    world = NativeWorld()
    requests = [world.add(40), world.add(70)]
    world.begin_step(requests)
    q, k, v = fused(world, 2)
    out = torch.full((2, world.q_heads, world.dim), math.nan)
    before = world.pool.tensor("tiles", 0).clone()
    for window in (0, -1, -(2**40)):
        with pytest.raises(ValueError, match="attends at least to itself"):
            AttentionLayer(world.engine, 0, world.scale, newest=window)
    with pytest.raises(ValueError, match="sinks has the shape"):
        AttentionLayer(world.engine, 0, world.scale, sinks=torch.zeros(3))
    with pytest.raises(ValueError, match="no layer 7"):
        AttentionLayer(world.engine, 7, world.scale)
    for cap in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="a cap of logits is above 0"):
            AttentionLayer(world.engine, 0, world.scale, cap=cap)
    with pytest.raises(ValueError, match="Layer 0 has no window"):
        world.engine.layer_newest(world.at(), q, k, v, out)
    assert torch.equal(world.pool.tensor("tiles", 0), before) and out.isnan().all()
    requests[1].pages[0] = 10**6
    world.engine.step(
        torch.tensor([r.row for r in requests], dtype=torch.int32),
        torch.tensor([r.length + 1 for r in requests], dtype=torch.int32),
        world.table(requests),
    )
    with pytest.raises(RuntimeError, match=r"Layer 0: Request 1 cannot be computed"):
        world.engine.layer_newest(AttentionLayer(world.engine, 0, world.scale, newest=16), q, k, v, out)
    take(requests[:1], 0, k, v)
    world.check(out[:1], wanted(world, requests[:1], 0, q, 16, None))


def test_one_pass_has_layers_of_both_kinds() -> None:
    """Prefill and decode of a model whose first and last layers have windows, under a policy that observes."""
    variants = [Variant(40, cap=3.0), Variant(cap=1.5), Variant(300), Variant(7)]
    exact = ("full", "sketch:0.000001")
    for policy in (*exact, "anchor:0.05", "psa:0.9:16:quest", "lfps:1:1e-9:1e-9"):
        world = World(layers=4, policy=policy, variants=variants, placement=Placement(sinks=32, window=48))
        world.extend(1, 700)
        world.extend(2, 33)
        for _ in range(20):
            for (got, want), variant in zip(world.decode([1, 2]), variants, strict=True):
                if policy in exact or variant.window is not None:
                    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)
                else:
                    assert got.isfinite().all()


def test_the_audit_has_no_records_of_layers_with_a_window(tmp_path: Path) -> None:
    sinks = torch.randn(8)
    variants = [Variant(40), Variant(sinks=sinks), Variant(), Variant(7)]
    world = World(layers=4, policy="fixed:16:0.1", variants=variants, audit=tmp_path / "audit.npy")
    world.extend(1, 900)
    world.decode([1])
    world.decode([1])
    records = np.concatenate(read(tmp_path / "audit.npy")[0])
    assert records["layer"].tolist() == [1, 2, 1, 2]
    assert ((records["error"] >= 0) & (records["error"] < 1)).all() and (records["error"] > 0).any()
