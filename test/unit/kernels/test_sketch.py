"""Sketches of keys: their kernels on every ISA, tasks that use them, and the policy."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from definitions import sketches as reference
from effort import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from int8 import INT8
from kernel_calls import DTYPES, INF, NAN, dtypes, few, head_dims, isas, k, seeds
from native_world import NativeWorld, Request, attention, take
from torch import Tensor

from fluxion_sglang.executor.decode import native_plan
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.policy import parse_spec
from fluxion_sglang.policy.base import SKETCHED, LayerPlan
from fluxion_sglang.policy.sketch import SketchedTokens


def sketch_bytes(D: int) -> int:
    return -(-16 * (D // 2 + 2) // 64) * 64


def sketch_of(isa: str, keys: Tensor) -> Tensor:
    """The sketch of keys [16, D]."""
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
    """Each element of the rotated key is within half a step; a step is a fifteenth of the range."""
    torch.manual_seed(seed)
    keys = (size * torch.randn(16, D)).to(dtype)
    keys[3, 5] = 30 * size  # an outlier
    sketch = sketch_of(isa, keys)
    assert torch.equal(sketch, sketch_of("scalar", keys)), "it is the same on every ISA"
    codes, scales = reference.unpacked(sketch, D)
    rotated = keys.double() @ reference.rotation(D)
    largest = rotated.abs().amax(1)
    torch.testing.assert_close(scales, largest / 7.5, rtol=2**-8, atol=0.0)
    error = ((codes - 7.5) * scales[:, None] - rotated).abs()
    # Rounding the scale to bfloat16 may move the largest elements out of the codes' range.
    assert bool((error <= scales[:, None] / 2 * (1 + 1e-5) + largest[:, None] * 2**-8).all())


@pytest.mark.parametrize("dtype", [torch.float32, INT8], ids=["float32", "int8"])
def test_sketches_of_a_pool_are_of_what_it_stores(dtype: torch.dtype) -> None:
    world = SketchWorld(dtype=dtype, sketched=True)
    request = world.add(100)
    pages = torch.tensor(request.pages[: 100 // PAGE], dtype=torch.int32)
    keys, _ = world.pool.gather(0, pages)
    sketches = world.pool.tensor("sketches", 0)[:, pages.long()]
    for h, of_head in enumerate(keys.unflatten(1, (-1, PAGE))):
        for page, of_page in enumerate(of_head):
            rotated = of_page.double() @ reference.rotation(world.dim)
            codes, scales = reference.unpacked(sketches[h, page], world.dim)
            step = rotated.abs().amax(1, keepdim=True) / 7.5
            assert bool((((codes - 7.5) * scales[:, None] - rotated).abs() <= 0.6 * step).all())


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
    """Compare with the keys that the sketches represent, up to the queries' 8-bit rounding; unlisted sketches are not
    read."""
    torch.manual_seed(seed)
    tiles = torch.randn(12, 16, D).to(dtype)
    sketches = torch.stack([sketch_of(isa, keys) for keys in tiles])
    pages = torch.randint(0, 12, (n,), dtype=torch.int32)
    q = torch.randn(G, D).to(dtype)
    got = scores_of(isa, q, sketches, pages)
    assert torch.equal(got, scores_of("scalar", q, sketches, pages)), "they are the same on every ISA"
    keys = torch.stack([reference.keys_of(sketch, D) for sketch in sketches])[pages.long()].reshape(-1, D)
    rotated = q.double() @ reference.rotation(D)
    sizes = (keys @ reference.rotation(D)).abs().sum(1)
    off = rotated.abs().amax(1)[:, None] / 254 * sizes / (D & -D)
    assert bool(((got.double() - q.double() @ keys.T).abs() <= off * 1.001 + 1e-4).all())


def skims_of(isa: str, q: Tensor, sketches: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    about, most = torch.full((2, len(q), -(-len(pages) // 16) * 16), NAN)
    k("skim_sketches")(isa, q, sketches, pages, about, most)
    return about, most


@isas
@dtypes
@few
@given(seed=seeds, D=head_dims, G=st.integers(1, 16), n=st.integers(0, 40))
def test_skims_of_sketches(isa: str, dtype: torch.dtype, seed: int, D: int, G: int, n: int) -> None:
    """The best score of a page by the upper bits, and its possible error; unlisted sketches are not read."""
    torch.manual_seed(seed)
    sketches = torch.stack([sketch_of(isa, keys) for keys in torch.randn(12, 16, D).to(dtype)])
    pages = torch.randint(0, 12, (n,), dtype=torch.int32)
    q = torch.randn(G, D).to(dtype)
    about, most = skims_of(isa, q, sketches, pages)
    assert bool((about[:, n:] == -INF).all()) and bool((most[:, n:] == -INF).all())
    assert all(map(torch.equal, (about, most), skims_of("scalar", q, sketches, pages)))
    if n == 0:
        return
    want, off = (torch.stack(each, 1) for each in zip(*(reference.skimmed(sketches[p], q) for p in pages), strict=True))
    rotated = q.double() @ reference.rotation(D)
    scales = torch.stack([reference.unpacked(sketch, D)[1].max() for sketch in sketches])[pages.long()]
    lost = rotated.abs().amax(1)[:, None] / 254 * 6 * D * scales / (D & -D)
    assert bool(((about[:, :n].double() - want).abs() <= lost * 1.001 + 1e-4).all())
    torch.testing.assert_close((most - about)[:, :n].double(), off, rtol=0.05, atol=1e-4)


@isas
def test_a_skim_passes_over_what_is_no_number(isa: str) -> None:
    keys = torch.randn(2, 16, 64)
    keys[0, 5, 3] = NAN
    keys[1] = INF
    sketches, pages = torch.stack([sketch_of(isa, each) for each in keys]), torch.tensor([0, 1], dtype=torch.int32)
    q = torch.randn(3, 64)
    q[2, 5] = NAN
    for values in skims_of(isa, q, sketches, pages):
        assert bool(values[:2, 0].isfinite().all()) and bool((values[:, 1] == -INF).all())
        assert bool((values[2] == -INF).all())


@isas
@few
@given(
    seed=seeds,
    n=st.integers(0, 40),
    size=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    others=st.sampled_from([-INF, -3.0, 4.0, 60.0, INF]),
    special=st.lists(st.sampled_from([NAN, -INF, INF]), max_size=3),
    cap=st.sampled_from([0.0, 5.0]),
)
def test_weigh(isa: str, seed: int, n: int, size: float, others: float, special: list[float], cap: float) -> None:
    torch.manual_seed(seed)
    scores, scale, unit = size * torch.randn(16 * n), 0.5, torch.full((1,), NAN)
    for what in special if n else ():
        scores[torch.randint(0, 16 * n, ())] = what
    logits = scores.double() * scale
    capped = cap * (logits / cap).tanh() if cap else logits
    logits = capped.masked_fill(logits.isnan() | (logits == -INF), -INF)
    weights = scores.clone()
    total = k("weigh")(isa, weights, scale, cap, others, unit)
    top = max([*logits.tolist(), others])
    most = float(torch.finfo(torch.float32).max)
    assert float(unit) == pytest.approx(min(top, most) if top > -INF else 0.0, rel=1e-5, abs=1e-5)
    want = (logits - float(unit)).clamp(max=0).exp()
    torch.testing.assert_close(weights.double(), want, rtol=1e-4, atol=1e-30)
    assert bool(((weights == 0) | (weights >= torch.finfo(torch.float32).tiny)).all()), "their sums have inverses"
    assert total == pytest.approx(float(want.sum()), rel=1e-4, abs=1e-30)


@isas
@few
@given(
    seed=seeds,
    n=st.integers(0, 40),
    size=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    shares=st.lists(st.sampled_from([0.0, 1e-6, 0.01, 0.2, 0.9, 1.1]), min_size=1, max_size=3).map(sorted),
)
def test_light_bounds(isa: str, seed: int, n: int, size: float, shares: list[float]) -> None:
    """Lighter tokens weigh at most the allowed amount, and the bound is close to the highest such bound."""
    torch.manual_seed(seed)
    weights = (size * torch.randn(16 * n)).clamp(max=0).exp()
    if n:
        weights[torch.randint(0, 16 * n, (3,))] = 0.0
    exact, allowed = weights.double(), torch.tensor(shares) * float(weights.sum())
    bounds = torch.full((len(shares),), NAN)
    k("light_bounds")(isa, weights, allowed, bounds)
    assert bool((bounds > 0).all()) and bounds.tolist() == sorted(bounds)
    for most, bound in zip(allowed.double().tolist(), bounds.tolist(), strict=True):
        light = float(exact[exact < bound].sum())
        assert light <= most * (1 + 1e-4) + 1e-37 * len(weights)
        if bound > 1 or light > 0.89 * most:
            continue
        # Eight halvings of the search range on a log scale: a bound higher by the remaining step would be too high.
        higher = bound * math.exp(math.log(2 * 16 * n / max(most, 1e-37 * 16 * n)) / 2**8)
        assert float(exact[exact < higher].sum()) >= most * (1 - 1e-4)


@isas
@few
@given(seed=seeds, n=st.integers(0, 40), bound=st.sampled_from([1e-30, 0.3, 1.0, 2.0]))
def test_mark_heavy(isa: str, seed: int, n: int, bound: float) -> None:
    torch.manual_seed(seed)
    weights = torch.rand(16 * n)
    weights[::5], weights[::7] = bound, 0.0
    masks = torch.full((n,), 0xAAAA, dtype=torch.uint16)
    k("mark_heavy")(isa, weights, bound, masks)
    marked = (masks.int()[:, None] >> torch.arange(16) & 1).bool().flatten()
    assert torch.equal(marked, weights >= torch.tensor(bound))


@isas
@dtypes
@few
@given(seed=seeds, D=head_dims, G=st.integers(1, 16), n=st.integers(0, 30), share=st.sampled_from([0.0, 0.1, 0.6, 1.0]))
def test_add_values(isa: str, dtype: torch.dtype, seed: int, D: int, G: int, n: int, share: float) -> None:
    """Only the tokens in the masks are added."""
    torch.manual_seed(seed)
    tiles = torch.full((40, 2, 16, D), NAN, dtype=dtype)
    pages, at = torch.randperm(40, dtype=torch.int32)[:n], torch.randperm(n, dtype=torch.int32)
    named = torch.rand(n, 16) < share
    masks = (named << torch.arange(16)).sum(1).to(torch.uint16)
    values = torch.randn(n, 16, D).to(dtype)
    tiles[pages.long(), 1] = values.masked_fill(~named[..., None], NAN)
    weights = torch.rand(G, (n + 1) * 16)
    weights[:, n * 16 :] = NAN
    o, sums = torch.full((G, D), NAN), torch.full((G,), NAN)
    k("add_values")(isa, weights, at, tiles, pages, masks, o, sums)
    own = weights.view(G, -1, 16)[:, at.long()][:, named].double()
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    torch.testing.assert_close(sums.double(), own.sum(1), rtol=unit, atol=1e-6)
    want = own @ values[named].double()
    assert bool(((o - want).abs() <= unit * (own @ values[named].double().abs()) + 1e-6).all())


# ---- tasks


class Choice(NamedTuple):
    """What a group [G, D] reads of a middle with L tokens."""

    read: Tensor  # [L] bool
    exact: Tensor  # tokens with exact attention
    about: Tensor  # [G, L], logits by the sketches; -inf on pages that were only skimmed
    tile_bytes: int
    metadata_bytes: int


class SketchWorld(NativeWorld):
    def attend(
        self, requests: list[Request], layer: int, left: float | Tensor, q: Tensor | None = None
    ) -> tuple[Tensor, Tensor, int]:
        """Execute a layer of the step: q, its output, and the number of tasks."""
        batch = len(requests)
        k, v = (self.randn(batch, self.heads, self.dim) for _ in range(2))
        q = self.randn(batch, self.q_heads, self.dim) if q is None else q
        out, parts = torch.full_like(q, NAN), torch.empty(batch, self.q_heads, 5)
        self.engine.layer_resident(self.at(layer), q, k, v, parts)
        plan = self.plan(requests, SKETCHED)
        shares = left if isinstance(left, Tensor) else torch.full((batch, self.heads), left)
        native = native_plan(LayerPlan(plan.blk, plan.budget, plan.value, kinds=(SketchedTokens(shares),)))
        tasks = self.engine.layer_begin(native, self.at(layer), q, None, None, out)
        take(requests, layer, k, v)
        return q, out, tasks

    def chosen(self, request: Request, layer: int, q: Tensor, h: int, left: float) -> Choice:
        """The choice for queries [G, D], computed by the kernels."""
        isa, sketches = self.pool.isa, self.pool.tensor("sketches", layer)[h].contiguous()
        first, count = self.placement.sink_pages, len(self.middle(request, layer)) // PAGE
        pages = torch.tensor(request.pages[first : first + count], dtype=torch.int32)
        beside = [self.beside(request, layer, q[g], h) for g in range(self.group)]
        about, most = skims_of(isa, q, sketches, pages)
        near, skipped, unit = torch.zeros(about.shape[1], dtype=torch.bool), torch.zeros(self.group), torch.empty(1)
        shares = torch.tensor([left, reference.exact_share(left)])
        for g in range(self.group):
            total = k("weigh")(isa, about[g], self.scale, 0.0, beside[g], unit) + math.exp(beside[g] - float(unit))
            skipped[g], before = float(unit), float(unit)
            k("weigh")(isa, most[g], self.scale, 0.0, before, unit)
            near |= self.heavy(isa, most[g], torch.tensor([left / 8 * total * math.exp(before - float(unit))]))[0]
        skipped += (4 * torch.where(near, 0.0, about).sum(1)).log()
        near = near[:count]
        scores = scores_of(isa, q, sketches, pages[near])
        masks = torch.zeros(2, scores.shape[1], dtype=torch.bool)
        for g in range(self.group):
            weights = scores[g].clone()
            total = k("weigh")(isa, weights, self.scale, 0.0, beside[g], unit) + math.exp(beside[g] - float(unit))
            rest = math.exp(float(skipped[g]) - float(unit))
            masks |= self.heavy(
                isa, weights, torch.maximum(shares * (total + rest) - rest, shares * (total + rest) / 2)
            )
        found = near.repeat_interleave(PAGE)
        read, exact = torch.zeros(2, len(found), dtype=torch.bool).masked_scatter_(found.expand(2, -1), masks)
        tiles = self.pool.tensor("tiles", layer)[0, 0].nbytes
        rows, of_tiles = int(read.sum() + exact.sum()), int(read.view(-1, PAGE).any(1).sum())
        whole = self.int8 or 2 * int(exact.sum()) > PAGE * of_tiles
        logits = torch.full((self.group, len(found)), -INF)
        logits.masked_scatter_(found.expand(self.group, -1), scores * self.scale)
        skimmed = PAGE * (self.dim // 4 + 2)
        return Choice(
            read,
            read if whole else exact,
            logits,
            of_tiles * tiles if whole else rows * tiles // (2 * PAGE),
            count * skimmed + int(near.sum()) * (sketches.shape[1] - skimmed),
        )

    @staticmethod
    def heavy(isa: str, weights: Tensor, allowed: Tensor) -> Tensor:
        """[len(allowed), n] bool: tokens that are not light."""
        bounds = torch.empty(len(allowed))
        k("light_bounds")(isa, weights, allowed, bounds)
        return weights >= bounds[:, None]

    def residents(self, request: Request, layer: int) -> list[int]:
        n = request.keys[layer].shape[0]
        return [*range(self.placement.sinks), *range(self.placement.window_start(n), n)]

    def beside(self, request: Request, layer: int, q: Tensor, h: int) -> float:
        """The LSE of the residents."""
        at = self.residents(request, layer)
        return float(attention(q, request.keys[layer][at, h], request.values[layer][at, h], self.scale)[1])

    def output(self, request: Request, layer: int, q: Tensor, h: int, choice: Choice) -> Tensor:
        """Expected output, [G, D] float64."""
        residents = self.residents(request, layer)
        middle = torch.tensor(self.middle(request, layer), dtype=torch.long)
        at = torch.cat([torch.tensor(residents), middle[choice.read]])
        keys, values = (kv[layer][at, h].double() for kv in (request.keys, request.values))
        logits = q.double() @ keys.T * self.scale
        of_read = torch.where(choice.exact[choice.read], logits[:, len(residents) :], choice.about[:, choice.read])
        return torch.cat([logits[:, : len(residents)], of_read], 1).softmax(1) @ values

    def unread(self, request: Request, layer: int, q: Tensor, h: int, read: set[int]) -> float:
        """The largest share of attention that a head leaves unread, by exact keys."""
        n = request.keys[layer].shape[0]
        weights = (q.double() @ request.keys[layer][:, h].double().T * self.scale).softmax(1)
        rest = set(self.middle(request, layer)) - read
        return float(weights[:, torch.tensor([at in rest for at in range(n)])].sum(1).max())


@pytest.mark.parametrize("dtype", [*DTYPES, INT8], ids=["float32", "bfloat16", "int8"])
@settings(max_examples=examples(25))
@given(
    seed=seeds,
    group=st.sampled_from([1, 2, 5, 8]),
    dim=st.sampled_from([32, 64, 96]),
    lengths=st.lists(st.integers(1, 1300), min_size=1, max_size=3),
    left=st.sampled_from([1e-4, 0.1, 0.5]),
    workers=st.sampled_from([1, 3]),
)
def test_tasks(
    dtype: torch.dtype, seed: int, group: int, dim: int, lengths: list[int], left: float, workers: int
) -> None:
    """The tokens read are right, and the output is attention to them."""
    world = SketchWorld(
        seed=seed, group=group, dim=dim, dtype=dtype, workers=workers, sketched=True, chunk_bytes=1 << 11, canary=1.0
    )
    requests = [world.add(length) for length in lengths]
    world.begin_step(requests)
    q, out, tasks = world.attend(requests, 0, left)
    chosen = world.selections(requests, tasks)
    world.engine.layer_finish()
    stats = world.engine.stats()
    assert sorted(chosen) == [(b, h) for b, r in enumerate(requests) if world.middle(r) for h in range(world.heads)]
    choices = {
        (b, h): world.chosen(requests[b], 0, q[b, h * group : (h + 1) * group], h, left) for b, h in sorted(chosen)
    }
    # The engine's LSE of residents is rounded, and so is the allowed rest; very rarely it reads one token more.
    for name in ("tile_bytes", "metadata_bytes"):
        want = sum(getattr(choice, name) for choice in choices.values())
        assert stats[name] == pytest.approx(want, rel=0.02)
        assume(stats[name] == want)
    want_out = world.expected(requests, 0, q, {})
    for (b, h), choice in choices.items():
        middle = torch.tensor(world.middle(requests[b]))
        assert all(read == set(middle[choice.read].tolist()) for read in chosen[b, h])
        at = slice(h * group, (h + 1) * group)
        want_out[b, at] = world.output(requests[b], 0, q[b, at], h, choice)
    world.check(out, want_out)
    assert stats["tokens_read"] == sum(int(choice.read.sum()) for choice in choices.values()) * group


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("beside", [80.0, 86.0, 88.0, 90.0, 92.0, 96.0, 102.0, 110.0])
def test_what_weighs_next_to_nothing_for_another_head(beside: float, dtype: torch.dtype) -> None:
    """All heads of a group attend to tokens that one of them chose. Here the first token has a logit of `beside` for
    one head; its other weights almost vanish in float32, and the inverse of their sum overflows."""
    world = SketchWorld(seed=1, sketched=True, dim=64, heads=1, group=2, dtype=dtype)
    q, keys = world.randn(1, 2, 64), world.randn(1500, 1, 64)
    q[0, 1] -= (q[0, 1] @ q[0, 0]) / q[0, 0].square().sum() * q[0, 0]
    keys[0, 0] = beside / world.scale * q[0, 0] / q[0, 0].square().sum()
    request = world.add(1500, keys=[keys])
    world.begin_step([request])
    q, out, tasks = world.attend([request], 0, 0.1, q)
    chosen = world.selections([request], tasks)
    world.engine.layer_finish()
    assert len(chosen[0, 0][0]) > 300, "the other head is diffuse"
    choice = world.chosen(request, 0, q[0], 0, 0.1)
    world.check(out, world.output(request, 0, q[0], 0, choice).unsqueeze(0))


@pytest.mark.parametrize("left", [0.0, 1.0])
def test_shares_of_nothing_and_of_all(left: float) -> None:
    world = SketchWorld(sketched=True)
    requests = [world.add(700)]
    world.begin_step(requests)
    q, out, tasks = world.attend(requests, 0, left)
    chosen = world.selections(requests, tasks)
    world.engine.layer_finish()
    read = set() if left else set(world.middle(requests[0]))
    assert len(chosen) == world.heads and all(heads == [read] * world.group for heads in chosen.values())
    world.check(out, world.expected(requests, 0, q, chosen))
    assert world.engine.stats()["metadata_bytes"] == 0


@settings(max_examples=examples(25))
@given(
    seed=seeds,
    flat=st.sampled_from([0.0, 0.1, 1.0, 3.0]),
    beside=st.sampled_from([0.0, 3.0, 7.0, 7.5, 8.0, 8.5, 9.0]),
    left=st.sampled_from([0.01, 0.1, 0.3]),
)
def test_what_is_left_has_its_share(seed: int, flat: float, beside: float, left: float) -> None:
    """By exact keys, for middles from flat to peaked and residents of large or small weight. The mean over heads may be
    twice the share, because pages that are only skimmed count less than their flat weight. A single head may have five
    times the share, because sketches may misjudge its heaviest token."""
    world = SketchWorld(seed=seed, sketched=True, dim=64, heads=8, group=1)
    keys = flat * world.randn(1500, world.heads, 64)
    q = world.randn(1, world.q_heads, 64)
    keys[0] = beside * 8 * q[0] / q[0].square().sum(1, keepdim=True)  # its logit is `beside`
    request = world.add(1500, keys=[keys])
    world.begin_step([request])
    q, _, tasks = world.attend([request], 0, left, q)
    chosen = world.selections([request], tasks)
    world.engine.layer_finish()
    unread = [world.unread(request, 0, q[0, h : h + 1], h, chosen[0, h][0]) for h in range(world.heads)]
    assert sum(unread) / len(unread) <= 2 * left + 1e-3 and max(unread) <= 5 * left + 1e-3


def test_tasks_take_sketches_and_residents() -> None:
    world = SketchWorld(sketched=False)
    with pytest.raises(ValueError, match="or sketches of a pool that has"):
        world.pool.tensor("sketches", 0)
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


@pytest.mark.parametrize("dtype", [torch.float32, INT8], ids=["float32", "int8"])
def test_sketches_follow_their_pages(dtype: torch.dtype) -> None:
    """For tokens appended one by one or together, or adopted, with or without description."""
    worlds = [SketchWorld(seed=3, dtype=dtype, sketched=True) for _ in range(3)]
    keys, values = torch.randn(2, 64, 2, 32).to(worlds[0].pool.dtype)
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


# ---- the policy


@pytest.mark.parametrize("spec", ["sketch", "sketch:0.05", "sketch:1"])
def test_specs(spec: str) -> None:
    policy = parse_spec(spec)
    assert policy.sketches and policy.spec == spec and not policy.exact
