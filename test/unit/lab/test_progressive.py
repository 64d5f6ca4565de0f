"""Tasks that stop early, against Algorithm 1 in float64: the same blocks and output, whichever executor runs them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from definitions.progressive import MICROBATCH_PAGES, Progress, by_criticality, read_until
from definitions.torch_executor import block_pages
from effort import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from native_world import NativeWorld, Request, layer_begin, rank_blocks, take

from fluxion_sglang.kv.placement import BLOCKS, PAGE
from fluxion_sglang.native import topology

MARGIN = 1e-5
"""Within this distance of the threshold, float32 may decide differently."""

isas = pytest.mark.parametrize("isa", topology()["isas"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@dataclass
class Layer:
    """A layer that was run: the engine's selections, its output, and the queries."""

    q: torch.Tensor
    out: torch.Tensor
    exact: torch.Tensor
    reads: torch.Tensor
    chosen: dict[tuple[int, int], list[set[int]]]
    stats: dict[str, int]


def run(
    world: NativeWorld, requests: list[Request], blk: int, stop: float | torch.Tensor, spread: float = 1.0,
    q: torch.Tensor | None = None, token: torch.Tensor | None = None, budget: torch.Tensor | None = None,
    look: bool = True,
) -> Layer:  # fmt: skip
    """A decode step of one layer with one threshold. token: [B, H, D], its key and its value."""
    world.begin_step(requests)
    batch = len(requests)
    q = world.randn(batch, world.q_heads, world.dim) if q is None else q.to(world.dtype)
    k, v = (world.randn(batch, world.heads, world.dim) if token is None else token for _ in range(2))
    out = torch.full((batch, world.q_heads, world.dim), torch.nan, dtype=world.dtype)
    plan = world.plan(requests, blk)
    stops = torch.as_tensor(stop, dtype=torch.float32).expand(batch, world.heads).contiguous()
    engine = world.engine
    engine.layer_resident(world.at(), q, k, v, torch.empty(batch, world.q_heads, 5))
    take(requests, 0, k, v)
    before = engine.stats()
    plan.budget = plan.budget if budget is None else budget
    plan.owner = torch.zeros_like(plan.blk)
    spreads = torch.full_like(stops, spread)
    tasks = layer_begin(engine, 0, q, None, None, None, plan, world.scale, out, stop=stops, spread=spreads)
    chosen = world.selections(requests, tasks) if look else {}
    engine.layer_finish()
    exact, reads = torch.empty(out.shape), torch.empty(batch, world.heads, 2, dtype=torch.int64)
    engine.result(exact)
    engine.reads(reads)
    stats = {name: value - before[name] for name, value in engine.stats().items()}
    return Layer(q, out, exact, reads, chosen, stats)


