"""The policy hgca against its algorithm, and the lifetime of its state."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from effort import examples
from hgca_reference import Head
from hypothesis import given, settings
from hypothesis import strategies as st
from test_backend import NEW, RUNNING, Backend
from world import World, on_both, same_reads

from fluxion_lab.bounded import Bounded
from fluxion_lab.hgca import HgcaPolicy
from fluxion_lab.kinds import Listed, listed
from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.policy import parse_spec
from fluxion_sglang.policy.base import LayerPlan, Needs, Observed
from fluxion_sglang.sglang.requests.requests import RequestPolicies

SMALL = Placement(sinks=16, window=32)


class Seen(HgcaPolicy):
    """Records its plans of the last step."""

    def __init__(self, beta: float, alpha: float) -> None:
        super().__init__(beta, alpha)
        self.plans: dict[int, LayerPlan] = {}

    def plan(self, layer: int, q: torch.Tensor, observed: Observed) -> LayerPlan:  # type: ignore[override]
        self.plans[layer] = super().plan(layer, q, observed)
        return self.plans[layer]


def positions(lists: Listed, group: int, g: int) -> list[int]:
    """Positions that head g of a plan's group lists."""
    at = slice(*lists.offsets[group : group + 2].tolist())
    rows = zip(lists.pages[at].tolist(), lists.masks[at].tolist(), strict=True)
    return [page * PAGE + t for page, masks in rows for t in range(PAGE) if masks[g] >> t & 1]


