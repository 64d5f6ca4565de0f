"""Sketches of keys: their kernels on every ISA, tasks that read by them, and the policy."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from int8 import INT8
from kernel_calls import DTYPES, INF, NAN, dtypes, few, head_dims, isas, k, seeds
from native_world import NativeWorld, Request, attention
from torch import Tensor

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.executor.decode import native_plan
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.lab import sketches as reference
from fluxion_sglang.policy import parse_spec
from fluxion_sglang.policy.base import SKETCHED, LayerPlan
from fluxion_sglang.policy.sketch import SketchedTokens
from fluxion_sglang.sglang.options import options_of


def sketch_bytes(D: int) -> int:
    return -(-16 * (D // 2 + 2) // 64) * 64


def sketch_of(isa: str, keys: Tensor) -> Tensor:
    """Of keys [16, D]."""
    out = torch.full((sketch_bytes(keys.shape[1]),), 0xAA, dtype=torch.uint8)
    k("write_sketch")(isa, torch.stack([keys, torch.full_like(keys, NAN)]), keys.shape[1], out)
    return out


def scores_of(isa: str, q: Tensor, sketches: Tensor, pages: Tensor) -> Tensor:
    out = torch.full((len(q), 16 * len(pages)), NAN)
    k("score_sketches")(isa, q, sketches, pages, out)
    return out


# ---- kernels


@isas
@dtypes
@few
@given(seed=seeds, D=head_dims, size=st.sampled_from([1e-3, 1.0, 1e4]))
def test_a_sketch_is_within_half_a_step(isa: str, dtype: torch.dtype, seed: int, D: int, size: float) -> None:
    """Of every element of the rotated key, and a step is a fifteenth of the range."""
    torch.manual_seed(seed)
    keys = (size * torch.randn(16, D)).to(dtype)
    codes, scales = reference.unpacked(sketch_of(isa, keys), D)
    rotated = keys.double() @ reference.rotation(D)
    largest = rotated.abs().amax(1)
    torch.testing.assert_close(scales, largest / 7.5, rtol=2**-8, atol=0.0)
    error = ((codes - 7.5) * scales[:, None] - rotated).abs()
    # Rounding the scale to bfloat16 may move the largest elements out of the codes' range.
    assert bool((error <= scales[:, None] / 2 * (1 + 1e-5) + largest[:, None] * 2**-8).all())


@isas
@few
@given(seed=seeds, D=head_dims)
def test_sketches_are_the_same_on_every_isa(isa: str, seed: int, D: int) -> None:
    torch.manual_seed(seed)
    keys, q = torch.randn(16, D), torch.randn(5, D)
    keys[3, 5] = 30.0  # an element that stands out
    assert torch.equal(sketch_of(isa, keys), sketch_of("scalar", keys))
    sketch, page = sketch_of("scalar", keys)[None], torch.zeros(1, dtype=torch.int32)
    assert torch.equal(scores_of(isa, q, sketch, page), scores_of("scalar", q, sketch, page))


@isas
def test_a_sketch_of_zeros_and_of_what_is_no_number(isa: str) -> None:
    keys = torch.randn(16, 64)
    keys[0], keys[1, 7], keys[2, 9], keys[3] = 0.0, NAN, INF, 1e-42
    q = torch.randn(3, 64)
    scores = scores_of(isa, q, sketch_of(isa, keys)[None], torch.zeros(1, dtype=torch.int32))
    assert bool((scores[:, [0, 3]].abs() < 1e-30).all()) and bool(scores[:, 1:3].isnan().all())
    assert bool(scores[:, 4:].isfinite().all())
    q[1, 3] = NAN
    scores = scores_of(isa, q, sketch_of(isa, keys)[None], torch.zeros(1, dtype=torch.int32))
    assert bool(scores[1].isnan().all()) and bool(scores[0, 4:].isfinite().all())


@isas
@dtypes
@few
@given(seed=seeds, D=head_dims, G=st.integers(1, 16), n=st.integers(0, 9))
def test_scores_of_sketches(isa: str, dtype: torch.dtype, seed: int, D: int, G: int, n: int) -> None:
    """Against the keys that the sketches stand for, within what the queries' 8 bits lose; what is not listed is not
    read."""
    torch.manual_seed(seed)
    tiles = torch.randn(12, 16, D).to(dtype)
    sketches = torch.stack([sketch_of(isa, keys) for keys in tiles])
    pages = torch.randint(0, 12, (n,), dtype=torch.int32)
    q = torch.randn(G, D).to(dtype)
    got = scores_of(isa, q, sketches, pages)
    keys = torch.stack([reference.keys_of(sketch, D) for sketch in sketches])[pages.long()].reshape(-1, D)
    rotated = q.double() @ reference.rotation(D)
    sizes = (keys @ reference.rotation(D)).abs().sum(1)
    off = rotated.abs().amax(1)[:, None] / 254 * sizes / (D & -D)
    assert bool(((got.double() - q.double() @ keys.T).abs() <= off * 1.001 + 1e-4).all())


@isas
@few
@given(
    seed=seeds,
    n=st.integers(1, 40),
    size=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    left=st.sampled_from([1e-6, 0.01, 0.2, 0.9]),
    others=st.sampled_from([-INF, -3.0, 4.0, 60.0]),
    special=st.lists(st.sampled_from([NAN, -INF]), max_size=3),
    cap=st.sampled_from([0.0, 5.0]),
)
def test_keep_mass(
    isa: str, seed: int, n: int, size: float, left: float, others: float, special: list[float], cap: float
) -> None:
    """What is left weighs at most its share, by weights that are right; no more is kept than a tenth of that share
    takes; bits that were there stay."""
    torch.manual_seed(seed)
    scores, scale = size * torch.randn(16 * n), 0.5
    for what in special:
        scores[torch.randint(0, 16 * n, ())] = what
    logits = scores.double() * scale
    logits = cap * (logits / cap).tanh() if cap else logits
    before = torch.randint(0, 2**16, (n,)).to(torch.uint16)
    masks, own = before.clone(), torch.zeros(n, dtype=torch.uint16)
    for into in (masks, own):
        k("keep_mass")(isa, scores.clone(), scale, cap, others, left, into)
    assert torch.equal(masks, before | own)
    logits = logits.nan_to_num(-INF, neginf=-INF)
    unit = max(float(logits.max()), others)
    exact = (logits - unit).exp() if unit > -INF else torch.zeros(16 * n).double()
    total = float(exact.sum()) + (math.exp(others - unit) if unit > -INF else 0.0)
    kept = (own.int()[:, None] >> torch.arange(16) & 1).bool().flatten()
    rest = float(exact[~kept].sum())
    assert rest <= left * total * (1 + 1e-4)
    if kept.any():
        # The heaviest are kept. The bound is looked for in eight halvings of its range, on a scale of logarithms:
        # what the last of them may be off by is all that is kept beyond what must be.
        assert float(exact[kept].min()) >= (float(exact[~kept].max()) if (~kept).any() else 0.0) * (1 - 1e-5)
        must = reference.least_kept(exact, total - float(exact.sum()), left)
        off = math.exp(math.log(16 * n / (left * total)) / 2**8)
        enough = exact[must].min() / off if must.any() else INF
        assert bool((exact[kept & ~must] >= float(enough) * (1 - 1e-4)).all()) or rest > 0.89 * left * total


# ---- tasks


class SketchWorld(NativeWorld):
    def attend(self, requests: list[Request], layer: int, left: float | Tensor) -> tuple[Tensor, Tensor, int]:
        """A layer of the step: q, its output, and how many tasks it made."""
        batch = len(requests)
        q, k, v = (self.randn(batch, heads, self.dim) for heads in (self.q_heads, self.heads, self.heads))
        out, parts = torch.full_like(q, NAN), torch.empty(batch, self.q_heads, 5)
        self.engine.layer_resident(layer, q, k, v, self.windows[layer], self.scale, parts)
        groups = batch, self.heads
        shares = left if isinstance(left, Tensor) else torch.full(groups, left)
        blk, budget = torch.full(groups, SKETCHED, dtype=torch.int32), torch.ones(batch, self.q_heads)
        plan = native_plan(LayerPlan(blk, budget, torch.zeros(groups), kinds=(SketchedTokens(shares),)))
        tasks = self.engine.layer_begin(plan, layer, q, None, None, None, self.scale, out)
        for b, request in enumerate(requests):
            request.keys[layer] = torch.cat([request.keys[layer], k[b : b + 1]])
            request.values[layer] = torch.cat([request.values[layer], v[b : b + 1]])
        return q, out, tasks

    def scores(self, request: Request, layer: int, q: Tensor, h: int) -> Tensor:
        """[G, L] of the middle's tokens, q: [G, D]."""
        first, end = self.placement.sink_pages, len(self.middle(request, layer)) // PAGE + self.placement.sink_pages
        pages = torch.tensor(request.pages[first:end], dtype=torch.int32)
        return scores_of(self.pool.isa, q, self.pool.tensor("sketches", layer)[h].contiguous(), pages) * self.scale

    def check_task(self, request: Request, layer: int, q: Tensor, h: int, read: set[int], left: float) -> Tensor:
        """The output [G, D] of a group that read these positions. Of its heads' attention, at most `left` is unread by
        what the sketches say."""
        middle = self.middle(request, layer)
        n = request.keys[layer].shape[0]
        residents = [*range(self.placement.sinks), *range(self.placement.window_start(n), n)]
        scores = self.scores(request, layer, q, h).double()
        rest = scores.masked_fill(torch.tensor([at in read for at in middle]), -INF).logsumexp(1)
        every = scores.logsumexp(1)
        outs = []
        for g in range(self.group):
            o, _ = attention(
                q[g], *(kv[layer][[*residents, *sorted(read)], h] for kv in (request.keys, request.values)), self.scale
            )
            _, beside = attention(q[g], *(kv[layer][residents, h] for kv in (request.keys, request.values)), self.scale)
            total = torch.logaddexp(every[g], beside)
            assert float((rest[g] - total).exp()) <= left * (1 + 1e-3)
            outs.append(o)
        return torch.stack(outs)


