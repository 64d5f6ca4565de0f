"""Least budgets and anchor statistics against float64 attention over plain tensors, and against the engine itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from budget_reference import block_positions, budget_of_count, least_budgets, order_of, prefixes
from definitions.torch_executor import blocks_to_read
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from native_world import NativeWorld, Request, layer_begin

from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.native import topology
from fluxion_sglang.predictor.criterion import Deviation
from fluxion_sglang.predictor.features import ANCHOR, BUDGETS, COUNT, EMPTY_LSE
from fluxion_sglang.predictor.measure import BLOCK_SIZES, Measurement, measure, measure_into
from fluxion_sglang.training.dataset import fit_line

ISAS: list[str] = topology()["isas"]
CRITERIA = [(Deviation.LAYER, 0.1), (Deviation.HEAD, 0.1), (Deviation.COVERAGE, 0.95), (Deviation.COVERAGE, 0.5)]
NEAR = 1e-4  # a criterion this close to its threshold may be met or not
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


@dataclass
class GridWorld(NativeWorld):
    """Multiples of a quarter: every score and bound is exact in float32, so an order is either right or wrong, and some
    scores are equal."""

    def randn(self, *size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=self.random) * 4).round().div(4).to(self.dtype)

    def measure(
        self, request: Request, lengths: list[int], q: torch.Tensor, criteria: list[tuple[Deviation, float]] = CRITERIA
    ) -> Measurement:
        pages = torch.tensor(request.pages, dtype=torch.int32)
        at = torch.tensor(lengths, dtype=torch.int32)
        return measure(self.pool, 0, pages, at, q, self.sharp, self.placement.window, criteria)

    @property
    def sharp(self) -> float:
        """A scale that gives a few tokens most of the attention."""
        return 2 * self.dim**-0.5


def shape(x: torch.Tensor) -> list[torch.Tensor]:
    mean = x.mean()
    m2, m3, m4 = ((x - mean).pow(p).mean() for p in (2, 3, 4))
    if not m2 > 1e-12 * mean**2:
        return [mean, m2, torch.zeros(()), torch.zeros(())]
    return [mean, m2, m3 / m2**1.5, m4 / m2**2]


def piece(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """o and LSE over [n, D]; without tokens 0 and -inf."""
    scores = (k @ q) * scale
    if not len(k):
        return torch.zeros_like(q), torch.tensor(-math.inf)
    return scores.softmax(0) @ v, scores.logsumexp(0)


def statistics(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, placement: Placement
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For one query in float64: anchor (its budgets are NaN), mean_k, parts and result.

    q: [Hq, D]. k, v: [n, H, D].
    """
    q, k, v = q.double(), k.double(), v.double()
    n, heads, dim = k.shape
    group = len(q) // heads
    start, sinks = min(placement.window_start(n), n), min(placement.sinks, n)
    anchor = torch.full((len(q), 41), math.nan, dtype=torch.float64)
    mean_k = torch.zeros(heads, dim, dtype=torch.float64)
    parts = torch.empty(len(q), 5, dtype=torch.float64)
    result = torch.empty(len(q), 3, dtype=torch.float64)
    outputs, residents = [], []
    for head in range(len(q)):
        h = head // group
        one, key, value = q[head], k[:, h], v[:, h]
        row = anchor[head]
        o_sink, lse_sink = piece(one, key[:sinks], value[:sinks], scale)
        o_local, lse_local = piece(one, key[start:], value[start:], scale)
        o_cpu, lse_cpu = piece(one, key[sinks:start], value[sinks:start], scale)
        near = torch.cat([torch.arange(sinks), torch.arange(start, n)])
        resident, _ = piece(one, key[near], value[near], scale)
        full, lse = piece(one, key, value, scale)
        row[4] = key[:sinks].norm(dim=-1).mean() if sinks else 0
        row[5] = value[:sinks].norm(dim=-1).mean() if sinks else 0
        row[6:21] = 0
        if start > sinks:
            mean_k[h] = key[sinks:start].mean(0)
            row[6], row[7] = mean_k[h].norm(), value[sinks:start].mean(0).norm()
            row[8:12] = torch.stack(shape(key[sinks:start].norm(dim=-1)))
            row[12:16] = torch.stack(shape(value[sinks:start].norm(dim=-1)))
            if one.norm() > 0:
                row[17:21] = torch.stack(shape((key[sinks:start] @ one) * scale / one.norm()))
        row[24:27] = torch.stack([lse_sink, lse_cpu, lse_local]).clamp(min=EMPTY_LSE)
        row[29:32] = torch.stack([o_sink.norm(), o_cpu.norm(), o_local.norm()])
        row[33] = one.norm()
        parts[head] = torch.stack([lse_sink, lse_local, o_sink.norm(), o_local.norm(), resident.norm()])
        outputs.append(full)
        residents.append(resident)
        result[head, 0], result[head, 2] = full.norm(), (lse_cpu - lse).exp()
    largest = torch.stack(outputs).norm(dim=-1).max()
    distance = (torch.stack(residents) - torch.stack(outputs)).norm(dim=-1)
    result[:, 1] = distance / largest if largest > 0 else 0
    anchor[:, 40] = parts[:, 4].max()
    return anchor[:, list(ANCHOR)], mean_k, parts, result