def reference(
    world: NativeWorld, request: Request, h: int, q: torch.Tensor, blk: int, stop: float, spread: float,
    limits: list[int] | None = None,
) -> tuple[Progress, list[list[int]]]:  # fmt: skip
    """Algorithm 1 for one group, and the tokens of every block. q: [G, D].

    The margin is 0 if float32 may order the blocks differently.
    """
    middle, placement = world.middle(request), world.placement
    blocks = [
        [page * PAGE + t for page in pages for t in range(PAGE)]
        for pages in block_pages(len(middle), blk, placement.sink_pages)
    ]
    keys = request.keys[0][:, h]
    scores, clear = rank_blocks(q, keys, blocks, spread)
    logits = (q.double() @ keys.double().T) * world.scale
    resident = [i for i in range(request.length) if not middle or i < middle[0] or i > middle[-1]]
    found = read_until(
        scores, [logits[:, tokens] for tokens in blocks], logits[:, resident], stop,
        least=max(1, MICROBATCH_PAGES * PAGE // blk), union=world.attend_union, limits=limits,
    )  # fmt: skip
    if not clear:
        found.margin = 0.0
    return found, blocks


def check(world: NativeWorld, requests: list[Request], layer: Layer, blk: int, stop: float, spread: float) -> bool:
    """The engine read and counted what Algorithm 1 reads, and attended to it. False if rounding may decide."""
    tokens = 0
    for b, request in enumerate(requests):
        if not world.middle(request):
            assert all((b, h) not in layer.chosen for h in range(world.heads))
            continue
        for h in range(world.heads):
            q = layer.q[b, h * world.group : (h + 1) * world.group]
            found, blocks = reference(world, request, h, q, blk, torch.tensor(stop).item(), spread)
            if found.margin <= MARGIN:
                return False
            want = [{t for i in read for t in blocks[i]} for read in found.read]
            assert layer.chosen[b, h] == want
            tokens += sum(map(len, want))
            read = sum(len(blocks[i]) for batch in found.microbatches for i in batch)
            assert layer.reads[b, h, 0] == read * 2 * world.dim * world.dtype.itemsize
    assert layer.stats["tokens_read"] == tokens
    world.check(layer.out, world.expected(requests, 0, layer.q, layer.chosen))
    return True


@isas
@dtypes
@settings(max_examples=examples(30), deadline=None)
@given(
    seed=st.integers(0, 2**16),
    blk=st.sampled_from(BLOCKS),
    group=st.sampled_from([1, 2, 3, 4, 8]),
    union=st.booleans(),
    stop=st.sampled_from([1e-6, 0.3, 0.8, 0.95, 0.99, 0.9999]),
    spread=st.sampled_from([0.0, 0.45, 1.0]),
    size=st.sampled_from([0.3, 1.0, 4.0]),
    lengths=st.lists(st.integers(60, 1500), min_size=1, max_size=3),
)
def test_algorithm_1(
    isa: str, dtype: torch.dtype, seed: int, blk: int, group: int, union: bool, stop: float, spread: float, size: float,
    lengths: list[int],
) -> None:  # fmt: skip
    world = NativeWorld(isa=isa, dtype=dtype, seed=seed, group=group, attend_union=union, pages=400)
    requests = [world.add(n) for n in lengths]
    q = world.randn(len(requests), world.q_heads, world.dim) * size
    layer = run(world, requests, blk, stop, spread, q)
    assume(check(world, requests, layer, blk, stop, spread))


def listing(scores: torch.Tensor, logits: list[torch.Tensor], stop: float) -> list[int]:
    """The paper's listing, line by line: one head, one block per microbatch, no residents. Returns the loaded
    blocks."""
    as_acc, as_min, n_left = 0.0, math.inf, len(logits)
    loaded = []
    for b in by_criticality(scores):
        loaded.append(b)
        weight = float(logits[b].double().exp().sum())
        as_acc += weight
        as_min = min(weight, as_min)
        n_left -= 1
        if as_acc / (as_acc + as_min * n_left) >= stop:
            break
    return loaded


def test_the_reference_is_the_papers_listing() -> None:
    for seed in range(50):
        torch.manual_seed(seed)
        logits = list(2 * torch.randn(40, 1, 16).double())
        scores = torch.stack([x.exp().sum().log() for x in logits]) + torch.randn(40) * seed / 50
        for stop in (0.5, 0.9, 0.99):
            found = read_until(
                scores.unsqueeze(0), logits, torch.empty(1, 0), stop, least=1, share=10**9, union=bool(seed % 2)
            )
            assert [batch[0] for batch in found.microbatches] == listing(scores, logits, stop)


@dtypes
@pytest.mark.parametrize("blk", BLOCKS)
@pytest.mark.parametrize("last", [False, True])
def test_one_heavy_block(dtype: torch.dtype, blk: int, last: bool) -> None:
    """All the weight is in one token. If its block ranks first, the first microbatch finds it. If it ranks last,
    nothing reveals it earlier, and the bound forces the rest to be read."""
    world = NativeWorld(dtype=dtype, heads=1, group=1, pages=400)
    keys = world.randn(1400, 1, world.dim) * 0.01
    heavy = world.add(1400, keys=[keys])
    at = world.placement.sinks + 700
    q = torch.zeros(1, 1, world.dim)
    q[..., 0] = 30.0
    heavy.keys[0][at, 0, 0] = -8.0 if last else 8.0
    rewrite(world, heavy)
    layer = run(world, [heavy], blk, 0.95, 1.0, -q if last else q)
    # Its bound comes from the best key; a block with one very low key is ranked by its other keys.
    assert check(world, [heavy], layer, blk, 0.95, 1.0)
    assert at in layer.chosen[0, 0][0]
    if not last:
        # A microbatch with a single block gives no better bound for the rest.
        microbatches = 2 if blk == MICROBATCH_PAGES * PAGE else 1
        assert len(layer.chosen[0, 0][0]) == microbatches * max(MICROBATCH_PAGES * PAGE, blk)


def rewrite(world: NativeWorld, request: Request) -> None:
    """Write a request's keys and values into the pool and its window again."""
    pages = torch.tensor(request.pages, dtype=torch.int32)
    world.pool.append(0, pages, 0, request.keys[0], request.values[0])
    placement = world.placement
    world.pool.fill_window(0, world.windows[0], request.row, request.length, pages, placement.sinks, placement.window)


@pytest.mark.parametrize("union", [False, True])
@pytest.mark.parametrize("blk", BLOCKS)
def test_equal_scores(blk: int, union: bool) -> None:
    """With equal scores the bound is exact: the threshold determines how much is read, earlier blocks first."""
    world = NativeWorld(heads=1, group=2, attend_union=union, pages=400)
    request = world.add(1500, keys=[torch.ones(1500, 1, world.dim)])
    layer = run(world, [request], blk, 0.5, 1.0, torch.zeros(1, 2, world.dim))
    chosen, middle = layer.chosen[0, 0], world.middle(request)
    assert chosen[0] == chosen[1] == set(middle[: len(chosen[0])])
    resident = request.length - len(middle)
    assert len(chosen[0]) + resident >= 0.5 * request.length - 1
    assert len(chosen[0]) + resident <= 0.5 * request.length + max(MICROBATCH_PAGES * PAGE, blk) + 1


@pytest.mark.parametrize("size", [1e4, 1e15, 3e38, math.inf])
@pytest.mark.parametrize("union", [False, True])
def test_huge_scores_and_none(size: float, union: bool) -> None:
    """Weights beyond the range of exp still compare correctly; a block of keys with -inf weighs nothing."""
    world = NativeWorld(heads=1, group=2, attend_union=union, pages=400)
    keys = torch.zeros(1200, 1, world.dim)
    keys[:, 0, 0] = -size
    keys[496:512, 0, 0] = 3.0
    request = world.add(1200, keys=[keys])
    q = torch.zeros(1, 2, world.dim)
    q[..., 0] = 2.0
    layer = run(world, [request], 16, 0.9, 1.0, q)
    assert all(500 in positions for positions in layer.chosen[0, 0])
    assert len(layer.chosen[0, 0][0]) <= 2 * MICROBATCH_PAGES * PAGE, "one microbatch of each head"
    assert not bool(layer.out.isnan().any())
    world.check(layer.out, world.expected([request], 0, layer.q, layer.chosen))


def test_what_is_no_number_stops_nobody() -> None:
    world = NativeWorld(heads=1, group=1, pages=400)
    keys = torch.randn(1000, 1, world.dim)
    keys[3] = torch.nan
    request = world.add(1000, keys=[keys])
    layer = run(world, [request], 16, 0.1)
    assert layer.chosen[0, 0][0] == set(world.middle(request))
    assert bool(layer.out.isnan().all())


@pytest.mark.parametrize("stop", [0.0, 1.0])
@pytest.mark.parametrize("union", [False, True])
def test_no_threshold_and_all_of_it_read_the_budgets(stop: float, union: bool) -> None:
    world = NativeWorld(attend_union=union, pages=400)
    requests = [world.add(900), world.add(300)]
    layer = run(world, requests, 32, stop)
    for b, request in enumerate(requests):
        for h in range(world.heads):
            assert layer.chosen[b, h] == [set(world.middle(request))] * world.group
    assert layer.stats["metadata_bytes"] == 0
    world.check(layer.out, world.expected(requests, 0, layer.q, layer.chosen))


@pytest.mark.parametrize("blk", BLOCKS)
def test_the_least_threshold_reads_one_microbatch(blk: int) -> None:
    world = NativeWorld(heads=1, group=1, pages=400)
    request = world.add(1500)
    layer = run(world, [request], blk, 1e-30)
    assert len(layer.chosen[0, 0][0]) == max(MICROBATCH_PAGES * PAGE, blk)


@pytest.mark.parametrize("blk", BLOCKS)
@pytest.mark.parametrize("pages", [1, 2, 7, 8, 9])
def test_small_middles_and_cut_blocks(blk: int, pages: int) -> None:
    world = NativeWorld(group=3, pages=400)
    request = world.add(world.placement.sinks + world.placement.window + PAGE * pages + 3)
    for stop in (0.2, 0.97):
        layer = run(world, [request], blk, stop, 0.45)
        assert len(world.middle(request)) == pages * PAGE
        assert check(world, [request], layer, blk, stop, 0.45)


@pytest.mark.parametrize("union", [False, True])
def test_budgets_bound_what_is_read(union: bool) -> None:
    """A head reads its order only up to its budget; with budget 0 it selects nothing."""
    world = NativeWorld(heads=1, group=4, attend_union=union, pages=400)
    request = world.add(1500)
    budget = torch.tensor([[0.1, 0.0, 0.5, 1.0]])
    layer = run(world, [request], 16, 0.9999, budget=budget)
    blocks = len(world.middle(request)) // PAGE
    limits = [math.ceil(share * blocks - 1e-6) for share in budget[0].tolist()]
    found, tokens = reference(world, request, 0, layer.q[0], 16, torch.tensor(0.9999).item(), 1.0, limits)
    assert found.margin > MARGIN
    read = [set().union(*found.read)] * 4 if union else found.read
    assert layer.chosen[0, 0] == [{t for i in blocks for t in tokens[i]} for blocks in read]
    world.check(layer.out, world.expected([request], 0, layer.q, layer.chosen))


@settings(max_examples=examples(15), deadline=None)
@given(
    seed=st.integers(0, 2**16), blk=st.sampled_from(BLOCKS), stop=st.sampled_from([0.5, 0.97, 0.9999]),
    union=st.booleans(), chunk_pages=st.sampled_from([1, 5]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_the_number_of_workers_changes_no_bit(
    seed: int, blk: int, stop: float, union: bool, chunk_pages: int, dtype: torch.dtype
) -> None:
    outcomes = []
    for workers in (1, 2, 4):
        world = NativeWorld(
            workers=workers, seed=seed, dtype=dtype, attend_union=union, group=3, pages=1200,
            chunk_bytes=chunk_pages * 2 * PAGE * 32 * dtype.itemsize,
        )  # fmt: skip
        requests = [world.add(n) for n in (900, 60, 3000)]
        for _ in range(2):
            layer = run(world, requests, blk, stop, look=False)
        outcomes.append((layer.out, layer.exact, layer.reads))
    for outcome in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], outcome, strict=True))


