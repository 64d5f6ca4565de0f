"""Margins cover their promised share on data like their own, for every head, and for rare heads together; and training
counts as served what serving plans."""

from __future__ import annotations

import math

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxion_lab.granularity import select_granularity
from fluxion_sglang.predictor.features import INDEX
from fluxion_sglang.training.margins import FEW, fit_margins
from fluxion_sglang.training.scores import one_block

LAYERS, HEADS = 3, 4


def drawn(counts: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """predicted, labels, layer, head: `counts` samples of each head. Heads err by different factors, and so do block
    sizes."""
    random = torch.Generator().manual_seed(seed)
    at = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    predicted = 0.001 + torch.rand(len(at), 4, generator=random)
    noise = torch.randn(len(at), 4, generator=random) * (0.2 + 0.1 * torch.arange(4))
    labels = predicted * torch.exp(noise + 0.3 * at.unsqueeze(1))
    return predicted, labels, at // HEADS, at % HEADS


@pytest.mark.parametrize("coverage", [0.5, 0.9, 0.97])
def test_new_samples_are_covered(coverage: float) -> None:
    """The finite-sample rule is exact in the mean over draws; a plain quantile of 100 samples would cover 0.01 less."""
    others = [0] * (LAYERS * HEADS - 1)
    covered = []
    for seed in range(150):
        predicted, labels, layer, head = drawn([FEW, *others], seed)
        margins = fit_margins(predicted, labels, layer, head, (LAYERS, HEADS), coverage)
        predicted, labels, layer, head = drawn([2000, *others], 1000 + seed)
        covered.append((labels <= predicted * margins[layer, head]).double().mean())
    exact = math.ceil((FEW + 1) * coverage) / (FEW + 1)
    assert coverage <= exact == pytest.approx(float(torch.stack(covered).mean()), abs=0.005)


def test_every_head_and_size_has_a_margin_of_its_own() -> None:
    counts = [1000] * (LAYERS * HEADS)
    shape = (LAYERS, HEADS)
    margins = fit_margins(*drawn(counts, 0), shape, 0.9)
    predicted, labels, layer, head = drawn(counts, 1)
    enough = labels <= predicted * margins[layer, head]
    for one in range(LAYERS * HEADS):
        share = enough[layer * HEADS + head == one].double().mean(0)
        assert bool(((share - 0.9).abs() < 0.045).all())
    assert bool((margins.view(-1, 4).diff(dim=0) > 0).all()), "the later a head, the more it asks for too little"


def test_heads_with_few_samples_share_a_margin() -> None:
    """The last four err most, and are too rare for separate margins; a head without samples gets their common one."""
    counts = [500] * 7 + [60, 60, 60, 0, 60]
    drawn_samples = drawn(counts, 2)
    predicted, labels, layer, head = drawn_samples
    margins = fit_margins(*drawn_samples, (LAYERS, HEADS), 0.9).view(-1, 4)
    assert bool((margins[7:] == margins[7]).all())
    at = layer * HEADS + head
    share = (labels <= predicted * margins[at])[at >= 7].double().mean(0)
    assert bool(((share - 0.9).abs() < 0.01).all()), "for the rare ones together"
    assert bool((margins[7] > margins[:7].max(0).values).all())


def test_a_handful_of_rare_samples_takes_the_margin_of_all() -> None:
    predicted, labels, layer, head = drawn([500] * 11 + [3], 3)
    margins = fit_margins(predicted, labels, layer, head, (LAYERS, HEADS), 0.9).view(-1, 4)
    together = fit_margins(predicted, labels, torch.zeros_like(layer), torch.zeros_like(head), (1, 1), 0.9)
    assert torch.equal(margins[11], together.view(4))


def test_a_high_coverage_needs_more_samples() -> None:
    """150 samples cannot determine a quantile of one in a thousand; 12 * 150 can."""
    samples = drawn([150] * (LAYERS * HEADS), 4)
    margins = fit_margins(*samples, (LAYERS, HEADS), 0.999).view(-1, 4)
    assert bool((margins == margins[0]).all())
    predicted, labels, *_ = samples
    assert torch.equal(margins[0], (labels / predicted).max(0).values), "1801 * 0.999 is more than 1799"


def test_what_cannot_be_promised() -> None:
    nothing = torch.empty(0, 4), torch.empty(0, 4), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    assert torch.equal(fit_margins(*nothing, (2, 2), 0.9), torch.ones(2, 2, 4))
    predicted, labels, layer, head = drawn([3], 5)
    margins = fit_margins(predicted, labels, layer, head, (1, 2), 0.99)
    assert torch.equal(margins, (labels / predicted).max(0).values.expand(1, 2, 4))


@settings(max_examples=examples(60))
@given(st.integers(1, 2**31), st.sampled_from([16, 48, 320, 1024, 8192]), st.floats(0.25, 4))
def test_serving_reads_what_training_counts(seed: int, tokens: int, factor: float) -> None:
    """The budget of a head alone in its group, at every block size."""
    random = torch.Generator().manual_seed(seed)
    pred = torch.randn(LAYERS * HEADS, 3, generator=random) * torch.tensor([0.5, 0.1, 0.0])
    margins = factor * (0.5 + torch.rand(HEADS, 4, generator=random))
    features = torch.zeros(len(pred), 41)
    features[:, INDEX["cpu_tokens"]] = math.log1p(tokens)
    least = one_block(features)
    lines = pred[:, :1] + pred[:, 1:2] * torch.tensor([4.0, 5.0, 6.0, 7.0])
    counted = torch.maximum(lines, least) * margins.repeat(LAYERS, 1)
    counted = torch.minimum(torch.maximum(counted, least), torch.ones(()))
    middle = torch.full((LAYERS,), tokens, dtype=torch.int32)
    for j, blk in enumerate((16, 32, 64, 128)):
        plan = select_granularity(pred, middle, HEADS, 0.0, margins, (blk,))
        torch.testing.assert_close(plan.budget.flatten(), counted[:, j], rtol=1e-5, atol=1e-7)
