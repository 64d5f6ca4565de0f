"""Tasks that read the blocks within reach, and how far a head has to reach, against float64 and against one another."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from effort import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from native_world import NativeWorld, Request, attention, layer_begin, rank_blocks

from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.lab.progressive import by_criticality
from fluxion_sglang.lab.torch_executor import block_pages
from fluxion_sglang.native import topology
from fluxion_sglang.policy.reach import BLK, Reach
from fluxion_sglang.predictor.criterion import Deviation
from fluxion_sglang.predictor.measure import Reaches, measure_reach

SPREAD, GATE_BLK, GATE_SPREAD = 0.5, 128, 0.4
"""Those of `csrc/engine/reach.h`."""

NEAR = 1e-4
"""Nearer to a threshold float32 may decide otherwise."""

ISAS: list[str] = topology()["isas"]
isas = pytest.mark.parametrize("isa", ISAS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


class GridWorld(NativeWorld):
    """Numbers on a grid of quarters: scores are nearly exact in float32, and some of them are equal."""

    def randn(self, *size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=self.random) * 4).round().div(4).to(self.dtype)


@dataclass
class Head:
    """What the references ask of one head. All in logits; `blocks`: tokens of each block of 16; `clear`: their order
    is beyond float32's doubt."""

    logits: torch.Tensor
    scores: torch.Tensor
    coarse: torch.Tensor
    resident: list[int]
    blocks: list[list[int]]
    clear: bool

    def known(self, read: set[int]) -> float:
        tokens = [*self.resident, *(t for i in read for t in self.blocks[i])]
        return float(self.logits[tokens].logsumexp(0)) if tokens else -math.inf


