"""Tasks that read lists of tokens, against their definition and against the torch executor."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from native_world import NativeWorld, Plan, Request
from world import on_both, same_reads

from fluxion_lab.kinds import LISTED, Listed, Record, listed
from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.native import topology
from fluxion_sglang.policy import LayerPlan, Observed, Policy, parse_spec
from fluxion_sglang.policy.base import UNSEEN, DecodeStep, task_value
from fluxion_sglang.policy.mixed import compose

Rows = list[tuple[int, list[int]]]
"""Lists of a group: logical pages, each with the mask of every head."""


def listed_of(groups: list[Rows], group: int) -> Listed:
    """The lists of B * H groups."""
    offsets = torch.tensor([0] + [len(rows) for rows in groups]).cumsum(0)
    rows = [row for rows in groups for row in rows]
    masks = torch.tensor([masks for _, masks in rows], dtype=torch.int32).view(-1, group)
    return Listed(offsets, torch.tensor([page for page, _ in rows], dtype=torch.int32), masks.to(torch.uint16))


def some_rows(draw: random.Random, placement: Placement, length: int, group: int, density: float) -> Rows:
    """A random list for a request of `length` tokens; in some pages, some or all heads list nothing."""
    first, end = placement.sink_pages, placement.window_start(length) // PAGE
    masks = (0, 0xFFFF, 1, 1 << 15)
    return [
        (page, [draw.choice(masks) if draw.random() < 0.5 else draw.getrandbits(16) for _ in range(group)])
        for page in range(first, end)
        if draw.random() < density
    ]


def positions(rows: Rows, g: int) -> list[int]:
    return [page * PAGE + t for page, masks in rows for t in range(PAGE) if masks[g] >> t & 1]


def read_of(
    world: NativeWorld, request: Request, q: torch.Tensor, h: int, rows: Rows, budgets: list[float]
) -> tuple[list[set[int]], int, int]:
    """For each head, the tokens it reads; and for the group, rows of K and V read, and keys ranked; q [G, D]."""
    middle = len(world.middle(request))
    chosen: list[set[int]] = []
    ranked: set[int] = set()
    for g, budget in enumerate(budgets):
        if not budget > 0:  # NaN is none
            chosen.append(set())
            continue
        tokens = positions(rows, g)
        count = middle if budget >= 1 else math.ceil(budget * middle * (1 - 1e-6))
        if count < len(tokens):
            ranked |= set(tokens)
            scores = request.keys[0][torch.tensor(tokens), h].double() @ q[g].double()
            tokens = [tokens[i] for i in torch.sort(scores, descending=True, stable=True).indices[:count].tolist()]
        chosen.append(set(tokens))
    return chosen, len(set().union(*chosen)), len(ranked)


@settings(max_examples=examples(60))
@given(
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=3), heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 5, 16]), density=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    budgets=st.sampled_from([(1.0,), (0.0, 1.0), (0.02, 0.3), (math.nan, 0.3), (0.0, 0.001, 0.1, 1.0, 2.0)]),
    union=st.booleans(), resident_first=st.booleans(), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_heads_read_what_they_list_or_the_best_of_it(
    lengths: list[int], heads: int, group: int, density: float, budgets: tuple[float, ...], union: bool,
    resident_first: bool, seed: int,
) -> None:  # fmt: skip
    draw = random.Random(seed)
    world = NativeWorld(heads=heads, group=group, seed=seed, attend_union=union)
    requests = [world.add(length) for length in lengths]
    world.begin_step(requests)
    lists = {
        (b, h): some_rows(draw, world.placement, request.length + 1, group, density)
        for b, request in enumerate(requests)
        for h in range(heads)
    }
    plan = world.plan(requests, LISTED)
    plan.budget = torch.tensor([draw.choice(budgets) for _ in range(plan.budget.numel())]).view_as(plan.budget)
    plan.listed = listed_of(list(lists.values()), group)
    before = world.engine.stats()
    tasks, q, out = world.begin_layer(requests, 0, plan, resident_first)
    share = {key: plan.budget[key[0], key[1] * group :][:group].tolist() for key in lists}
    assert tasks == sum(bool(rows) and any(b > 0 for b in share[key]) for key, rows in lists.items())
    chosen, rows_read, keys_ranked = {}, 0, 0
    for (b, h), rows in lists.items():
        of_group = q[b, h * group : (h + 1) * group]
        chosen[b, h], read, ranked = read_of(world, requests[b], of_group, h, rows, share[b, h])
        rows_read, keys_ranked = rows_read + read, keys_ranked + ranked
    selected = world.selections(requests, tasks)
    assert selected == {key: chosen[key] for key in selected}
    world.engine.layer_finish()
    world.check(out, world.expected(requests, 0, q, chosen))
    stats = {name: value - before[name] for name, value in world.engine.stats().items()}
    row = world.dim * world.dtype.itemsize
    assert stats["tile_bytes"] == (2 * rows_read + keys_ranked) * row and stats["metadata_bytes"] == 0
    assert stats["tokens_read"] == sum(len(tokens) for heads_of in chosen.values() for tokens in heads_of)


@pytest.mark.parametrize("isa", topology()["isas"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_isa_reads_nothing_but_what_is_listed(isa: str, dtype: torch.dtype) -> None:
    """Unlisted tokens of the middle are NaN."""
    draw = random.Random(1)
    world = NativeWorld(isa=isa, dtype=dtype, group=4)
    requests = [world.add(length) for length in (700, 815)]
    world.begin_step(requests)
    lists = [some_rows(draw, world.placement, r.length + 1, 4, 0.5) for r in requests for _ in range(world.heads)]
    plan = world.plan(requests, LISTED)
    plan.listed = listed_of(lists, 4)
    chosen = {}
    for i, rows in enumerate(lists):
        b, h = divmod(i, world.heads)
        chosen[b, h] = [set(positions(rows, g)) for g in range(4)]
        tiles = world.pool.tensor("tiles", 0)[h]
        for t in set(range(32, world.placement.window_start(requests[b].length + 1))).difference(*chosen[b, h]):
            tiles[requests[b].pages[t // PAGE], :, t % PAGE] = torch.nan
    tasks, q, out = world.begin_layer(requests, 0, plan)
    world.engine.layer_finish()
    assert tasks == 4
    world.check(out, world.expected(requests, 0, q, chosen))


def test_a_list_of_everything_gives_the_bits_of_full() -> None:
    outs = []
    for blk in (16, LISTED):
        world = NativeWorld(group=4)
        requests = [world.add(length) for length in (900, 100, 500)]
        world.begin_step(requests)
        plan = world.plan(requests, blk)
        pages = [range(2, world.placement.window_start(r.length + 1) // PAGE) for r in requests]
        plan.listed = listed_of([[(p, [0xFFFF] * 4) for p in of] for of in pages for _ in range(world.heads)], 4)
        _, _, out = world.begin_layer(requests, 0, plan)
        world.engine.layer_finish()
        outs.append(out)
    assert torch.equal(*outs)


FULL = [0xFFFF, 0xFFFF]


@pytest.mark.parametrize(
    ("groups", "offsets"),
    [
        ([[(1, FULL)], []], None),  # a sink
        ([[], [(26, FULL)]], None),  # the first page of the window
        ([[(-1, FULL)], []], None),
        ([[(1 << 30, FULL)], []], None),
        ([[(3, FULL), (3, FULL)], []], None),
        ([[(4, FULL), (3, FULL)], []], None),
        ([[(3, FULL)], []], [0, 2, 2]),
        ([[(3, FULL)], []], [0, 1, 0]),
        ([[(3, FULL)], []], [-1, 0, 1]),
        ([[(3, FULL)], []], [0, 1, 1 << 40]),
    ],
)
def test_a_list_that_cannot_be_fails_the_layer(groups: list[Rows], offsets: list[int] | None) -> None:
    world = NativeWorld()
    requests = [world.add(474)]
    world.begin_step(requests)
    good = world.plan(requests, LISTED)
    good.listed = listed_of([[(2, FULL), (25, FULL)], []], 2)
    bad = world.plan(requests, LISTED)
    bad.listed = listed_of(groups, 2)
    if offsets is not None:
        bad.listed = dataclasses.replace(bad.listed, offsets=torch.tensor(offsets))
    world.begin_layer(requests, 0, bad)
    with pytest.raises(RuntimeError, match=r"Request 0, KV head [01] has a list that cannot be read: .*\.$"):
        world.engine.layer_finish()
    _again(world, requests, good)


def test_a_plan_without_its_lists_fails_the_layer() -> None:
    world = NativeWorld()
    requests = [world.add(474)]
    world.begin_step(requests)
    world.begin_layer(requests, 0, world.plan(requests, LISTED))
    with pytest.raises(RuntimeError, match="asks for blocks of -1 tokens"):
        world.engine.layer_finish()


def _again(world: NativeWorld, requests: list[Request], plan: Plan) -> None:
    """A next step works after a failed layer, whose token was appended."""
    world.begin_step(requests)
    tasks, q, out = world.begin_layer(requests, 0, plan)
    world.engine.layer_finish()
    read = {*range(32, 48), *range(400, 416)}
    assert tasks == 1
    world.check(out, world.expected(requests, 0, q, {(0, 0): [read, read]}))


class Lister(Policy):
    """Lists random tokens; a request's list does not depend on its place in the batch."""

    def __init__(self, seed: int, budgets: tuple[float, ...]) -> None:
        self.seed, self.budgets = seed, budgets
        self.step: DecodeStep | None = None

    def begin_step(self, step: DecodeStep) -> None:
        self.step = step

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        step = self.step
        assert step is not None
        group = step.q_heads // step.kv_heads
        lists: list[Rows] = []
        budgets = []
        for row, length in zip(step.rows.tolist(), step.seq_lens.tolist(), strict=True):
            draw = random.Random(f"{self.seed} {layer} {row} {length}")
            for _ in range(step.kv_heads):
                lists.append(some_rows(draw, Placement(), length, group, draw.random()))
            budgets.append([draw.choice(self.budgets) for _ in range(step.q_heads)])
        blk = torch.full((step.batch, step.kv_heads), LISTED, dtype=torch.int32)
        budget = torch.tensor(budgets)
        return LayerPlan(blk, budget, task_value(step.middle, blk, budget), (listed_of(lists, group),))