def test_batch_mates_change_no_bit() -> None:
    """Alone, and with others that share its prefix."""
    layers = []
    for mates in (0, 2):
        world = NativeWorld(seed=5, pages=1200, share_prefixes=True)
        parent = world.add(900)
        requests = [parent, *(world.add(1000, parent, 512) for _ in range(mates))]
        generator = torch.Generator().manual_seed(1)
        q, token = (
            torch.randn(1, heads, world.dim, generator=generator).repeat(len(requests), 1, 1)
            for heads in (world.q_heads, world.heads)
        )
        layers.append(run(world, requests, 16, 0.97, q=q, token=token))
    alone, together = layers
    assert torch.equal(alone.exact[0], together.exact[0]) and torch.equal(alone.reads[0], together.reads[0])
    assert together.stats["shared_tasks"] == 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"stop": -0.1}, "a share is 0 to 1"),
        ({"stop": math.nan}, "a share is 0 to 1"),
        ({"stop": 1.5}, "a share is 0 to 1"),
        ({"spread": -0.5}, "a spread is 0 to 1"),
        ({"spread": math.nan}, "a spread is 0 to 1"),
        ({"blk": 1}, "only blocks of 16 tokens or more"),
    ],
)
def test_a_plan_that_cannot_be_is_one_sentence(change: dict[str, float], sentence: str) -> None:
    world = NativeWorld(pages=400)
    request = world.add(900)
    options = {"blk": 16, "stop": 0.9, "spread": 1.0, **change}
    with pytest.raises(RuntimeError, match=sentence):
        run(world, [request], int(options["blk"]), options["stop"], options["spread"], look=False)
    run(world, [request], 16, 0.9)


def test_residents_must_be_known() -> None:
    world = NativeWorld(pages=400)
    requests = [world.add(900)]
    world.begin_step(requests)
    plan = world.plan(requests)
    q, k, v = (world.randn(1, n, world.dim) for n in (world.q_heads, world.heads, world.heads))
    stop = torch.full((1, world.heads), 0.9)
    layer_begin(world.engine, 0, q, k, v, world.windows[0], plan, world.scale, torch.empty_like(q), stop=stop)
    with pytest.raises(RuntimeError, match="call layer_resident before layer_begin"):
        world.engine.layer_finish()


def test_early_exit_among_ordinary_tasks() -> None:
    """One layer with both kinds: each reads the same as alone."""
    world = NativeWorld(pages=400, heads=2)
    request = world.add(1400)
    layer = run(world, [request], 16, torch.tensor([0.0, 0.9]))
    assert layer.chosen[0, 0] == [set(world.middle(request))] * world.group
    assert layer.chosen[0, 1][0] < set(world.middle(request))
    world.check(layer.out, world.expected([request], 0, layer.q, layer.chosen))
