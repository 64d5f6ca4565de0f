"""adaptive: exact until it has measured enough, then what its measurements say, and its prompts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fluxion_sglang.policy import parse_spec
from fluxion_sglang.policy.adaptive import ENOUGH, KEPT, NEWEST, SPREAD, AdaptivePolicy, _Prompt, quantile
from fluxion_sglang.policy.reach import Reach
from fluxion_sglang.policy.testing import Request, Rig
from fluxion_sglang.predictor.measure import Reaches


def adaptive(spec: str = "adaptive") -> AdaptivePolicy:
    policy = parse_spec(spec)
    assert isinstance(policy, AdaptivePolicy)
    return policy


def reach_of(rig: Rig) -> Reach | None:
    return next((kind for kind in rig.plans[-1].kinds if isinstance(kind, Reach)), None)


def lean(seed: int, every: int = 0) -> Request:
    """A request whose sinks have nearly all attention, but for that of one query in `every`, which sees none of it."""
    request = Request(seed)
    request.q[..., 0], request.k[..., 0] = 5.0, 0.0
    request.k[:, :32, :, 0] = 8.0
    if every:
        request.q[:, ::every, :, 0] = 0.0
        request.k[:, 32:] *= 2
    return request


def warm(rig: Rig, request: Request) -> None:
    rig.prefill(request, 500)
    rig.run(request, ENOUGH)


@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32) | st.just(-math.inf), max_size=60),
    missed=st.sampled_from([0.02, 0.1, 0.5]),
)
def test_the_quantile_by_its_definition(values: list[float], missed: float) -> None:
    found = float(quantile(torch.tensor(values).view(-1, 1), missed))
    rank = math.ceil((1 - missed) * (len(values) + 1) - 1e-9)
    assert found == (sorted(values)[rank - 1] if rank <= len(values) else math.inf)


def test_one_more_value_exceeds_the_quantile_as_seldom_as_promised() -> None:
    torch.manual_seed(0)
    for missed, n in ((0.1, 19), (0.02, 99)):
        draws = torch.randn(n + 1, 40_000).exp()
        rate = float((draws[-1] > quantile(draws[:-1], missed)).float().mean())
        assert rate == pytest.approx(missed, abs=0.15 * missed)


def test_it_begins_exact() -> None:
    rig, full = Rig(adaptive()), Rig(parse_spec("full"))
    mine, theirs = Request(3), Request(3)
    for one, request in ((rig, mine), (full, theirs)):
        one.prefill(request, 500)
    for a, b in zip(rig.run(mine, ENOUGH), full.run(theirs, ENOUGH), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert all(not plan.kinds for plan in rig.plans)


def test_queries_that_are_no_numbers_teach_nothing() -> None:
    """One client's overflow does not have all others read everything."""
    policy = adaptive()
    rig = Rig(policy)
    warm(rig, lean(0))
    learned, quantiles = list(policy._seen), policy._quantiles.clone()
    assert not quantiles.isposinf().any()
    number = torch.zeros(1, policy._needed.shape[-1])
    policy._learn(0, Reaches(number + math.inf, number))
    policy._learn(0, Reaches(number, number + math.inf))
    assert policy._seen == learned and torch.equal(policy._quantiles, quantiles)


def test_then_it_keeps_its_promise_and_reads_less() -> None:
    """A seventh of the queries needs most of the middle. They get it, and the others read nothing for their sake."""
    tau = 0.3
    rig, full = Rig(adaptive(f"adaptive:{tau}")), Rig(parse_spec("full"))
    beyond, read = [], []
    for seed in range(4):
        mine, theirs = lean(seed, 7), lean(seed, 7)
        before = [engine.engine.native.stats()["tile_bytes"] for engine in (rig, full)]
        for one, request in ((rig, mine), (full, theirs)):
            one.prefill(request, 500)
        for a, b in zip(rig.run(mine, 100), full.run(theirs, 100), strict=True):
            beyond.append((a - b).norm(dim=-1) / b.norm(dim=-1).amax(-1, keepdim=True) > tau)
        read = [
            engine.engine.native.stats()["tile_bytes"] - old for engine, old in zip((rig, full), before, strict=True)
        ]
        rig.release(mine)
        full.release(theirs)
    assert reach_of(rig) is not None
    assert float(torch.stack(beyond[ENOUGH:]).float().mean()) < 0.05
    assert 0.05 < read[0] / read[1] < 0.3


def test_what_a_prompt_needs_is_the_least() -> None:
    """A request reaches at least as far as most measured tokens of its own prompt, and others do not for its sake."""
    rig = Rig(adaptive())
    first = lean(5)
    warm(rig, first)
    sharp = Request(6)
    rig.prefill(sharp, 500)
    rig.decode(first, sharp)
    both = reach_of(rig)
    assert both is not None
    assert bool((both.reach[1] >= both.reach[0]).all())
    assert bool((both.reach[1] > both.reach[0]).any())
    rig.release(sharp)
    again = lean(7)
    rig.prefill(again, 500)
    rig.decode(first, again)
    alone = reach_of(rig)
    assert alone is not None
    assert bool((alone.reach[1] < both.reach[1]).any()), "what the row's last request needed was kept"


def test_old_measurements_are_forgotten() -> None:
    policy = adaptive()
    Rig(policy)

    def learn(value: float, times: int) -> None:
        for _ in range(times):
            policy._learn(0, Reaches(*(torch.full((1, 4), value) for _ in range(2))))

    learn(9.0, ENOUGH)
    assert bool((policy._quantiles[0] == 9).all()) and bool((policy._quantiles[1] == math.inf).all())
    learn(1.0, KEPT)
    assert bool((policy._quantiles[0] == 1).all())


@pytest.mark.parametrize("chunks", [[7], [1, 1], [300], [200, 3], [40, 500, 20], [500, 500]])
def test_which_tokens_of_a_prompt_are_measured(chunks: list[int]) -> None:
    prompt, length = _Prompt(), 0
    queries = torch.arange(sum(chunks)).float().view(-1, 1, 1)
    for chunk in chunks:
        prompt.take(length + chunk, queries[length : length + chunk])
        length += chunk
        assert bool((prompt.queries[:, 0, 0] + 1 == prompt.lengths).all())
    assert int(prompt.lengths[-1]) == length
    assert min(sum(chunks), NEWEST) <= len(prompt.lengths) <= NEWEST + SPREAD
    assert len(prompt.lengths.unique()) == len(prompt.lengths)
    assert prompt.lengths[-NEWEST:].tolist() == list(range(max(length - NEWEST, 0) + 1, length + 1))
    if max(chunks) >= 4 * (NEWEST + SPREAD):
        longest = [i for i, chunk in enumerate(chunks) if chunk >= 4 * (NEWEST + SPREAD)][-1]
        spread = prompt.lengths[:SPREAD] - sum(chunks[:longest])
        assert int(spread.min()) == 1 and int(spread.max()) == chunks[longest] - NEWEST
        assert int(spread.diff().max()) <= chunks[longest] // SPREAD + 2


@pytest.mark.parametrize("spec", ["adaptive:0", "adaptive:2", "adaptive:x", "adaptive:0.1:16"])
def test_illegal_specs(spec: str) -> None:
    with pytest.raises(ValueError, match="adaptive"):
        parse_spec(spec)
