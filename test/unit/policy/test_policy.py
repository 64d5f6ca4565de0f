"""Policy specs, plans and task values."""

from __future__ import annotations

import pytest
import torch

from fluxion_lab.kinds import EarlyStop, early_stop
from fluxion_lab.labels import LabelsPolicy
from fluxion_sglang.kv.placement import Placement
from fluxion_sglang.policy import parse_spec
from fluxion_sglang.policy.base import DecodeStep, Needs, Observed, task_value
from fluxion_sglang.policy.mixed import MixedPolicy, compose
from fluxion_sglang.predictor.features import BUDGETS, COUNT


def step(*lengths: int) -> DecodeStep:
    n = torch.tensor(lengths, dtype=torch.int32)
    return DecodeStep.build(torch.arange(1, len(lengths) + 1), n, Placement(), kv_heads=2, q_heads=8)


@pytest.mark.parametrize(
    ("spec", "blk", "budget"),
    [
        ("full", 16, 1.0), ("streaming", 0, 0.0), ("fixed:16:0.05", 16, 0.05), ("fixed:128:1", 128, 1.0),
        ("oracle:0.05", 1, 0.05), ("oracle:1", 1, 1.0), ("oracle:.5", 1, 0.5), ("fixed:16:5E-2", 16, 0.05),
        ("oracle:1e-45", 1, 1e-45),
    ],
)  # fmt: skip
def test_specs(spec: str, blk: int, budget: float) -> None:
    policy = parse_spec(spec)
    assert policy.spec == spec
    policy.begin_step(step(100, 1000))
    plan = policy.plan(0, torch.zeros(2, 8, 64))
    assert plan.blk.tolist() == [[blk, blk]] * 2 and plan.blk.dtype == torch.int32
    assert plan.budget.shape == (2, 8) and torch.allclose(plan.budget, torch.tensor(budget))
    assert bool((plan.budget > 0).all()) == (budget > 0)


@pytest.mark.parametrize(
    ("spec", "blk", "budget"),
    [
        ("anchor:0.1", [64, 0], [0.25, 0.0, 0.0, 0.0]),
        ("anchor:0.1:any", [64, 0], [0.25, 0.0, 0.0, 0.0]),
        ("anchor:0.1:32", [32, 0], [0.25, 0.0, 0.0, 0.0]),
        ("labels:0.1:16", [16, 0], [0.25, 0.0, 0.0, 0.0]),
        ("labels:score95", [64, 0], [0.25, 0.0, 0.0, 0.0]),
        ("anchor:0.1:16:all", [16, 16], [0.25, 16 / 2048, 16 / 2048, 16 / 2048]),
        ("labels:0.1:any:all", [64, 32], [0.25, 64 / 2048, 32 / 2048, 32 / 2048]),
    ],
)
def test_what_the_selector_may_choose_from(spec: str, blk: list[int], budget: list[float]) -> None:
    """Groups of four heads, the first of which needs the middle."""
    budgets = torch.tensor([0.25, 0.25, 0.25, 0.5]).expand(1, 4, 4).clone()
    budgets[0, 1:] = 0
    features = torch.zeros(1, 4, COUNT)
    features[..., BUDGETS] = budgets
    policy = parse_spec(spec)
    policy.begin_step(
        DecodeStep.build(torch.tensor([1]), torch.tensor([64 + 2048 + 256]), Placement(), kv_heads=2, q_heads=4)
    )
    if isinstance(policy, LabelsPolicy):
        plan = policy.planned(budgets)
    else:
        plan = policy.plan(0, torch.zeros(1, 4, 64), Observed(features))
    assert plan.blk.tolist() == [blk]
    assert plan.budget.tolist() == [budget]


@pytest.mark.parametrize(
    "spec",
    [
        "", "ful", "full:1", "fixed", "fixed:16", "fixed:24:0.1", "fixed:16:0", "fixed:16:1.5", "fixed:a:b",
        "fixed:16:nan", "fixed:16.0:0.5", "fixed:1:0.5", "streaming:0", "oracle", "oracle:0", "oracle:2",
        "oracle:16:0.05", "oracle:inf", "oracle:0.0_5", "oracle: 0.5", "oracle:0.5\n", "oracle:-0.5", "oracle:+0.5",
        "oracle:\u0660.\u0665", "oracle:.", "oracle:0x1",
        "oracle:1e-46", "fixed:16:1e-46", "fixed:16:1e-999",  # 0 in a plan's float32
        "anchor:0.1:24", "anchor:0.1:", "anchor:0.1:any:", "anchor:0.1:16:some", "anchor:0.1:any:all:more",
        "score95:any", "lfps:0", "lfps:0.05:0.2", "lfps:0.05:0.2:0", "lfps:0.05:0.2:0.2:0.2", "psa:0", "psa:1.5",
        "psa:0.95:24", "psa:0.95:32:center", "psa:0.95:32:mean:more", "psa:", "sketch:1.1", "sketch:0",
        "sketch:0.1:2", "sketch:", "x" * 100_000,
    ],
)  # fmt: skip
def test_bad_specs_are_refused_in_one_sentence(spec: str) -> None:
    with pytest.raises(ValueError, match=r'use "full", "streaming", "fixed:BLK:BUDGET".* "oracle:') as error:
        parse_spec(spec)
    assert "\n" not in str(error.value) and len(str(error.value)) < 900


