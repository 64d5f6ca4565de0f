"""Policy specs, plans and task values."""

from __future__ import annotations

import pytest
import torch

from fluxion_sglang.kv.placement import Placement
from fluxion_sglang.policy import parse_spec
from fluxion_sglang.policy.base import DecodeStep, task_value


def step(*lengths: int) -> DecodeStep:
    n = torch.tensor(lengths, dtype=torch.int32)
    pages = torch.zeros(len(lengths), 400, dtype=torch.int32)
    return DecodeStep.build(torch.arange(1, len(lengths) + 1), n, pages, Placement(), kv_heads=2, q_heads=8)


@pytest.mark.parametrize(
    ("spec", "blk", "budget"), [("full", 16, 1.0), ("fixed:16:0.05", 16, 0.05), ("fixed:128:1", 128, 1.0)]
)
def test_specs(spec: str, blk: int, budget: float) -> None:
    policy = parse_spec(spec)
    policy.begin_step(step(100, 1000))
    plan = policy.plan(0, torch.zeros(2, 8, 64))
    assert plan.blk.tolist() == [[blk, blk]] * 2 and plan.blk.dtype == torch.int32
    assert plan.budget.shape == (2, 8) and torch.allclose(plan.budget, torch.tensor(budget))


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "ful",
        "full:1",
        "fixed",
        "fixed:16",
        "fixed:24:0.1",
        "fixed:16:0",
        "fixed:16:1.5",
        "fixed:a:b",
        "fixed:16:nan",
    ],
)
def test_bad_specs_are_refused_in_one_sentence(spec: str) -> None:
    with pytest.raises(ValueError, match=r'use "full" or "fixed:BLK:BUDGET"') as error:
        parse_spec(spec)
    assert "\n" not in str(error.value)


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
