"""Every policy passes the checks for policies, and the checks find policies that break the rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from fluxion_sglang.policy import Context, examples, parse_spec
from fluxion_sglang.policy.base import UNSEEN, DecodeStep, LayerPlan, Needs, Observed, Policy
from fluxion_sglang.policy.fixed import FixedPolicy
from fluxion_sglang.policy.testing import CHECKS, Make
from fluxion_sglang.predictor.artifact import LoadedPredictor
from fluxion_sglang.predictor.network import HeadPredictor


def predictor(tau: float | None) -> LoadedPredictor:
    """An untrained predictor: its output is arbitrary but deterministic."""
    torch.manual_seed(0)
    return LoadedPredictor(HeadPredictor().eval(), tau or 0.1, 0.0, torch.rand(8, 32, 4) + 0.5, {})


def make(spec: str) -> Policy:
    return parse_spec(spec, Context(predictor=predictor))


QUICK = {"full", "fluxion", "sketch", "hgca", "lfps"}
"""Policies that select nothing, by features, by sketches, and by state with the lifetime of a request."""


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize(
    "spec", [spec if spec in QUICK else pytest.param(spec, marks=pytest.mark.full) for spec in examples()]
)
def test_every_policy(spec: str, check: Callable[[Make], None]) -> None:
    check(partial(make, spec))


class Broken(FixedPolicy):
    """Budgets of one half, until a test breaks it."""

    def __init__(self) -> None:
        super().__init__(16, 0.5)

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        plan = super().plan(layer, q, observed)
        budget = plan.budget.clone()
        self.change(budget, q)
        return LayerPlan(plan.blk, budget, plan.value)

    def change(self, budget: torch.Tensor, q: torch.Tensor) -> None:
        raise NotImplementedError


class Negative(Broken):
    def change(self, budget: torch.Tensor, q: torch.Tensor) -> None:
        budget[0, 0] = -0.1


class Infinite(Broken):
    def change(self, budget: torch.Tensor, q: torch.Tensor) -> None:
        budget[0, 0] = torch.inf


class Unsteady(Broken):
    steady = True

    def change(self, budget: torch.Tensor, q: torch.Tensor) -> None:
        budget[0, 0] = 0.1


class Random(Broken):
    def change(self, budget: torch.Tensor, q: torch.Tensor) -> None:
        budget.copy_(torch.rand(budget.shape))


class Crowded(Broken):
    """Reads less in a larger batch."""

    def change(self, budget: torch.Tensor, q: torch.Tensor) -> None:
        budget /= len(budget)


class Remembering(Broken):
    """Reads less at every step of a row; a test decides what `released` does."""

    needs = Needs.NOTHING

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, int] = {}
        self.rows: list[int] = []

    def begin_step(self, step: DecodeStep) -> None:
        super().begin_step(step)
        self.rows = step.rows.tolist()
        for row in self.rows:
            self.steps[row] = self.steps.get(row, 0) + 1

    def change(self, budget: torch.Tensor, q: torch.Tensor) -> None:
        for b, row in enumerate(self.rows):
            budget[b] /= self.steps[row]


class Mindful(Remembering):
    """A correct version."""

    def bind(self, world: object) -> None:
        super().bind(world)  # type: ignore[arg-type]
        self.steps = {}

    def prefilled(self, layer: int, row: int, length: int, queries: torch.Tensor) -> None:
        self.released(row)

    def released(self, row: int) -> None:
        self.steps.pop(row, None)


@pytest.mark.parametrize(
    ("broken", "check", "sentence"),
    [
        (dict, "it_can_be_made", "no fluxion_sglang.policy.Policy"),
        (partial(lambda policy: policy, Mindful()), "it_can_be_made", "a policy of its own"),
        (Negative, "it_plans_every_length", "A budget is negative"),
        (Infinite, "it_plans_every_length", "budget has numbers that are not finite"),
        (Unsteady, "it_plans_every_length", "its plan differs from layer to layer"),
        (Random, "it_is_deterministic", "the outputs differ"),
        (Crowded, "batch_mates_do_not_matter", "the outputs differ"),
        (Remembering, "a_row_is_taken_over_clean", "the outputs differ"),
        (Remembering, "a_retracted_request_starts_anew", "the outputs differ"),
        (Remembering, "an_appended_turn_is_as_a_fresh_request", "the outputs differ"),
        (Remembering, "another_engine_starts_anew", "the outputs differ"),
    ],
)
def test_a_check_finds_what_it_is_for(broken: Make, check: str, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        CHECKS[check](broken)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_state_that_is_minded_passes(check: Callable[[Make], None]) -> None:
    check(Mindful)