def check(world: GridWorld, request: Request, lengths: list[int], q: torch.Tensor, got: Measurement) -> None:
    """Check all parts of a measurement under CRITERIA."""
    bgt = [ANCHOR.index(i) for i in range(*BUDGETS.indices(COUNT))]
    scale = world.sharp
    others = [i for i in range(len(ANCHOR)) if i not in bgt]
    assert torch.equal(got.anchor[..., bgt], got.budgets[:, :, 0, 1:])
    for i, n in enumerate(lengths):
        k, v = request.keys[0][:n], request.values[0][:n]
        anchor, mean_k, parts, result = statistics(q[i], k, v, scale, world.placement)
        torch.testing.assert_close(got.anchor[i][:, others].double(), anchor[:, others], **TOLERANCE)
        torch.testing.assert_close(got.mean_k[i].double(), mean_k, **TOLERANCE)
        torch.testing.assert_close(got.parts[i].double(), parts, **TOLERANCE)
        torch.testing.assert_close(got.result[i].double(), result, **TOLERANCE)
        check_budgets(world, q[i], k, v, scale, got.budgets[i], result[:, 0])


def check_budgets(
    world: NativeWorld, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, budgets: torch.Tensor,
    norms: torch.Tensor,
) -> None:  # fmt: skip
    """Each budget is the first prefix that meets its criterion, up to NEAR."""
    middle = world.placement.middle(len(k))
    for head in range(len(q)):
        for size, blk in enumerate(BLOCK_SIZES):
            h = head // world.group
            walk = prefixes(q[head], k[:, h], v[:, h], scale, world.placement, blk)
            blocks = len(walk.mass) - 1
            for c, (kind, threshold) in enumerate(CRITERIA):
                budget = budgets[head, c, size].item()
                count = bought(budget, middle, blk, blocks)
                assert budget == torch.tensor(budget_of_count(count, middle, blk, blocks)).item()
                values = walk.values(kind, norms[head].item(), norms.max().item())
                good = (values - threshold) if kind == Deviation.COVERAGE else (threshold - values)
                assert (good[:count] < NEAR).all(), (head, blk, kind)
                assert count == blocks or good[count] > -NEAR, (head, blk, kind)


def bought(budget: float, middle: int, blk: int, blocks: int) -> int:
    """Blocks that serving reads; a head without budget streams."""
    return blocks_to_read(budget, middle, blk, blocks) if budget > 0 else 0


