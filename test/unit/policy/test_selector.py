"""The granularity-budget selector: native code, torch, and a search in exact fractions agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxion_lab.granularity import Choice, plan_measured, select_granularity
from fluxion_sglang.policy.base import LayerPlan, task_value
from fluxion_sglang.predictor.inference import plan_groups

BLOCKS = (16, 32, 64, 128)
# Multiples of a power of two give exact ties.
COARSE = st.integers(-8, 40).map(lambda i: i / 32)
BUDGETS = st.one_of(COARSE, st.floats(-0.5, 1.5, width=32), st.sampled_from([0.0, 1.0, 2.0, -1.0, 1e-30, 1e30]))
SLOPES = st.one_of(st.integers(-4, 8).map(lambda i: i / 64), st.floats(-0.125, 0.3125, width=32), st.just(0.0))
LOGITS = st.one_of(st.sampled_from([-3.0, 0.0, 0.5, 3.0]), st.floats(-4, 4, width=32))
MARGINS = st.one_of(st.sampled_from([1.0, 0.5, 2.0, 1e30, 1e-30]), st.floats(0.125, 8, width=32))
MIDDLES = st.one_of(
    st.sampled_from([0, 16, 32, 48, 112, 128, 1024, 131072]), st.integers(0, 8192).map(lambda i: 16 * i)
)


def native(
    pred: torch.Tensor, middle: torch.Tensor, kv_heads: int, threshold: float, margins: torch.Tensor,
    blocks: Sequence[int] = BLOCKS,
) -> LayerPlan:  # fmt: skip
    """plan_groups with output tensors that hold garbage."""
    batch = len(middle)
    plan = LayerPlan(
        torch.full((batch, kv_heads), -5, dtype=torch.int32),
        torch.full((batch, pred.numel() // 3 // max(batch, 1)), math.nan),
        torch.full((batch, kv_heads), math.nan),
    )
    plan_groups(pred, middle, kv_heads, threshold, margins, plan.blk, plan.budget, plan.value, blocks)
    return plan


def assert_same(got: LayerPlan, want: LayerPlan) -> None:
    assert torch.equal(got.blk, want.blk)
    assert torch.equal(got.budget, want.budget)
    torch.testing.assert_close(got.value, want.value, rtol=1e-6, atol=0)
    assert got.blk.dtype == want.blk.dtype == torch.int32
    for tensor in (got.budget, got.value, want.budget, want.value):
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()


def search(heads: list[list[float] | None], tokens: int, among: Sequence[int] = BLOCKS) -> tuple[int, list[float]]:
    """Block size and budgets of one group; heads: budgets at the four block sizes, None for a streaming head."""
    if tokens == 0 or all(head is None for head in heads):
        return 0, [0.0] * len(heads)
    found: tuple[Fraction, int, list[float]] | None = None
    for j, blk in enumerate(BLOCKS):
        if blk not in among:
            continue
        budgets = []
        for head in heads:
            if head is None:
                budgets.append(0.0)
                continue
            least, wanted = min(1.0, blk / tokens), head[j]
            clipped = 1.0 if math.isnan(wanted) else min(max(wanted, least), 1.0)
            budgets.append(float(torch.tensor(clipped, dtype=torch.float32)))
        volume = Fraction(2 * tokens, blk) + 2 * tokens * sum(map(Fraction, budgets))
        if found is None or volume <= found[0]:
            found = volume, blk, budgets
    assert found is not None
    return found[1], found[2]


def predicted(bgt0: float, k: float, blk: int, tokens: int, margin: float) -> float:
    """The predicted line, at least one block, times the margin."""
    wanted = bgt0 + k * math.log2(blk)
    return margin * (wanted if math.isnan(wanted) else max(wanted, blk / tokens if blk < tokens else 1.0))


@st.composite
def layers(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, float, torch.Tensor]:
    """pred [B * Hq, 3], middle [B], KV heads, threshold, margins [Hq, 4]."""
    batch, kv_heads, group = draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4, 7, 16]))
    heads = batch * kv_heads * group
    rows = draw(st.lists(st.tuples(BUDGETS, SLOPES, LOGITS), min_size=heads, max_size=heads))
    middle = draw(st.lists(MIDDLES, min_size=batch, max_size=batch))
    pred = torch.tensor(rows, dtype=torch.float32).view(heads, 3)
    threshold = draw(st.sampled_from([0.0, 0.5, -9.0, 9.0]))
    count = kv_heads * group * len(BLOCKS)
    margins = torch.tensor(draw(st.lists(MARGINS, min_size=count, max_size=count))).view(-1, len(BLOCKS))
    return pred, torch.tensor(middle, dtype=torch.int32), kv_heads, threshold, margins


@settings(max_examples=examples(150))
@given(layers(), st.lists(st.sampled_from(BLOCKS), min_size=1, unique=True))
def test_native_torch_and_search_agree(
    case: tuple[torch.Tensor, torch.Tensor, int, float, torch.Tensor], among: list[int]
) -> None:
    pred, middle, kv_heads, threshold, margins = case
    if len(middle) == 0:
        plan = LayerPlan(*(torch.empty(0, n, dtype=d) for n, d in ((kv_heads, torch.int32), (6, torch.float32))), pred)
        value, margins = torch.empty(0, kv_heads), torch.ones(2 * kv_heads, 4)
        plan_groups(pred, middle, kv_heads, threshold, margins, plan.blk, torch.empty(0, 2 * kv_heads), value)
        return
    want = select_granularity(pred, middle, kv_heads, threshold, margins, among)
    assert_same(native(pred, middle, kv_heads, threshold, margins, among), want)
    torch.testing.assert_close(want.value, task_value(middle, want.blk, want.budget) * (want.blk > 0))
    grouped = pred.double().view(len(middle), kv_heads, -1, 3)
    for b, tokens in enumerate(middle.tolist()):
        for h in range(kv_heads):
            mine = margins.double().view(kv_heads, -1, len(BLOCKS))[h].tolist()
            heads = [
                None
                if logit > threshold
                else [predicted(bgt0, k, blk, tokens, m) for blk, m in zip(BLOCKS, margin, strict=True)]
                for (bgt0, k, logit), margin in zip(grouped[b, h].tolist(), mine, strict=True)
            ]
            blk, budgets = search(heads, tokens, among)
            assert int(want.blk[b, h]) == blk
            assert want.budget[b].view(kv_heads, -1)[h].tolist() == budgets


@settings(max_examples=examples(100))
@given(st.data())
def test_measured_budgets(data: st.DataObject) -> None:
    batch, kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    shape = (batch, kv_heads * group, 4)
    count = math.prod(shape)
    values = st.one_of(st.just(0.0), st.integers(0, 32).map(lambda i: i / 32), st.floats(0, 1, width=32))
    budgets = torch.tensor(data.draw(st.lists(values, min_size=count, max_size=count))).view(shape)
    middle = torch.tensor(data.draw(st.lists(MIDDLES, min_size=batch, max_size=batch)), dtype=torch.int32)
    choice = Choice(
        tuple(data.draw(st.lists(st.sampled_from(BLOCKS), min_size=1, unique=True))), data.draw(st.booleans())
    )
    plan = plan_measured(budgets, middle, kv_heads, choice)
    for b, tokens in enumerate(middle.tolist()):
        for h in range(kv_heads):
            rows = budgets[b, h * group : (h + 1) * group].tolist()
            blk, chosen = search(
                [None if not any(row) and not choice.every_head else row for row in rows], tokens, choice.blocks
            )
            assert int(plan.blk[b, h]) == blk
            assert plan.budget[b, h * group : (h + 1) * group].tolist() == chosen
    torch.testing.assert_close(plan.value, task_value(middle, plan.blk, plan.budget) * (plan.blk > 0))


def plan_of(
    rows: list[tuple[float, float, float]], tokens: int, kv_heads: int = 1, margins: torch.Tensor | None = None
) -> LayerPlan:
    """The plan of both implementations, which must agree."""
    pred, middle = torch.tensor(rows), torch.tensor([tokens], dtype=torch.int32)
    margins = torch.ones(len(rows), len(BLOCKS)) if margins is None else margins
    plan = native(pred, middle, kv_heads, 0.0, margins)
    assert_same(plan, select_granularity(pred, middle, kv_heads, 0.0, margins))
    return plan


def test_flat_budgets_take_the_largest_block() -> None:
    plan = plan_of([(0.25, 0.0, -1.0), (0.5, 0.0, -1.0)], 1024)
    assert plan.blk.item() == 128
    assert plan.budget.tolist() == [[0.25, 0.5]]
    assert plan.value.item() == 2 * 1024 / 128 + 2 * 1024 * 0.75


def test_steep_budgets_take_the_smallest_block() -> None:
    plan = plan_of([(0.125, 0.125, -1.0)], 1024)
    assert plan.blk.item() == 16
    assert plan.budget.item() == 0.125 + 0.5


def test_a_tie_takes_the_larger_block() -> None:
    # From 16 to 32 the metadata saves 1/32 and the budgets cost 1/32; beyond, they cost more than they save.
    plan = plan_of([(0.125, 1 / 32, -1.0)], 65536)
    assert plan.blk.item() == 32


def test_streaming_heads_read_nothing() -> None:
    plan = plan_of([(0.5, 0.1, 2.0), (0.25, 0.0, -1.0), (0.5, 0.1, 2.0), (0.5, 0.1, 0.5)], 1024, kv_heads=2)
    assert plan.blk.tolist() == [[128, 0]]
    assert plan.budget.tolist() == [[0.0, 0.25, 0.0, 0.0]]
    assert plan.value[0, 1] == 0.0


def test_a_logit_at_the_threshold_is_no_streaming_head() -> None:
    assert plan_of([(0.25, 0.0, 0.0)], 1024).budget.item() == 0.25


def test_an_empty_middle_makes_no_task() -> None:
    plan = plan_of([(0.5, 0.1, -2.0)], 0)
    assert (plan.blk.item(), plan.budget.item(), plan.value.item()) == (0, 0.0, 0.0)


def test_a_budget_is_at_least_one_block_and_at_most_everything() -> None:
    assert plan_of([(-3.0, 0.0, -1.0)], 1024).budget.item() == 32 / 1024  # the cheapest scan and block
    assert plan_of([(7.0, 0.0, -1.0)], 1024).budget.item() == 1.0
    assert plan_of([(-3.0, 0.0, -1.0)], 16).budget.item() == 1.0  # the only block is longer than the middle


def test_margins_are_of_the_head_and_the_block_size() -> None:
    rows = [(0.25, 0.0, -1.0), (0.5, 0.0, -1.0)]
    margins = torch.tensor([[2.0, 9, 9, 9], [1.5, 9, 9, 9]])
    plan = plan_of(rows, 1024, margins=margins)
    assert (plan.blk.item(), plan.budget.tolist()) == (16, [[0.5, 0.75]])
    assert plan_of(rows, 1024, kv_heads=2, margins=margins.flip(1)).budget.tolist() == [[0.5, 0.75]]
    least = plan_of([(-3.0, 0.0, -1.0)], 1024, margins=torch.tensor([[3.0, 3, 3, 3]]))
    assert (least.blk.item(), least.budget.item()) == (16, 3 * 16 / 1024), "of one block, where the line has less"
    assert plan_of([(-3.0, 0.0, -1.0)], 1024, margins=torch.full((1, 4), 0.5)).budget.item() == 32 / 1024


@pytest.mark.parametrize("bad", [(math.nan, 0.0), (0.1, math.nan), (math.inf, -math.inf)])
def test_predictions_that_are_no_numbers_read_everything(bad: tuple[float, float]) -> None:
    plan = plan_of([(*bad, math.nan), (0.25, 0.0, -1.0)], 1024)
    assert plan.budget.tolist() == [[1.0, 0.25]]


def test_wrong_arguments() -> None:
    blk, value = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1)
    middle, one = torch.tensor([64], dtype=torch.int32), torch.ones(1, 4)
    with pytest.raises(ValueError, match="17 heads and kv_heads is 1; 1 to 16 heads must share"):
        plan_groups(torch.zeros(17, 3), middle, 1, 0.0, torch.ones(17, 4), blk, torch.zeros(1, 17), value)
    with pytest.raises(ValueError, match="3 heads and kv_heads is 2"):
        plan_groups(torch.zeros(3, 3), middle, 2, 0.0, torch.ones(3, 4), blk, torch.zeros(1, 3), value)
    with pytest.raises(ValueError, match="pred is a float32 tensor of shape"):
        plan_groups(torch.zeros(2, 3), middle, 1, 0.0, one, blk, torch.zeros(1, 1), value)
    with pytest.raises(ValueError, match="margins is a float32 tensor of shape"):
        plan_groups(torch.zeros(1, 3), middle, 1, 0.0, torch.ones(2, 4), blk, torch.zeros(1, 1), value)
    for blocks in ((), (8,), (16, 256)):
        with pytest.raises(ValueError, match="among 16, 32, 64 and 128"):
            plan_groups(torch.zeros(1, 3), middle, 1, 0.0, one, blk, torch.zeros(1, 1), value, blocks)
    with pytest.raises(ValueError, match="blk is a float32 tensor"):
        plan_groups(torch.zeros(1, 3), middle, 1, 0.0, one, blk.float(), torch.zeros(1, 1), value)
