"""Attention layers of a native program, against the same layers begun and finished one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from native_world import NativeWorld, Request, take
from world import World

from fluxion_sglang.executor.accounts import StepAccounts
from fluxion_sglang.executor.decode import native_plan
from fluxion_sglang.executor.observer import Observer
from fluxion_sglang.native import AttentionLayer, NativeLayers, NativeProgram
from fluxion_sglang.policy import parse_spec
from fluxion_sglang.policy.base import SKETCHED, LayerPlan
from fluxion_sglang.policy.sketch import SketchedTokens

LAYERS = 3
NEWEST = 40
"""Window of the layer in the middle."""


@dataclass
class Inputs:
    """Inputs of all layers of a step, in memory that the program keeps."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


def inputs(world: NativeWorld, batch: int) -> Inputs:
    fused = world.randn(LAYERS, batch, world.q_heads + 2 * world.heads, world.dim)
    q, k, v = fused.split([world.q_heads, world.heads, world.heads], dim=2)
    return Inputs(q, k, v, torch.full((LAYERS, batch, world.q_heads, world.dim), math.nan, dtype=world.dtype))


def layers_of(world: NativeWorld, sinks: torch.Tensor | None) -> list[AttentionLayer]:
    def at(layer: int) -> AttentionLayer:
        windowed = layer == 1
        windows = None if windowed else world.windows[layer]
        return AttentionLayer(world.engine, layer, world.scale, windows, sinks, 2.0, NEWEST if windowed else None)

    return [at(layer) for layer in range(LAYERS)]


def take_all(requests: list[Request], given: Inputs) -> None:
    """Add the step's token to the requests."""
    for layer in range(LAYERS):
        take(requests, layer, given.k[layer], given.v[layer])


def apart(world: NativeWorld, at: list[AttentionLayer], given: Inputs, plan: LayerPlan, looks: bool) -> None:
    native = native_plan(plan)
    for layer in range(LAYERS):
        q, k, v, out = given.q[layer], given.k[layer], given.v[layer], given.out[layer]
        if layer == 1:
            world.engine.layer_newest(at[layer], q, k, v, out)
            continue
        if looks:
            world.engine.layer_resident(at[layer], q, k, v, torch.empty(*q.shape[:2], 5))
        world.engine.layer_begin(native, at[layer], q, None if looks else k, None if looks else v, out)
        world.engine.layer_finish()


@pytest.mark.parametrize("sketched", [False, True])
@settings(max_examples=examples(8))
@given(
    lengths=st.lists(st.sampled_from([1, 15, 79, 80, 300, 701]), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    logits=st.booleans(),
    steps=st.integers(1, 3),
    workers=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**16),
)
def test_a_program_attends_as_single_layers_do(
    sketched: bool, lengths: list[int], dtype: torch.dtype, logits: bool, steps: int, workers: int, seed: int
) -> None:
    """Bit for bit, step after step; reads are counted equally."""
    ours, theirs = (
        NativeWorld(layers=LAYERS, dtype=dtype, workers=workers, seed=seed, sketched=sketched) for _ in range(2)
    )
    sinks = torch.randn(ours.q_heads) if logits else None
    requests = [[world.add(n) for n in lengths] for world in (ours, theirs)]
    groups = len(lengths), ours.heads
    given = inputs(ours, len(lengths))
    program, at = NativeProgram(NativeLayers(ours.pool.workers)), layers_of(ours, sinks)
    for layer in range(LAYERS):
        program.attend(ours.engine, at[layer], given.q[layer], given.k[layer], given.v[layer], given.out[layer])
    apart_at = layers_of(theirs, sinks)
    for _ in range(steps):
        blk = torch.full(groups, SKETCHED if sketched else 32, dtype=torch.int32)
        kinds = (SketchedTokens(torch.full(groups, 0.2)),) if sketched else ()
        plan = LayerPlan(blk, torch.full((len(lengths), ours.q_heads), 0.3), torch.zeros(groups), kinds)
        new = inputs(theirs, len(lengths))
        for mine, other in zip((given.q, given.k, given.v), (new.q, new.k, new.v), strict=True):
            mine.copy_(other)
        given.out.fill_(math.nan)
        for world, of in zip((ours, theirs), requests, strict=True):
            world.begin_step(of)
        ours.engine.plan_step(native_plan(plan), residents_first=sketched)
        program.run(0, LAYERS)
        apart(theirs, apart_at, new, plan, looks=sketched)
        assert torch.equal(given.out, new.out) and given.out.isfinite().all()
        for of in requests:
            take_all(of, new)
    assert ours.engine.stats() == theirs.engine.stats()


def test_a_step_without_a_plan_is_refused_and_loses_nothing() -> None:
    world = NativeWorld(layers=LAYERS)
    requests = [world.add(300), world.add(40)]
    given = inputs(world, 2)
    program, at = NativeProgram(NativeLayers(world.pool.workers)), layers_of(world, None)
    for layer in range(LAYERS):
        program.attend(world.engine, at[layer], given.q[layer], given.k[layer], given.v[layer], given.out[layer])
    world.begin_step(requests)
    with pytest.raises(RuntimeError, match="no plan for all of its layers"):
        program.run(0, 1)
    plan = world.plan(requests)
    world.engine.plan_step(native_plan(LayerPlan(plan.blk, plan.budget, plan.value)), residents_first=False)
    program.run(0, LAYERS)
    assert given.out.isfinite().all()
    world.begin_step(requests)  # the plan belonged to the other step
    with pytest.raises(RuntimeError, match="no plan for all of its layers"):
        program.run(0, 1)
    world.begin_step(requests[:1])
    with pytest.raises(ValueError, match="The program is for 2 requests, and the step has 1"):
        program.run(0, 1)
    with pytest.raises(ValueError, match="The plan is for 2 requests"):
        world.engine.plan_step(native_plan(LayerPlan(plan.blk, plan.budget, plan.value)), residents_first=False)


@pytest.mark.parametrize(
    ("policies", "steady"),
    [
        (["full"], True),
        (["streaming", "fixed:32:0.1"], True),
        (["sketch", "full"], True),
        (["psa:0.95"], False),
        (["full", "hgca:0.25"], False),
    ],
)
def test_programs_attend_where_the_plan_is_known_before_the_first_layer(policies: list[str], steady: bool) -> None:
    world = World(policy="sketch", rows=4)
    for row in (1, 2):
        world.extend(row, 600)
    specs = [parse_spec(spec) for spec in policies]
    world.decode([1, 2], [specs[0], specs[-1]])
    assert world.engine.plan_step() is steady


def test_programs_do_not_attend_where_layers_are_watched() -> None:
    world = World(rows=4)
    world.extend(1, 600)
    shape = world.pool.shape
    world.engine.accounts = accounts = StepAccounts(shape, sampled=2)
    programs = []
    for _ in range(6):
        world.decode([1])
        programs.append(world.engine.plan_step())
    assert programs == [False, True] * 3, "every second step is looked at"
    assert accounts.totals().steps == 6

    class Watches(Observer):
        pass

    world.engine.observers.append(Watches())
    world.decode([1])
    world.decode([1])
    assert not world.engine.plan_step()