@pytest.mark.parametrize(
    ("spec", "stop", "blk", "spread"),
    [
        ("psa", 0.95, 32, 0.45), ("psa:0.98", 0.98, 32, 0.45), ("psa:1:128", 1.0, 128, 0.4),
        ("psa:.5:64:mean", 0.5, 64, 0.4), ("psa:0.9:16:quest", 0.9, 16, 1.0),
    ],
)  # fmt: skip
def test_psa(spec: str, stop: float, blk: int, spread: float) -> None:
    policy = parse_spec(spec)
    policy.begin_step(step(100, 1000))
    plan = policy.plan(0, torch.zeros(2, 8, 64))
    (kind,) = plan.kinds
    assert isinstance(kind, EarlyStop)
    for got, want in ((plan.blk, blk), (kind.stop, stop), (kind.spread, spread), (plan.budget, 1.0)):
        assert torch.equal(got, torch.full_like(got, want))
    assert policy.needs is Needs.RESIDENTS and plan.value[1, 0] > plan.value[0, 0]


def test_a_plan_follows_its_step() -> None:
    policy = parse_spec("fixed:16:0.05")
    policy.begin_step(step(1000))
    policy.begin_step(step(400, 500, 600))
    assert policy.plan(3, torch.zeros(3, 8, 64)).budget.shape == (3, 8)


def test_value_is_the_papers_formula() -> None:
    middle = torch.tensor([3200], dtype=torch.int32)
    blk = torch.tensor([[16, 64]], dtype=torch.int32)
    budget = torch.tensor([[0.1, 0.2, 0.0, 0.5]])
    expected = [2 * 3200 / 16 + 2 * 3200 * 0.3, 2 * 3200 / 64 + 2 * 3200 * 0.5]
    assert torch.allclose(task_value(middle, blk, budget), torch.tensor([expected]))


def test_longer_requests_are_worth_more() -> None:
    policy = parse_spec("fixed:32:0.02")
    policy.begin_step(step(500, 5000))
    value = policy.plan(0, torch.zeros(2, 8, 64)).value
    assert (value[1] > value[0]).all()


def test_requests_that_share_a_policy_need_no_mixture() -> None:
    policy = parse_spec("fixed:16:0.05")
    assert compose([policy, policy, policy]) is policy


def test_a_mixture_is_what_each_policy_says_of_its_own_requests() -> None:
    specs = ["full", "oracle:0.5", "streaming", "full", "fixed:64:0.25", "psa:0.9:32:quest", "psa:0.5"]
    lengths = [1000, 2000, 700, 100, 1500, 800, 900]
    shared = {spec: parse_spec(spec) for spec in specs}
    mixed = compose([shared[spec] for spec in specs])
    assert isinstance(mixed, MixedPolicy)
    mixed.begin_step(step(*lengths))
    plan = mixed.plan(0, torch.zeros(7, 8, 64))
    kind = early_stop(plan)
    assert kind is not None
    for b, (spec, length) in enumerate(zip(specs, lengths, strict=True)):
        alone = parse_spec(spec)
        alone.begin_step(step(length))
        want = alone.plan(0, torch.zeros(1, 8, 64))
        for got, expected in zip((plan.blk, plan.budget, plan.value), (want.blk, want.budget, want.value), strict=True):
            assert got.dtype == expected.dtype and torch.equal(got[b : b + 1], expected)
        own = early_stop(want)
        assert torch.equal(kind.stop[b : b + 1], torch.zeros(1, 2) if own is None else own.stop)
        assert own is None or torch.equal(kind.spread[b : b + 1], own.spread)
    assert mixed.plan(1, torch.zeros(7, 8, 64)) is plan, "plans that do not change are put together once a step"