@settings(max_examples=examples(20))
@given(
    lengths=st.lists(st.integers(300, 1500), min_size=1, max_size=3), group=st.sampled_from([1, 4, 7]),
    budgets=st.sampled_from([(1.0,), (0.05, 0.3), (0.0, 0.01, 1.0)]), seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_native_and_torch_read_the_same_lists(
    lengths: list[int], group: int, budgets: tuple[float, ...], seed: int, dtype: torch.dtype
) -> None:
    """On integers the ranking is determined, ties included: same reads, same outputs."""
    policies = [Lister(seed, budgets)] * len(lengths)
    outs, stats = on_both(lengths, 2, policies, seed=seed, whole=True, dtype=dtype, group=group)
    same_reads(stats)
    tolerance = 2e-5 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(*outs, atol=tolerance, rtol=tolerance)


def test_a_mixture_has_the_lists_of_each_policy() -> None:
    lengths = [1000, 500, 1400, 900, 1200, 310]
    one, other, fixed = Lister(1, (1.0,)), Lister(2, (0.5, 1.0)), parse_spec("fixed:16:0.1")
    policies = [one, fixed, other, one, other, other]

    def planned(policy: Policy, rows: list[int]) -> LayerPlan:
        of = torch.tensor([lengths[row] for row in rows])
        policy.begin_step(DecodeStep.build(torch.tensor(rows), of, Placement(), kv_heads=2, q_heads=8))
        return policy.plan(3, torch.zeros(len(rows), 8, 64))

    whole = planned(compose(policies), list(range(6)))
    lists = listed(whole)
    assert lists is not None and lists.masks.dtype == torch.uint16
    for b, policy in enumerate(policies):
        alone = planned(policy, [b])
        assert torch.equal(whole.blk[b : b + 1], alone.blk) and torch.equal(whole.budget[b : b + 1], alone.budget)
        ends, own = lists.offsets[2 * b : 2 * b + 3], listed(alone)
        if own is None:
            assert ends.diff().tolist() == [0, 0]
            continue
        assert torch.equal(ends - ends[0], own.offsets)
        assert torch.equal(lists.pages[ends[0] : ends[2]], own.pages)
        assert lists.masks[ends[0] : ends[2]].tolist() == own.masks.tolist()
    assert listed(planned(compose([fixed, parse_spec("full")]), [0, 1])) is None


def test_a_mixture_of_mixtures_hands_its_record_back() -> None:
    """Each part gets the entries that the tasks of the whole batch wrote for it."""
    parts = [listed_of([[(4, FULL)], [(5, FULL), (6, FULL)]], 2) for _ in range(3)]
    for part in parts:
        part.record = Record(torch.zeros_like(part.masks), torch.zeros(*part.masks.shape, PAGE))
    inner = Listed.joined([(torch.tensor([1]), parts[0]), (torch.tensor([0]), parts[1])], (2, 2))
    whole = Listed.joined([(torch.tensor([0, 2]), inner), (torch.tensor([1]), parts[2])], (3, 2))
    assert whole.record is not None
    whole.record.scores.copy_(torch.arange(9).view(9, 1, 1))
    assert [part.recorded().scores[:, 0, 0].tolist() for part in parts] == [[6, 7, 8], [0, 1, 2], [3, 4, 5]]