@pytest.mark.parametrize("dtype", [*DTYPES, INT8], ids=["float32", "bfloat16", "int8"])
@settings(max_examples=examples(25))
@given(
    seed=seeds,
    group=st.sampled_from([1, 2, 5, 8]),
    dim=st.sampled_from([32, 64, 96]),
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=3),
    left=st.sampled_from([0.0, 1e-4, 0.1, 0.5, 1.0]),
    workers=st.sampled_from([1, 3]),
)
def test_tasks(
    dtype: torch.dtype, seed: int, group: int, dim: int, lengths: list[int], left: float, workers: int
) -> None:
    """What is read, and that the output is attention to it."""
    world = SketchWorld(seed=seed, group=group, dim=dim, dtype=dtype, workers=workers, sketched=True)
    requests = [world.add(length) for length in lengths]
    world.begin_step(requests)
    q, out, tasks = world.attend(requests, 0, left)
    chosen = world.selections(requests, tasks)
    world.engine.layer_finish()
    assert sorted(chosen) == [(b, h) for b, r in enumerate(requests) if world.middle(r) for h in range(world.heads)]
    before = world.engine.stats()
    want = world.expected(requests, 0, q, {})
    for (b, h), heads in chosen.items():
        read = heads[0]
        assert all(other == read for other in heads) and read <= set(world.middle(requests[b]))
        if left == 0:
            assert read == set(world.middle(requests[b]))
        at = slice(h * group, (h + 1) * group)
        want[b, at] = world.check_task(requests[b], 0, q[b, at], h, read, left)
    world.check(out, want)
    rows = sum(len(heads[0]) for heads in chosen.values())
    pages = sum(len(world.middle(requests[b])) // PAGE for b, _ in chosen)
    assert before["tokens_read"] == rows * group
    assert before["metadata_bytes"] == (pages * sketch_bytes(dim) if left > 0 else 0)


def test_tasks_take_sketches_and_residents() -> None:
    world = SketchWorld(sketched=False)
    requests = [world.add(200)]
    world.begin_step(requests)
    with pytest.raises(RuntimeError, match="the pool has none"):
        world.attend(requests, 0, 0.1)
        world.engine.layer_finish()
    world = SketchWorld(sketched=True)
    requests = [world.add(200)]
    world.begin_step(requests)
    with pytest.raises(RuntimeError, match="share is 0 to 1"):
        world.attend(requests, 0, 1.5)
        world.engine.layer_finish()
    with pytest.raises(ValueError, match="left has the shape"):
        world.attend(requests, 0, torch.zeros(3, 2))


def test_sketches_follow_their_pages() -> None:
    """However tokens came: appended one by one or at once, or adopted, described or not."""
    worlds = [SketchWorld(seed=3, sketched=True) for _ in range(3)]
    keys, values = torch.randn(64, 2, 32), torch.randn(64, 2, 32)
    pages = torch.tensor([5, 9, 2, 7], dtype=torch.int32)
    at_once, one_by_one, adopted = (world.pool for world in worlds)
    at_once.append(0, pages, 0, keys, values)
    for t in range(64):
        one_by_one.append(0, pages, t, keys[t : t + 1], values[t : t + 1])
    for described in (False, True):
        adopted.tensor("tiles", 0)[:, pages.long()] = at_once.tensor("tiles", 0)[:, pages.long()]
        adopted.tensor("sketches", 0).zero_()
        adopted.adopt(0, pages, 0, 64, described=described)
        for pool in (one_by_one, adopted):
            assert torch.equal(
                pool.tensor("sketches", 0)[:, pages.long()], at_once.tensor("sketches", 0)[:, pages.long()]
            )


def test_pools_without_sketches_have_none() -> None:
    world = SketchWorld()
    with pytest.raises(ValueError, match="or sketches of a pool that has"):
        world.pool.tensor("sketches", 0)


# ---- the policy


@pytest.mark.parametrize("spec", ["sketch", "sketch:0.05", "sketch:1"])
def test_specs(spec: str) -> None:
    policy = parse_spec(spec)
    assert policy.sketches and policy.spec == spec and not policy.exact


@pytest.mark.parametrize("spec", ["sketch:1.1", "sketch:0", "sketch:0.1:2", "sketch:"])
def test_wrong_specs(spec: str) -> None:
    with pytest.raises(ValueError, match=r"sketch\[:EPS\]"):
        parse_spec(spec)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, False),
        ({"policy": "sketch"}, True),
        ({"policy": "sketch:0.2"}, True),
        ({"sketches": True}, True),
        ({"policy": "full", "request_policies": ["full", "sketch"]}, True),
        ({"policy": "full", "request_policies": ["full"]}, False),
        ({"policy": "full", "request_policies": True}, False),
    ],
)
def test_which_servers_keep_sketches(options: dict[str, object], kept: bool) -> None:
    assert FluxionConfig.parse(json.dumps(options)).sketched is kept


@pytest.mark.parametrize("options", [{"policy": "sketch"}, {"request_policies": ["sketch:0.2"]}])
def test_a_policy_that_reads_sketches_is_refused_where_none_are_kept(options: dict[str, object]) -> None:
    server = SimpleNamespace(fluxion_config=json.dumps({**options, "sketches": False}))
    with pytest.raises(ConfigError, match=r"keeps none; set sketches to true, or leave the policy out\.$"):
        options_of(server, again=True)