def head_of(world: NativeWorld, request: Request, h: int, q: torch.Tensor, length: int | None = None) -> Head:
    """Head h with the query q [D], when the request had so many tokens."""
    length = request.length if length is None else length
    placement = world.placement
    middle = placement.middle(length)
    keys = request.keys[0][:length, h // world.group]

    def blocks(blk: int) -> list[list[int]]:
        return [
            [page * PAGE + t for page in pages for t in range(PAGE)]
            for pages in block_pages(middle, blk, placement.sink_pages)
        ]

    fine = blocks(BLK)
    inside = {t for tokens in fine for t in tokens}
    scores, clear = rank_blocks(q.unsqueeze(0), keys, fine, SPREAD)
    coarse, _ = rank_blocks(q.unsqueeze(0), keys, blocks(GATE_BLK), GATE_SPREAD)
    return Head(
        (keys.double() @ q.double()) * world.scale,
        scores[0] * world.scale,
        coarse[0] * world.scale,
        [t for t in range(length) if t not in inside],
        fine,
        clear,
    )


def read_within(
    heads: list[Head], reach: list[float], gate: list[float], union: bool
) -> tuple[list[set[int]], int, float]:
    """The blocks that each head of a group attends to, how many were read (where heads do not share, some are read in
    two microbatches), and how near a decision was to its threshold, at the least."""
    margin, tiles = math.inf, 0
    read: list[set[int]] = [set() for _ in heads]
    orders = [by_criticality(head.scores) for head in heads]

    def less(a: float, b: float) -> bool:
        nonlocal margin
        if math.isfinite(a) and math.isfinite(b):
            margin = min(margin, abs(a - b))
        return a < b

    going = [
        g
        for g, head in enumerate(heads)
        if gate[g] == math.inf or not less(float(head.coarse.max()), head.known(set()) - gate[g])
    ]
    while True:
        quota = 2 if tiles < 16 else tiles // 8
        batch: dict[int, list[int]] = {}
        for g in going:
            left = [i for i in orders[g] if i not in read[g]]
            if not left:
                continue
            own = set(orders[g][: orders[g].index(left[0])])
            if not less(float(heads[g].scores[left[0]]), heads[g].known(own) - reach[g]):
                batch[g] = left[:quota]
        going = list(batch)
        if not batch:
            return read, tiles, margin
        tiles += len({i for blocks in batch.values() for i in blocks})
        for g in range(len(heads)):
            for other, blocks in batch.items():
                if union or other == g:
                    read[g] |= set(blocks)


def run(
    world: NativeWorld, requests: list[Request], q: torch.Tensor, reach: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor, dict[tuple[int, int], list[set[int]]], torch.Tensor]:
    """A decode step of one layer: its output, what every group's heads attended to, and what tasks read in bytes."""
    world.begin_step(requests)
    batch = len(requests)
    k, v = (world.randn(batch, world.heads, world.dim) for _ in range(2))
    out = torch.full((batch, world.q_heads, world.dim), torch.nan, dtype=world.dtype)
    plan = world.plan(requests, BLK)
    engine = world.engine
    engine.layer_resident(0, q, k, v, world.windows[0], world.scale, torch.empty(batch, world.q_heads, 5))
    for b, request in enumerate(requests):
        request.keys[0] = torch.cat([request.keys[0], k[b : b + 1]])
        request.values[0] = torch.cat([request.values[0], v[b : b + 1]])
    tasks = layer_begin(
        engine, 0, q, None, None, None, plan.blk, torch.ones(batch, world.q_heads), plan.value, world.scale, out,
        owner=torch.zeros(batch, world.heads, dtype=torch.int32), reach=Reach(reach, gate),
    )  # fmt: skip
    chosen = world.selections(requests, tasks)
    engine.layer_finish()
    reads = torch.empty(batch, world.heads, 2, dtype=torch.int64)
    engine.reads(reads)
    return out, chosen, reads


REACHES = [-math.inf, -2.0, 0.5, 3.0, 10.0, math.inf]


@isas
@dtypes
@settings(max_examples=examples(30), deadline=None)
@given(
    seed=st.integers(0, 2**16),
    group=st.sampled_from([1, 2, 3, 8]),
    union=st.booleans(),
    size=st.sampled_from([0.3, 1.0, 4.0]),
    lengths=st.lists(st.integers(60, 1500), min_size=1, max_size=3),
    data=st.data(),
)
def test_what_is_within_reach_is_read(
    isa: str,
    dtype: torch.dtype,
    seed: int,
    group: int,
    union: bool,
    size: float,
    lengths: list[int],
    data: st.DataObject,
) -> None:
    world = NativeWorld(isa=isa, dtype=dtype, seed=seed, group=group, attend_union=union, pages=400)
    requests = [world.add(n) for n in lengths]
    q = (world.randn(len(requests), world.q_heads, world.dim).float() * size).to(world.dtype)
    some = st.lists(st.sampled_from(REACHES), min_size=q.shape[0] * q.shape[1], max_size=q.shape[0] * q.shape[1])
    reach, gate = (torch.tensor(data.draw(some)).view(q.shape[:2]) for _ in range(2))
    out, chosen, reads = run(world, requests, q, reach, gate)
    for b, request in enumerate(requests):
        for h in range(world.heads):
            if not world.middle(request):
                continue
            group_of = range(h * group, (h + 1) * group)
            heads = [head_of(world, request, g, q[b, g]) for g in group_of]
            read, count, margin = read_within(
                heads, [float(reach[b, g]) for g in group_of], [float(gate[b, g]) for g in group_of], union
            )
            assume(margin > NEAR and all(head.clear for head in heads))
            want = [{t for i in blocks for t in head.blocks[i]} for head, blocks in zip(heads, read, strict=True)]
            assert chosen[b, h] == want
            tiles = count * 2 * PAGE * world.dim * world.dtype.itemsize
            assert reads[b, h, 0] == tiles
            pages, blocks = len(heads[0].blocks), len(heads[0].coarse)
            if not tiles and bool((gate[b, list(group_of)] < math.inf).all()):
                assert reads[b, h, 1] <= (blocks + pages) * 2 * world.dim * world.dtype.itemsize + pages * 256
    world.check(out, world.expected(requests, 0, q, chosen))


def test_without_a_gate_nothing_is_scanned() -> None:
    """Where no head comes near, the metadata of blocks of 16 is not touched."""
    world = NativeWorld(pages=400)
    request = world.add(1400)
    nothing = torch.full((1, world.q_heads), -math.inf)
    _, chosen, reads = run(world, [request], world.randn(1, world.q_heads, world.dim), nothing, nothing)
    assert chosen[0, 0] == [set()] * world.group
    fine = len(world.middle(request)) // PAGE * 2 * world.dim * world.dtype.itemsize
    assert reads[0, 0, 0] == 0
    assert 0 < reads[0, 0, 1] < fine


def test_everything_within_reach_is_exact() -> None:
    world = NativeWorld(pages=400)
    requests = [world.add(900), world.add(300)]
    everything = torch.full((2, world.q_heads), math.inf)
    q = world.randn(2, world.q_heads, world.dim)
    out, chosen, _ = run(world, requests, q, everything, everything)
    for b, request in enumerate(requests):
        assert all(heads == set(world.middle(request)) for h in range(world.heads) for heads in chosen[b, h])
    world.check(out, world.expected(requests, 0, q, chosen))


@pytest.mark.parametrize(
    ("reach", "gate", "blk", "what"),
    [
        (torch.tensor([[0.0, torch.nan, 0.0, 0.0]]), torch.zeros(1, 4), 16, "without a reach or without a gate"),
        (torch.zeros(1, 4), torch.tensor([[0.0, torch.nan, 0.0, 0.0]]), 16, "without a reach or without a gate"),
        (torch.zeros(1, 4), torch.zeros(1, 4), 32, "reaches are of 16"),
        (torch.zeros(1, 3), torch.zeros(1, 3), 16, r"reach has the shape \[1, 3\]"),
        (torch.zeros(1, 4), torch.zeros(1, 3), 16, "gate"),
    ],
)
def test_plans_that_cannot_be(reach: torch.Tensor, gate: torch.Tensor, blk: int, what: str) -> None:
    world = NativeWorld(pages=100)
    request = world.add(600)
    world.begin_step([request])
    q, k, v = (world.randn(1, heads, world.dim) for heads in (world.q_heads, world.heads, world.heads))
    world.engine.layer_resident(0, q, k, v, world.windows[0], world.scale, torch.empty(1, world.q_heads, 5))
    plan = world.plan([request], blk)
    with pytest.raises((ValueError, RuntimeError), match=what):
        layer_begin(
            world.engine, 0, q, None, None, None, plan.blk, torch.ones(1, world.q_heads), plan.value, world.scale,
            torch.empty_like(q), reach=Reach(reach, gate),
        )  # fmt: skip
        world.engine.layer_finish()


def measured(world: NativeWorld, request: Request, lengths: list[int], q: torch.Tensor, tau: float) -> Reaches:
    pages = torch.tensor(request.pages, dtype=torch.int32)
    at = torch.tensor(lengths, dtype=torch.int32)
    return measure_reach(world.pool, 0, pages, at, q, world.scale, world.placement.window, (Deviation.LAYER, tau))


@pytest.mark.parametrize("what", ["query", "key"])
def test_what_is_no_number_reads_everything(what: str) -> None:
    """And plans with such a reach are legal: they would end all requests of the pass otherwise."""
    world = NativeWorld(pages=400)
    request = world.add(700)
    q = world.randn(2, world.q_heads, world.dim)
    if what == "query":
        q[0, 1] = torch.nan
    else:
        world.pool.tensor("tiles", 0)[:, request.pages[9], 0, 3] = torch.nan
    found = measured(world, request, [700, 700], q, 0.1)
    assert not found.reach.isnan().any() and not found.gate.isnan().any()
    bad = (0, 1) if what == "query" else slice(None)
    assert bool((found.reach[bad] == math.inf).all())
    if what == "query":
        assert float(found.gate[bad]) == math.inf and bool(found.reach[1].isfinite().all())


def output(head: Head, values: torch.Tensor, read: set[int]) -> torch.Tensor:
    tokens = sorted([*head.resident, *(t for i in read for t in head.blocks[i])])
    return head.logits[tokens].softmax(0) @ values[tokens].double()


@isas
@dtypes
@settings(max_examples=examples(25), deadline=None)
@given(
    seed=st.integers(0, 2**16),
    group=st.sampled_from([1, 2, 4]),
    size=st.sampled_from([1.0, 4.0]),
    tau=st.sampled_from([0.02, 0.1, 0.5]),
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=4),
)
def test_measured_reaches(
    isa: str, dtype: torch.dtype, seed: int, group: int, size: float, tau: float, lengths: list[int]
) -> None:
    """The first prefix of the order that meets the criterion, and the least reach that comes to its last block."""
    world = GridWorld(isa=isa, dtype=dtype, seed=seed, group=group)
    request = world.add(700)
    q = (world.randn(len(lengths), world.q_heads, world.dim).float() * size).to(world.dtype)
    found = measured(world, request, lengths, q, tau)
    for i, length in enumerate(lengths):
        heads = (
            [head_of(world, request, h, q[i, h], length) for h in range(world.q_heads)]
            if (world.placement.middle(length))
            else []
        )
        if not heads:
            assert bool((found.reach[i] == -math.inf).all()) and bool((found.gate[i] == -math.inf).all())
            continue
        values = [request.values[0][:length, h // group] for h in range(world.q_heads)]
        exact = [output(head, v, set(range(len(head.blocks)))) for head, v in zip(heads, values, strict=True)]
        largest = max(float(o.norm()) for o in exact)
        for h, head in enumerate(heads):
            read: set[int] = set()
            want, error = -math.inf, float((output(head, values[h], read) - exact[h]).norm()) / largest
            order = by_criticality(head.scores)
            ties = len(set(head.scores.tolist())) < len(order)
            near = abs(error - tau) < NEAR
            for block in order:
                if error <= tau:
                    break
                want = max(want, head.known(read) - float(head.scores[block]))
                read.add(block)
                error = float((output(head, values[h], read) - exact[h]).norm()) / largest
                near |= abs(error - tau) < NEAR
            if near or ties:
                continue
            assert float(found.reach[i, h]) == pytest.approx(want, abs=2e-3, rel=2e-3)
            gate = -math.inf if want == -math.inf else head.known(set()) - float(head.coarse.max())
            assert float(found.gate[i, h]) == pytest.approx(gate, abs=2e-3, rel=2e-3)


@isas
@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 2**16), length=st.integers(100, 1400), size=st.sampled_from([1.0, 3.0]))
def test_what_was_measured_is_enough(isa: str, seed: int, length: int, size: float) -> None:
    """A head that reads by the reach that was measured for its very query reads what the criterion asks for."""
    tau = 0.1
    world = NativeWorld(isa=isa, seed=seed, group=2, attend_union=False, pages=400)
    request = world.add(length)
    q = world.randn(1, world.q_heads, world.dim) * size
    pages = torch.tensor(request.pages, dtype=torch.int32)
    # The step's own token is not there yet: what is measured here is of the query without it.
    found = measure_reach(
        world.pool, 0, pages, torch.tensor([request.length], dtype=torch.int32), q, world.scale,
        world.placement.window, (Deviation.LAYER, tau),
    )  # fmt: skip
    needed: list[set[int]] = []
    for h in range(world.q_heads):
        head = head_of(world, request, h, q[0, h]) if world.middle(request) else None
        blocks: set[int] = set()
        if head is not None and float(found.reach[0, h]) > -math.inf:
            for block in by_criticality(head.scores):
                if float(head.scores[block]) < head.known(blocks) - float(found.reach[0, h]) - NEAR:
                    break
                blocks.add(block)
        needed.append(blocks)
    values = [request.values[0][:, h // world.group] for h in range(world.q_heads)]
    exact = [attention(q[0, h], request.keys[0][:, h // world.group], values[h], world.scale)[0] for h in range(4)]
    largest = max(float(o.norm()) for o in exact)
    for h in range(world.q_heads):
        if not world.middle(request) or not needed[h]:
            continue
        head = head_of(world, request, h, q[0, h])
        # Errors need not fall from block to block, so what is read beyond the first prefix may raise it a little.
        prefix: set[int] = set()
        best = math.inf
        for block in by_criticality(head.scores):
            if len(prefix) == len(needed[h]):
                break
            prefix.add(block)
            best = min(best, float((output(head, values[h], prefix) - exact[h]).norm()) / largest)
        assert best <= tau + NEAR


def test_hostile_measurements() -> None:
    world = NativeWorld()
    request = world.add(300)
    pages, q = torch.tensor(request.pages, dtype=torch.int32), world.randn(1, world.q_heads, world.dim)
    lengths, good = torch.tensor([300], dtype=torch.int32), (Deviation.LAYER, 0.1)
    with pytest.raises(ValueError, match="length 9999"):
        measured(world, request, [9999], q, 0.1)
    with pytest.raises(ValueError, match="window"):
        measure_reach(world.pool, 0, pages, lengths, q, world.scale, 3, good)
    with pytest.raises(ValueError, match="kind"):
        measure_reach(world.pool, 0, pages, lengths, q, world.scale, 48, (7, 0.1))
    assert measured(world, request, [], q[:0], 0.1).reach.shape == (0, world.q_heads)