@pytest.mark.parametrize(
    ("isa", "dtype"), [*((isa, torch.float32) for isa in ISAS), (ISAS[-1], torch.bfloat16)], ids=str
)
def test_every_length_on_every_isa(isa: str, dtype: torch.dtype) -> None:
    """Middle empty, fewer tokens than sinks, lengths within a page, blocks cut at both ends."""
    lengths = [1, 15, 16, 31, 32, 33, 79, 80, 95, 96, 97, 143, 144, 250, 401, 607]
    world = GridWorld(isa=isa, dtype=dtype)
    request = world.add(max(lengths))
    q = world.randn(len(lengths), world.q_heads, world.dim)
    check(world, request, lengths, q, world.measure(request, lengths, q))


@settings(deadline=None, max_examples=examples(12))
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    heads, group = data.draw(st.sampled_from([(1, 1), (2, 3), (1, 4), (3, 2), (1, 16), (1, 7)]))
    dim = data.draw(st.sampled_from([32, 48, 64, 80, 128, 256]))
    placement = Placement(data.draw(st.sampled_from([0, 16, 48, 64])), data.draw(st.sampled_from([16, 48, 128])))
    lengths = data.draw(st.lists(st.integers(1, 520), min_size=1, max_size=3))
    world = GridWorld(
        heads=heads,
        group=group,
        dim=dim,
        placement=placement,
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        isa=data.draw(st.sampled_from(ISAS)),
        workers=data.draw(st.sampled_from([1, 2, 4])),
        seed=data.draw(st.integers(0, 99)),
    )
    request = world.add(max(lengths) + data.draw(st.integers(0, 40)))
    q = world.randn(len(lengths), world.q_heads, dim)
    check(world, request, lengths, q, world.measure(request, lengths, q))