@dataclass
class Told:
    """A world under hgca, with the reference for every head of every row.

    `shape` draws queries and keys: random ones, or such that attention is peaked or flat.
    """

    beta: float
    alpha: float
    kind: str = "random"
    seed: int = 0
    group: int = 3
    heads: int = 2
    layers: int = 2
    dtype: torch.dtype = torch.float32
    placement: Placement = SMALL
    refs: dict[tuple[int, int, int], Head] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world = World(
            layers=self.layers, heads=self.heads, group=self.group, dim=32, placement=self.placement, seed=self.seed,
            dtype=self.dtype,
        )  # fmt: skip
        draw = self.world.randn
        if self.kind != "random":
            size = {"flat": 0.0, "peaked": 8.0, "mild": 1.0}[self.kind]
            self.world.randn = lambda *shape: draw(*shape) * (size if shape[-2] > self.heads else 1.0)  # type: ignore[method-assign]
        self.policy = Seen(self.beta, self.alpha)
        self.random = torch.Generator().manual_seed(self.seed + 7)

    def head(self, layer: int, row: int, head: int) -> Head:
        key = (layer, row, head)
        if key not in self.refs:
            self.refs[key] = Head(self.placement, self.alpha, self.beta, self.world.scale)
        return self.refs[key]

    def prefill(self, row: int, count: int) -> None:
        world = self.world
        world.extend(row, count)
        size = {"flat": 0.0, "peaked": 8.0}.get(self.kind, 1.0)
        for layer in range(world.layers):
            tokens = torch.randn(count, self.heads * self.group, 32, generator=self.random) * size
            tokens = tokens.to(self.dtype)
            world.engine.prefilled(layer, row, world.length(row), tokens, self.policy)
            for h in range(self.heads * self.group):
                keys = world.keys[row][layer][:, h // self.group]
                self.head(layer, row, h).prefill(keys, tokens[-1:, h])

    def decode(self, *rows: int) -> None:
        """A step, compared with the references: lists, averages and outputs."""
        world, group = self.world, self.group
        results = world.decode(list(rows), [self.policy] * len(rows))
        for layer, (got, _) in enumerate(results):
            lists = listed(self.policy.plans[layer])
            assert lists is not None
            for b, row in enumerate(rows):
                assert self.policy.state is not None
                averages = self.policy.state.averages(layer, row)
                for h in range(self.heads * group):
                    keys, values = (of[row][layer][:, h // group] for of in (world.keys, world.values))
                    ref, q = self.head(layer, row, h), world.queries[layer][b, h]
                    ref.decode(keys, q)
                    if ref.near < 1e-4:  # rounding decides; continue from the actual decision
                        ref.salient = set(positions(lists, b * self.heads + h // group, h % group))
                        ref.near = 1.0
                    assert positions(lists, b * self.heads + h // group, h % group) == sorted(ref.salient)
                    want = torch.tensor(list(ref.average.values()))
                    torch.testing.assert_close(averages[h], want, atol=1e-6, rtol=2e-4)
                    at = torch.tensor(sorted([*ref.average, *ref.salient]))
                    weights = (keys[at].double() @ q.double() * world.scale).softmax(0)
                    tolerance = 1e-5 if self.dtype == torch.float32 else 2e-2
                    torch.testing.assert_close(
                        got[b, h].double(), weights @ values[at].double(), atol=tolerance, rtol=tolerance
                    )


@settings(max_examples=examples(12))
@given(
    beta=st.sampled_from([0.0, 0.25, 1.0, 3.0, 1e6]), alpha=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    kind=st.sampled_from(["random", "flat", "peaked", "mild"]), seed=st.integers(0, 2**16),
    length=st.integers(1, 300), steps=st.integers(1, 60), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_it_is_the_algorithm(
    beta: float, alpha: float, kind: str, seed: int, length: int, steps: int, dtype: torch.dtype
) -> None:
    told = Told(beta, alpha, kind, seed, layers=1, dtype=dtype)
    told.prefill(1, length)
    for _ in range(steps):
        told.decode(1)


def test_it_is_the_algorithm_for_hundreds_of_steps_and_several_requests() -> None:
    """Different lengths; requests come and go; prompts in chunks; appended turns."""
    told, draw = Told(1.0, 0.1, seed=3, group=2, heads=1, layers=1), random.Random(3)
    for row, chunks in ((1, (5,)), (2, (200, 90)), (3, (70, 1))):
        for count in chunks:
            told.prefill(row, count)
    for i in range(220):
        told.decode(*sorted(draw.sample([1, 2, 3], draw.randint(1, 3))))
        if i in (60, 140):
            told.prefill(2, 40)
    read = told.world.engine.native.stats()
    assert 0 < read["tokens_read"] < 0.7 * read["middle_tokens"]


@pytest.mark.parametrize(("beta", "everything"), [(0.0, True), (1e30, False)])
def test_the_ends_of_beta(beta: float, everything: bool) -> None:
    told = Told(beta, 0.1, "peaked", group=4)
    told.prefill(1, 400)
    for _ in range(40):
        told.decode(1)
    stats = told.world.engine.native.stats()
    assert stats["tokens_read"] == (stats["middle_tokens"] if everything else 0)
    assert everything or stats["tasks"] == 0


def test_with_everything_kept_it_has_the_bits_of_full() -> None:
    """`full` sees the residents first here, too."""
    outs = []
    for spec in ("full", "hgca:0"):
        world = World(seed=11)
        policy = parse_spec(spec)
        policy.needs = Needs.RESIDENTS
        for row, length in ((1, 700), (2, 100), (3, 1500)):
            world.extend(row, length)
        outs.append([got for _ in range(40) for got, _ in world.decode([1, 2, 3], [policy] * 3)])
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_one_token_that_takes_all_the_weight_is_kept_and_nothing_else() -> None:
    """All keys but one are zero: attention is one-hot while that one is resident, and flat before and after."""
    told = Told(2.0, 0.5, group=1, heads=1, layers=1)
    world, mark = told.world, torch.zeros(1, 1, 32)
    mark[..., 0] = 30.0
    drawn: list[torch.Tensor] = []
    world.randn = lambda *size: drawn.pop(0) if drawn else torch.zeros(*size)  # type: ignore[method-assign]
    told.prefill(1, 48)
    for i in range(80):
        drawn += [mark, mark if i == 0 else torch.zeros(1, 1, 32), torch.randn(1, 1, 32)]
        told.decode(1)
        lists = listed(told.policy.plans[0])
        assert lists is not None
        gone = world.placement.window_start(49 + i) > 48
        assert positions(lists, 0, 0) == ([48] if gone else [])
    assert gone


def test_what_a_request_reads_does_not_depend_on_the_others() -> None:
    """Outputs do not depend on the number of workers either: bit for bit, beside other requests and policies."""

    def run(rows: list[int], workers: int, specs: dict[int, str]) -> list[torch.Tensor]:
        world = World(seed=5, workers=workers)
        policies = {spec: parse_spec(spec) for spec in specs.values()}
        for row, length in ((1, 900), (2, 333), (3, 1300)):
            world.extend(row, length)
        outs = []
        random_ = torch.Generator().manual_seed(1)
        tokens = [torch.randn(60, 2, 3, 8, 64, generator=random_) for _ in range(4)]
        for i in range(60):
            drawn: list[torch.Tensor] = []
            for layer in range(2):
                for kind in range(3):
                    heads = 8 if kind == 0 else 2
                    drawn.append(torch.stack([tokens[row][i, layer, kind, :heads] for row in rows]))
            it = iter(drawn)
            world.randn = lambda *size, it=it: next(it)  # type: ignore[method-assign,misc]
            got = world.decode(rows, [policies[specs[row]] for row in rows])
            outs.append(torch.stack([out[rows.index(2)] for out, _ in got]))
        return outs

    alone = run([2], 1, {2: "hgca:0.5"})
    for workers, specs in (
        (2, {1: "hgca:0.5", 2: "hgca:0.5", 3: "hgca:0.5"}),
        (3, {1: "full", 2: "hgca:0.5", 3: "hgca"}),
    ):
        for a, b in zip(alone, run([1, 2, 3], workers, specs), strict=True):
            assert torch.equal(a, b)


def test_a_row_that_it_never_heard_of_is_evaluated_by_the_step_at_hand() -> None:
    told = Told(0.5, 0.1, layers=1)
    told.world.extend(1, 250)
    policy = told.policy
    told.world.decode([1], [policy])
    lists = listed(policy.plans[0])
    assert lists is not None
    for h in range(6):
        ref, keys = told.head(0, 1, h), told.world.keys[1][0][:, h // 3]
        ref.prefill(keys, told.world.queries[0][0, h : h + 1])
        assert positions(lists, h // 3, h % 3) == sorted(ref.salient)
    for _ in range(20):
        told.decode(1)


@pytest.mark.parametrize("missed", [1, 3, 20, 100])
def test_tokens_that_it_did_not_see(missed: int) -> None:
    """Few unseen tokens have no average until their next step. If unseen tokens have left the window, all is evaluated
    anew."""
    told = Told(0.5, 0.1, layers=1)
    told.prefill(1, 250)
    told.decode(1)
    full = parse_spec("full")
    for _ in range(missed):
        told.world.decode([1], [full])
    if missed < 32:
        for _ in range(40):
            told.decode(1)
        return
    told.world.decode([1], [told.policy])
    lists = listed(told.policy.plans[0])
    assert lists is not None
    for h in range(6):
        ref, keys = told.head(0, 1, h), told.world.keys[1][0][:, h // 3]
        ref.prefill(keys, told.world.queries[0][0, h : h + 1])
        assert positions(lists, h // 3, h % 3) == sorted(ref.salient)


def test_state_dies_with_the_request_and_is_bounded() -> None:
    world = World(seed=9, rows=5)
    backend, policy = Backend(world), HgcaPolicy()
    backend.requests = RequestPolicies(policy)
    backend.engine.policy = policy
    assert policy.state_bytes == 0
    backend.forward({RUNNING: 900, NEW: 900}, [])
    noted = policy.state_bytes
    assert noted == 2 * world.layers * 8 * 64 * 4
    world.decode([RUNNING, NEW])
    both = policy.state_bytes
    residents, pages = world.placement.slots, 900 // PAGE + 1
    most = world.layers * (8 * 4 * residents + 2 * (64 + pages * (4 + 2 * 4)))
    assert 0 < both <= 2 * (most + 64)
    for _ in range(100):
        world.decode([RUNNING])
    backend.req_to_token_pool.req_generation[RUNNING] = 2
    del world.pages[RUNNING], world.keys[RUNNING], world.values[RUNNING]
    backend.forward({RUNNING: 400}, [])
    assert policy.state is not None and policy.state.averages(0, RUNNING).shape[1] == 0
    assert policy.state.averages(0, NEW).shape[1] > 0
    assert policy.state_bytes <= both / 2 + noted / 2 + 1
    for row in (RUNNING, NEW):
        backend.engine.forget(row)
    assert policy.state_bytes == 0


def test_a_request_in_a_used_row_is_as_in_a_fresh_one() -> None:
    """After abort and retraction, and with a shared prefix: the same outputs, bit for bit, as in an unused row."""

    def run(row: int, before: bool) -> list[torch.Tensor]:
        world = World(seed=13)
        backend, policy = Backend(world), HgcaPolicy(0.5)
        backend.requests, backend.engine.policy = RequestPolicies(policy), policy
        backend.forward({3: 800}, [])
        if before:
            kept, world.randn = world.randn, _drawn(99, world)  # type: ignore[method-assign]
            world.extend(row, 600)
            world.engine.prefilled(0, row, 600, torch.randn(5, 8, 64), policy)
            for _ in range(30):
                world.decode([row])
            del world.pages[row], world.keys[row], world.values[row]
            world.randn = kept  # type: ignore[method-assign]
        backend.req_to_token_pool.req_generation[row] = 2
        world.share(row, 3, 40)
        world.randn = _drawn(1, world)  # type: ignore[method-assign]
        backend.forward({row: 100}, [])
        return [got for _ in range(40) for got, _ in world.decode([row])]

    for a, b in zip(run(1, False), run(2, True), strict=True):
        assert torch.equal(a, b)


def _drawn(seed: int, world: World) -> Any:
    random_ = torch.Generator().manual_seed(seed)
    return lambda *size: torch.randn(*size, generator=random_).to(world.dtype)


@pytest.mark.parametrize("spec", ["hgca", "hgca:0", "hgca:0.25", "hgca:2.5:0", "hgca:1:1", "hgca:1e3:0.05"])
def test_specs(spec: str) -> None:
    bounded = parse_spec(spec)
    assert isinstance(bounded, Bounded) and isinstance(bounded.inner, HgcaPolicy)
    policy = bounded.inner
    numbers = [float(part) for part in spec.split(":")[1:]]
    assert (policy.beta, policy.alpha) == (*numbers, *(1.0, 0.1)[len(numbers) :])


@pytest.mark.parametrize("spec", ["hgca:", "hgca:-1", "hgca:nan", "hgca:inf", "hgca:1e999", "hgca:1:1.5", "hgca:1:1:1"])
def test_bad_specs(spec: str) -> None:
    with pytest.raises(ValueError, match="hgca"):
        parse_spec(spec)


def test_any_executor_reads_the_sets() -> None:
    outs, stats = on_both((700, 1200), 20, policy="hgca:0.5", seed=8)
    same_reads(stats)
    assert stats[0]["tokens_read"] > 0
    torch.testing.assert_close(*outs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("heads", [1, 3])
def test_a_request_that_cannot_be_read_fails_the_layer_and_harms_no_state(heads: int) -> None:
    told = Told(0.5, 0.1, layers=1, heads=heads)
    for row in (1, 2):
        told.prefill(row, 300)
    told.decode(1, 2)
    world = told.world
    good, world.pages[1][5] = world.pages[1][5], world.pool.pages + 5
    with pytest.raises(RuntimeError, match="page"):
        world.decode([1], [told.policy])
    world.pages[1][5] = good
    world.engine.forget(1)  # its token was not appended; SGLang ends such a request
    for _ in range(20):
        told.decode(2)


@pytest.mark.parametrize(
    ("alpha", "beta"), [(-0.1, 1.0), (1.1, 1.0), (0.1, -1.0), (0.1, float("inf")), (0.1, float("nan"))]
)
def test_numbers_that_cannot_be_are_refused(alpha: float, beta: float) -> None:
    with pytest.raises(ValueError, match=r"alpha is|beta is"):
        World().engine._bind(HgcaPolicy(beta, alpha))
