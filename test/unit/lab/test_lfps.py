"""The policy lfps in the engine: the choices of its tasks, what it learns, and the lifetime of its state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from lfps_reference import ReferenceHead
from lfps_world import listed_positions, lists_of
from native_world import NativeWorld
from world import World

from fluxion_lab.bounded import Bounded
from fluxion_lab.kinds import LISTED, Given, Listed, Record
from fluxion_lab.lfps import ROWS, LfpsPolicy
from fluxion_lab.lfps_tables import LfpsOptions, LfpsTables
from fluxion_sglang.native import topology
from fluxion_sglang.policy import Policy, parse_spec
from fluxion_sglang.policy.base import DecodeStep, LayerPlan

SPEC = "lfps:0.05"


def policy_of(world: World) -> LfpsPolicy:
    policy = world.engine.policy
    assert isinstance(policy, Bounded) and isinstance(policy.inner, LfpsPolicy)
    return policy.inner


def tables_of(world: World) -> LfpsTables:
    tables = policy_of(world).tables
    assert tables is not None
    return tables


class Watched(LfpsPolicy):
    """Records its plan and the results of the last step, per layer."""

    def begin_step(self, step: DecodeStep) -> None:
        super().begin_step(step)
        self.plans: dict[int, LayerPlan] = {}
        self.local: dict[int, torch.Tensor] = {}

    def decoded(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        super().decoded(layer, q, out)
        assert self._planned is not None
        plan, self.local[layer], _ = self._planned
        lists = lists_of(plan)
        record = Record(*(t.clone() for t in lists.recorded()))
        copy = Listed(lists.offsets.clone(), lists.pages.clone(), lists.masks.clone(), record, lists.given)
        self.plans[layer] = LayerPlan(plan.blk, plan.budget, plan.value, (copy,))


@pytest.mark.parametrize("executors", ["cpu", "cpu+torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_requests_follow_the_equations(executors: str, dtype: torch.dtype) -> None:
    """From prefill through steps of a batch, in every layer: candidates, the exact best of them, tables and outputs."""
    world = World(executors=executors, dtype=dtype, seed=1)
    policy = Watched(0.02, LfpsOptions(bypass=1.0))
    for row, length in ((1, 900), (3, 600)):
        world.extend(row, length)
        for layer in range(world.layers):
            world.engine.prefilled(layer, row, length, world.recent[row][layer], policy)
    heads = [(row, layer, head) for row in (1, 3) for layer in range(world.layers) for head in range(8)]
    reference = {key: ReferenceHead(world.placement, 1024) for key in heads}
    for (row, layer, head), table in reference.items():
        keys = world.keys[row][layer][:, head // 4].double().numpy()
        table.begin(keys, world.recent[row][layer][:, head].double().numpy(), world.scale)
    for _ in range(12):
        results = world.decode([1, 3], [policy, policy])
        for (row, layer, head), table in reference.items():
            b, (h, g) = [1, 3].index(row), divmod(head, 4)
            plan = policy.plans[layer]
            n = world.length(row)
            keys, values = (of[row][layer][:, h].double() for of in (world.keys, world.values))
            scores = keys @ world.queries[layer][b, head].double()
            candidates = listed_positions(plan, b * world.heads + h, g)
            least, most = (table.candidates(n, slack) for slack in (1e-3, -1e-3))
            assert least <= set(candidates) <= most
            k = math.ceil(0.02 * world.placement.middle(n) * (1 - 1e-6))
            chosen = listed_positions(plan, b * world.heads + h, g, lists_of(plan).record.chosen)
            assert len(chosen) == min(k, len(candidates))
            left = set(candidates) - set(chosen)
            assert not left or scores[chosen].min() >= scores[list(left)].max() - 1e-5
            table.update(n, {p: world.scale * float(scores[p]) for p in chosen}, float(policy.local[layer][b, head]))
            assert policy.tables is not None
            truth = (table.vertical, table.slash)
            for got, want in zip(policy.tables.tables(layer, row, head, n), truth, strict=True):
                torch.testing.assert_close(got.double(), torch.from_numpy(want[:n]), rtol=1e-3, atol=1e-6)
            residents = [*range(64), *range(world.placement.window_start(n), n)]
            at = torch.tensor(residents + chosen)
            want = (world.scale * scores[at]).softmax(0) @ values[at]
            tolerance = 2e-5 if dtype == torch.float32 else 1.6e-2
            torch.testing.assert_close(results[layer][0][b, head].double(), want, rtol=tolerance, atol=tolerance)
    stats = world.engine.native.stats()
    assert stats["tasks_torch"] > 0 if executors == "cpu+torch" else stats["tasks_torch"] == 0


def outputs(world: World, rows: list[int], steps: int, policies: Sequence[Policy] | None = None) -> list[torch.Tensor]:
    return [got for _ in range(steps) for got, _ in world.decode(rows, policies)]


def test_a_mixed_batch_gives_each_request_what_it_gets_alone() -> None:
    """Beside other policies and another lfps, every lfps gets equal bits, and therefore learns the same."""
    specs = {1: "lfps:0.05", 2: "fixed:16:0.1", 3: "lfps:0.2:0.1:0.3", 4: "full"}
    lengths = {1: 900, 2: 700, 3: 800, 4: 500}

    def run(batch: list[int]) -> dict[int, list[torch.Tensor]]:
        world = World(group=2, rows=5, tokens=16384)
        policies = {row: parse_spec(specs[row]) for row in batch}
        draw = {row: torch.Generator().manual_seed(row) for row in lengths}
        turn: list[int] = []

        def randn(*size: int) -> torch.Tensor:
            if size[0] == len(batch) and len(size) == 3 and not turn:
                return torch.cat([torch.randn(1, *size[1:], generator=draw[row]) for row in batch])
            return torch.randn(*size, generator=draw[turn[0]])

        world.randn = randn  # type: ignore[method-assign]
        for row in batch:
            turn[:] = [row]
            world._anchor_random = draw[row]
            world.extend(row, lengths[row])
            for layer in range(world.layers):
                world.engine.prefilled(layer, row, lengths[row], world.recent[row][layer], policies[row])
        turn.clear()
        found: dict[int, list[torch.Tensor]] = {row: [] for row in batch}
        for _ in range(6):
            for got, _ in world.decode(batch, [policies[row] for row in batch]):
                for b, row in enumerate(batch):
                    found[row].append(got[b])
        return found

    together = run([1, 2, 3, 4])
    for row in lengths:
        for got, want in zip(together[row], run([row])[row], strict=True):
            # Alone, policies that need no features have their residents computed in one piece.
            assert torch.equal(got, want) if "lfps" in specs[row] else torch.allclose(got, want, atol=1e-5)


def test_a_request_without_a_prefill_starts_from_its_first_query() -> None:
    """Its row was copied: it starts without tables, does not fail, and learns from there."""
    world = World(policy=SPEC)
    world.extend(1, 800)
    world.engine.forget(1)
    policy = policy_of(world)
    assert policy.state_bytes == 0
    for got, _ in world.decode([1]):
        assert got.isfinite().all()
    vertical, slash = tables_of(world).tables(0, 1, 0, 801)
    # One row of weights, plus half of the next update.
    assert 8 < float(vertical.sum()) < 11 and 8 < float(slash.sum()) < 11


def test_a_prefill_makes_the_tables_anew() -> None:
    """After an appended turn, a re-prefill, or another request in the row, the tables are as in a fresh row."""
    used, fresh = World(policy=SPEC, seed=2), World(policy=SPEC, seed=2)
    used.extend(1, 700)
    outputs(used, [1], 5)
    used.engine.forget(1)
    del used.pages[1], used.keys[1], used.values[1]
    for world in (used, fresh):
        world.random.manual_seed(7)
        world._anchor_random.manual_seed(8)
        world.extend(1, 500)
    assert all(torch.equal(a, b) for a, b in zip(outputs(used, [1], 3), outputs(fresh, [1], 3), strict=True))
    for world in (used, fresh):
        world.extend(1, 100)
    assert all(torch.equal(a, b) for a, b in zip(outputs(used, [1], 3), outputs(fresh, [1], 3), strict=True))
    one, other = (tables_of(world).tables(1, 1, 3, used.length(1)) for world in (used, fresh))
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_small_chunks_add_up_to_the_rows_that_are_wanted() -> None:
    world = World(policy=SPEC)
    world.extend(1, 300)
    for count in (3, 1, 9):
        world.extend(1, count)
    noted = policy_of(world)._prefilled[0, 1]
    assert noted.length == 313 and torch.equal(noted.queries[-9:], world.recent[1][0])
    assert len(noted.queries) == ROWS


def test_state_is_counted_and_dies_with_the_request() -> None:
    world = World(policy=SPEC)
    policy = policy_of(world)
    assert policy.state_bytes == 0
    world.extend(1, 600)
    noted = policy.state_bytes
    assert noted == 2 * 20 * 8 * 64 * 4
    world.decode([1])
    kept = policy.state_bytes
    assert 2 * 8 * 896 * 10 <= kept < 2 * 8 * (896 * 10 + 120)  # with room for 256 more tokens, rounded to words
    world.extend(2, 300)
    world.decode([1, 2])
    assert policy.state_bytes > kept
    world.engine.forget(1)
    tables = tables_of(world)
    assert tables._pages.numel() > 0
    world.engine.forget(2)
    assert policy.state_bytes == 0
    assert tables_of(world) is not tables, "room for plans is given back, too"
    for got, _ in world.decode([2]):
        assert got.isfinite().all()


def test_heads_that_are_passed_by_get_the_mean_value() -> None:
    """Their middle is replaced by one token with the mean value; some groups list nothing at all."""
    world = World(seed=3)
    policy = Watched(0.05)
    world.extend(1, 900)
    world.randn = lambda *size: (
        1.5 * world.keys[1][0][0].repeat_interleave(4, 0)[None] if size[1] == 8 else torch.zeros(size)
    )  # type: ignore[method-assign]
    (got, _), _ = world.decode([1], [policy])
    given = lists_of(policy.plans[0]).given
    assert (given.lse > -math.inf).sum() >= 4
    q, n = world.queries[0][0], world.length(1)
    start = world.placement.window_start(n)
    for head in range(8):
        if given.lse[0, head] == -math.inf:
            continue
        keys, values = (of[1][0][:, head // 4].double() for of in (world.keys, world.values))
        residents = [*range(64), *range(start, n)]
        scores = torch.cat([world.scale * keys[residents] @ q[head].double(), given.lse[:, head].double()])
        want = scores.softmax(0) @ torch.cat([values[residents], values[64:start].mean(0, keepdim=True)])
        torch.testing.assert_close(got[0, head].double(), want, rtol=2e-5, atol=2e-5)


# ---- the tasks' part: records, and what is given


@pytest.mark.parametrize("isa", topology()["isas"])
@pytest.mark.parametrize("resident_first", [False, True])
def test_tasks_record_what_they_chose(isa: str, resident_first: bool) -> None:
    """Heads that read a part of the middle get scores of all chosen tokens, also if these are all they list."""
    world = NativeWorld(isa=isa, group=3)
    requests = [world.add(length) for length in (700, 100, 500)]
    world.begin_step(requests)
    plan = world.plan(requests, LISTED)
    plan.budget = torch.tensor([[0.01, 0.999, 1.0, 0.01, 0.02, 0.0]] * 3)
    lists = []
    for request in requests:
        pages = range(2, world.placement.window_start(request.length + 1) // 16)
        lists += [[(p, [0xFFFF, 0x00F1, 0x8001]) for p in pages if p % 2], []]
    counts = torch.tensor([0] + [len(rows) for rows in lists])
    rows = [row for of in lists for row in of]
    masks = torch.tensor([mask for _, mask in rows]).to(torch.uint16)
    plan.listed = Listed(counts.cumsum(0), torch.tensor([p for p, _ in rows], dtype=torch.int32), masks)
    record = plan.listed.record = Record(torch.zeros_like(masks), torch.full((*masks.shape, 16), torch.nan))
    tasks, q, out = world.begin_layer(requests, 0, plan, resident_first)
    selected = world.selections(requests, tasks)
    world.engine.layer_finish()
    world.check(out, world.expected(requests, 0, q, selected))
    for b, request in enumerate(requests):
        first, end = plan.listed.offsets[2 * b : 2 * b + 2].tolist()
        for g in range(3):
            got = {
                int(plan.listed.pages[i]) * 16 + t: float(record.scores[i, g, t])
                for i in range(first, end)
                for t in range(16)
                if int(record.chosen[i, g]) >> t & 1
            }
            assert set(got) == (selected[b, 0][g] if (b, 0) in selected else set())
            for position, score in got.items():
                if g < 2:
                    want = request.keys[0][position, 0] @ q[b, g]
                    assert math.isclose(score, want, rel_tol=1e-4, abs_tol=1e-4)


@pytest.mark.parametrize("resident_first", [False, True])
def test_what_is_given_is_merged(resident_first: bool) -> None:
    """Beside lists, without a list, and nothing for heads with LSE -inf, whose o is poison."""
    world = NativeWorld(group=2)
    requests = [world.add(length) for length in (300, 20, 250)]
    world.begin_step(requests)
    plan = world.plan(requests, LISTED)
    lse = torch.tensor([[1.0, -math.inf, 2.0, -math.inf], [3.0] * 4, [-math.inf] * 4])
    given = Given(world.randn(3, 4, 32), lse)
    given.o[0, 1], given.o[0, 3], given.o[2] = torch.nan, torch.nan, torch.nan
    read = {(0, 0): {*range(64, 96)}, (2, 1): {*range(48, 64)}}  # whole pages of the middle
    counts = torch.tensor([0, 2, 0, 0, 0, 0, 1])
    masks = torch.full((3, 2), 0xFFFF, dtype=torch.int32).to(torch.uint16)
    plan.listed = Listed(counts.cumsum(0), torch.tensor([4, 5, 3], dtype=torch.int32), masks, given=given)
    tasks, q, out = world.begin_layer(requests, 0, plan, resident_first)
    assert tasks == 3, "the group that is given something and lists nothing has one; what has no middle has none"
    world.engine.layer_finish()
    result = torch.empty(3, 4, 32)
    world.engine.result(result)
    for b, request in enumerate(requests):
        n = len(request.keys[0])
        for head in range(4):
            h = head // 2
            at = [*range(32), *range(world.placement.window_start(n), n)] if n > 32 else list(range(n))
            at += sorted(read.get((b, h), ()))
            scores = (world.scale * request.keys[0][at, h] @ q[b, head]).double()
            own = given.lse[b, head] if b != 1 else torch.tensor(-math.inf)
            scores = torch.cat([scores, own.view(1).double()])
            values = torch.cat([request.values[0][at, h], given.o[b, head].nan_to_num().view(1, -1)]).double()
            want = scores.softmax(0) @ values
            torch.testing.assert_close(out[b, head].double(), want, rtol=1e-4, atol=2e-5)
            torch.testing.assert_close(result[b, head].double(), want, rtol=1e-4, atol=2e-5)