def test_reference_budgets() -> None:
    """Check `least_budgets` itself, where no criterion is near its threshold."""
    world = GridWorld(dim=64)
    request = world.add(430)
    q = world.randn(1, world.q_heads, 64)
    want = least_budgets(q[0], request.keys[0], request.values[0], world.sharp, world.placement, CRITERIA)
    got = world.measure(request, [430], q).budgets[0]
    assert torch.equal(got, want)
    assert 0 < got[:, 0].mean() < 1


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_same_bits_with_any_number_of_workers_and_into_any_tensors(workers: int) -> None:
    """Every element of the outputs is written, whatever it held."""
    lengths = [100, 7, 380, 381]

    def run(workers: int) -> tuple[GridWorld, Request, torch.Tensor, Measurement]:
        world = GridWorld(workers=workers, heads=3)
        request = world.add(400)
        q = world.randn(len(lengths), world.q_heads, world.dim)
        return world, request, q, world.measure(request, lengths, q)

    world, request, q, got = run(workers)
    poisoned = Measurement(**{name: torch.full_like(t, math.nan) for name, t in vars(got).items()})
    pages, at = torch.tensor(request.pages, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    criteria = torch.tensor([[float(kind), threshold] for kind, threshold in CRITERIA])
    fused = torch.cat([q, torch.full_like(q, math.nan)], 1)[:, : world.q_heads]  # not contiguous over the queries
    measure_into(world.pool, 0, pages, at, fused, world.sharp, world.placement.window, criteria, poisoned)
    for name, tensor in vars(run(1)[3]).items():
        assert torch.equal(getattr(got, name), tensor), name
        assert torch.equal(getattr(poisoned, name), tensor), name


def test_tokens_from_the_length_on_are_not_seen() -> None:
    """Later tokens, in the last page or behind it, are NaN here."""
    world, twin = GridWorld(), GridWorld()
    request, alone = world.add(389), twin.add(389)
    pages = torch.tensor([*request.pages, *world.free[-9:]], dtype=torch.int32)
    poison = torch.full((120, world.heads, world.dim), math.nan)
    world.pool.append(0, pages, 389, poison, poison)
    request.pages = pages.tolist()
    q = world.randn(1, world.q_heads, world.dim)
    for name, tensor in vars(world.measure(request, [389], q)).items():
        assert torch.equal(tensor, getattr(twin.measure(alone, [389], q), name)), name
        assert not tensor.isnan().any(), name


def test_entries_lost_in_collisions() -> None:
    """In a small pool coarse entries collide: blocks get the same scores from their pages."""
    world = GridWorld(pages=64)
    first, second = world.add(480), world.add(500)
    tags = world.pool.tensor("tag3", 0)
    lost = [page for page in first.pages[7::8] + second.pages[7::8] if tags[page >> 3] != page]
    assert lost
    for request in (first, second):
        q = world.randn(1, world.q_heads, world.dim)
        n = request.length
        check(world, request, [n], q, world.measure(request, [n], q))


@pytest.mark.parametrize(("dtype", "spread"), [(torch.float32, 1.0), (torch.bfloat16, 0.5)], ids=str)
def test_serving_reads_what_was_measured(dtype: torch.dtype, spread: float) -> None:
    """With these budgets the engine reads the measured blocks, and its error equals the prediction and meets the
    threshold. With one block less, some head exceeds it."""
    tau = 0.1
    world = GridWorld(dtype=dtype, dim=64, heads=2, group=4, attend_union=False, pages=128, spread=spread)
    n = 907
    request = world.add(n)
    q = world.randn(1, world.q_heads, 64)
    budgets = world.measure(request, [n], q).budgets[0, :, 0]
    middle = world.placement.middle(n)
    full = []
    for head in range(world.q_heads):
        k, v = request.keys[0][:, head // 4].double(), request.values[0][:, head // 4].double()
        full.append(piece(q[0, head].double(), k, v, world.sharp)[0])
    exact = torch.stack(full)
    largest = exact.norm(dim=-1).max()
    cut = 0
    for size, blk in enumerate(BLOCK_SIZES):
        groups = block_positions(middle, blk, world.placement.sinks)
        for less in (0, 1):
            counts = [max(bought(b, middle, blk, len(groups)) - less, 0) for b in budgets[:, size].tolist()]
            rows = torch.tensor([request.row], dtype=torch.int32)
            world.engine.step(rows, torch.tensor([n], dtype=torch.int32), world.table([request]))
            plan = world.plan([request], blk)
            plan.budget[0] = torch.tensor([budget_of_count(c, middle, blk, len(groups)) for c in counts])
            if not less:
                assert torch.equal(plan.budget[0], budgets[:, size])
            out = torch.full_like(q, torch.nan)
            tasks = layer_begin(world.engine, 0, q, None, None, world.windows[0], plan, world.sharp, out)
            chosen = world.selections([request], tasks)
            world.engine.layer_finish()
            output = torch.empty(1, world.q_heads, 64)
            world.engine.result(output)
            error = (output[0].double() - exact).norm(dim=-1) / largest
            for head, count in enumerate(counts):
                h, g = divmod(head, 4)
                k, v = request.keys[0][:, h], request.values[0][:, h]
                order = order_of(q[0, head], k, groups, spread)
                read = chosen[0, h][g] if (0, h) in chosen else set()
                assert read == {p for i in order[:count] for p in groups[i]}
                walk = prefixes(q[0, head], k, v, world.sharp, world.placement, blk, spread)
                assert error[head].item() == pytest.approx(walk.distance[count].item() / largest.item(), abs=1e-5)
                if not less:
                    assert error[head] <= tau + NEAR
                elif budgets[head, size] > 0:
                    assert error[head] > tau - NEAR
                    cut += 1
    assert cut > 10


def test_budgets_of_counts_round_trip() -> None:
    """`budget_of_count` round-trips in the engine, for every count of every middle."""
    for sinks in (0, 16, 64):
        for pages in range(1, 40):
            middle = pages * PAGE
            for blk in BLOCK_SIZES:
                blocks = len(block_positions(middle, blk, sinks))
                for count in range(blocks + 1):
                    budget = torch.tensor(budget_of_count(count, middle, blk, blocks)).item()
                    assert bought(budget, middle, blk, blocks) == count
                    assert (budget == 1) == (count == blocks)


def test_thresholds_that_nothing_or_everything_meets() -> None:
    world = GridWorld()
    request = world.add(330)
    q = world.randn(1, world.q_heads, world.dim)
    criteria = [(Deviation.LAYER, -1.0), (Deviation.HEAD, 1e6), (Deviation.COVERAGE, 2.0), (Deviation.COVERAGE, 0.0)]
    budgets = world.measure(request, [330], q, criteria).budgets[0]
    assert budgets.transpose(0, 1).flatten(1).unique(dim=1).tolist() == [[1.0], [0.0], [1.0], [0.0]]


def test_a_query_and_values_of_zero() -> None:
    """With zero norms, every statistic is finite, and nothing needs to be read."""
    world = GridWorld()
    request = world.add(330)
    for tensor in (world.pool.tensor("tiles", 0)[:, :, 1],):
        tensor.zero_()
    world.pool.tensor("moments", 0)[..., world.dim : 2 * world.dim] = 0
    got = world.measure(request, [330], torch.zeros(1, world.q_heads, world.dim))
    for name, tensor in vars(got).items():
        assert tensor.isfinite().all(), name
    assert (got.budgets[:, :, :2] == 0).all()
    assert (got.result[..., :2] == 0).all()


def test_scores_far_apart() -> None:
    """The residents' weight vanishes in float32; they must not count as a perfect answer."""
    world = GridWorld(heads=1, group=1)
    request = world.add(330)
    q = world.randn(1, 1, world.dim)
    pages, at = torch.tensor(request.pages, dtype=torch.int32), torch.tensor([330], dtype=torch.int32)
    best = (request.keys[0][32:272, 0].double() @ q[0, 0].double()).argmax().item()
    request.keys[0][32 + best, 0] += 8 * q[0, 0]
    k, v = request.keys[0], request.values[0]
    world.pool.append(0, pages, 0, k, v)
    got = measure(world.pool, 0, pages, at, q, 40.0, world.placement.window, CRITERIA)
    assert got.budgets[0, 0, 0, 0].item() == pytest.approx(1 / world.placement.middle(330))
    assert got.result[0, 0, 2] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_residents_that_weigh_more_by_far(dtype: torch.dtype) -> None:
    """The middle's weight vanishes in float32 beside the residents'; its own features are still right. Only one head of
    the group has such residents."""
    world = GridWorld(heads=1, group=2, dtype=dtype)
    request = world.add(330)
    q = world.randn(1, 2, world.dim)
    q[0, 1] -= (q[0, 1] @ q[0, 0]) / (q[0, 0] @ q[0, 0]) * q[0, 0]
    request.keys[0][7, 0] += 8 * q[0, 0]
    world.pool.append(0, torch.tensor(request.pages, dtype=torch.int32), 0, request.keys[0], request.values[0])
    got = world.measure(request, [330], q)
    check(world, request, [330], q, got)
    assert got.result[0, 0, 2] < 1e-9 and (got.budgets[0, 0, :2] == 0).all()
    assert got.result[0, 1, 2] > 0.1 and (got.budgets[0, 1, :2] > 0).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_score_beyond_float32(isa: str) -> None:
    """A single token has all the attention."""
    world = GridWorld(heads=1, group=1, isa=isa)
    request = world.add(330)
    q = world.randn(1, 1, world.dim)
    q[0, 0, 0] = request.keys[0][100, 0, 0] = 3e19
    world.pool.append(0, torch.tensor(request.pages, dtype=torch.int32), 0, request.keys[0], request.values[0])
    got = world.measure(request, [330], q)
    assert got.result[0, 0, 2] == 1
    assert got.budgets[0, 0, 0, 0].item() == pytest.approx(1 / world.placement.middle(330))


def test_single_tokens_may_be_left_out() -> None:
    world = GridWorld()
    request = world.add(330)
    q = world.randn(1, world.q_heads, world.dim)
    pages, at = torch.tensor(request.pages, dtype=torch.int32), torch.tensor([330], dtype=torch.int32)
    whole = world.measure(request, [330], q)
    got = measure(world.pool, 0, pages, at, q, world.sharp, world.placement.window, CRITERIA, single_tokens=False)
    assert got.budgets[..., 0].isnan().all() and torch.equal(got.budgets[..., 1:], whole.budgets[..., 1:])
    for name in ("anchor", "mean_k", "parts", "result"):
        assert torch.equal(getattr(got, name), getattr(whole, name)), name
    got = measure(world.pool, 0, pages, at - 270, q, world.sharp, world.placement.window, CRITERIA, single_tokens=False)
    assert got.budgets[..., 0].isnan().all() and (got.budgets[..., 1:] == 0).all()


def test_many_queries_are_measured_as_each_alone() -> None:
    """More than are measured together: their room would be too large."""
    world = GridWorld(heads=2, group=8, dim=128, pages=2200, rows=1)
    n = 32_000
    request = world.add(n)
    q = world.randn(3, world.q_heads, world.dim)
    got = world.measure(request, [n, n - 1, 900], q)
    for i, length in enumerate((n, n - 1, 900)):
        alone = world.measure(request, [length], q[i : i + 1])
        for name, tensor in vars(got).items():
            assert torch.equal(tensor[i : i + 1], getattr(alone, name)), name


def test_what_cannot_be_is_refused() -> None:
    world = GridWorld()
    request = world.add(100)
    q = world.randn(1, world.q_heads, world.dim)
    pages, at = torch.tensor(request.pages, dtype=torch.int32), torch.tensor([100], dtype=torch.int32)
    good = {"layer": 0, "pages": pages, "lengths": at, "q": q, "scale": 1.0, "window": 48, "criteria": CRITERIA}
    bad = pages.clone()
    bad[3] = 0
    for change, sentence in [
        ({"lengths": at + 100}, "Query 0 has the length 200"),
        ({"lengths": at * 0}, "Query 0 has the length 0"),
        ({"lengths": at.long()}, "lengths has the dtype int64"),
        ({"pages": bad}, "page 3 has the page id 0"),
        ({"q": q[:, :3]}, "have 3 heads and the pool has 2 KV heads"),
        ({"q": q[..., :16]}, "q has the shape"),
        ({"q": q.bfloat16()}, "q has the dtype bfloat16"),
        ({"window": 40}, "window is 40"),
        ({"criteria": []}, "0 criteria"),
        ({"criteria": [(3, 0.5)]}, "Criterion 0 has the kind 3"),
        ({"criteria": [(0, math.nan)]}, "Criterion 0 has the kind 0"),
        ({"layer": 1}, "no layer 1"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            measure(world.pool, **{**good, **change})  # type: ignore[arg-type]
    none = measure(world.pool, 0, pages, at[:0], q[:0], 1.0, 48, CRITERIA)
    assert none.budgets.shape == (0, world.q_heads, 4, 5)


def test_the_line_of_budgets() -> None:
    """It is found where there is one, and else goes through the budget of single tokens with the best slope."""
    x = torch.tensor(BLOCK_SIZES).log2()
    start, slope = torch.rand(4, 3), torch.rand(4, 3) * 0.1
    exact = start[..., None] + slope[..., None] * x
    bgt0, k = fit_line(exact)
    assert torch.equal(bgt0, start)
    torch.testing.assert_close(k, slope)
    noisy = exact + 0.05 * torch.randn(4, 3, 5)
    bgt0, k = fit_line(noisy)
    assert torch.equal(bgt0, noisy[..., 0])

    def loss(k: torch.Tensor) -> torch.Tensor:
        return (noisy - bgt0[..., None] - k[..., None] * x).square().mean(-1)

    assert (loss(k) < loss(k - 0.01)).all() and (loss(k) < loss(k + 0.01)).all()
