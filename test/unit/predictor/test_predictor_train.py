"""Training of the predictor on learnable rules; metrics and baselines on data with known answers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fluxion_sglang.predictor.inference import NativePredictor
from fluxion_sglang.training import report
from fluxion_sglang.training.artifact_writer import Trained
from fluxion_sglang.training.fit import Samples, Settings, fit, pinball, split_sequences, streaming_threshold

pytest.importorskip("sklearn", reason="scikit-learn comes with the extra `train`")
LOG2 = torch.tensor([4.0, 5.0, 6.0, 7.0])


def world(count: int = 6000, sequences: int = 14, noise: float = 0.0, seed: int = 0) -> Samples:
    """Heads with budgets by features 5 and 6 that stream by features 10 and 20.

    Labels of streaming heads are NaN, because they must not be read. The anchor's budgets are right only on average.
    """
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 41, generator=random) * torch.logspace(-2, 3, 41)
    unit = x / torch.logspace(-2, 3, 41)
    x[:, 0] = torch.randint(0, 3, (count,), generator=random)
    x[:, 1] = torch.randint(0, 4, (count,), generator=random)
    x[:, 2] = math.log(1 + 8192)
    x[:, 7] = 3.25  # is constant
    bgt0, k = 0.1 + 0.2 * unit[:, 5].sigmoid(), 0.01 + 0.03 * unit[:, 6].sigmoid()
    bgt0 = bgt0 + noise * torch.randn(count, generator=random)
    streaming = unit[:, 10] + 0.5 * unit[:, 20] > 0.3
    budgets = (bgt0.unsqueeze(1) + k.unsqueeze(1) * LOG2).clamp(1 / 64, 1)
    x[:, 35:39] = budgets[torch.randperm(count, generator=random)]
    x[streaming & (unit[:, 30] > 0), 35:39] = 0
    for labels in (bgt0, k, budgets):
        labels[streaming] = math.nan
    of = torch.randint(0, sequences, (count,), generator=random)
    return Samples(x, bgt0, k, budgets, streaming, of)


def train(samples: Samples, **options: float) -> Trained:
    settings: dict[str, Any] = {"epochs": 15, "seed": 0, "quantile": 0.7, "miss_rate": 0.02, "coverage": 0.9, **options}
    return fit(samples, Settings(**settings), progress=False)


@cache
def learned() -> Trained:
    return train(world())


def test_the_network_is_the_one_that_serves() -> None:
    """Its weights are rounded before it is evaluated."""
    network = learned().network
    assert all(torch.equal(w, w.bfloat16().float()) for name, w in network.named_parameters() if "weight" in name)


def test_it_learns_a_rule() -> None:
    metrics = learned().metrics
    ours, constant, anchor = (metrics[name] for name in ("predictor", "head_constant", "anchor"))
    assert ours["streaming_auc"] > 0.98 and ours["streaming_f1"] > 0.85
    assert ours["miss_rate"] < 0.06
    assert ours["bgt0_r2"] > 0.9 and ours["k_r2"] > 0.8
    for blk in ("16", "32", "64", "128"):
        assert ours["budget_mae"][blk] < 0.4 * min(constant["budget_mae"][blk], anchor["budget_mae"][blk])
        assert ours["budget_r2"][blk] > 0.9
    assert metrics["samples"]["train"] + metrics["samples"]["validation"] + metrics["samples"]["test"] == 6000
    assert metrics["sequences"] == {"train": 10, "validation": 2, "test": 2}


def test_metrics_are_json() -> None:
    assert json.loads(json.dumps(learned().metrics, allow_nan=False)) == learned().metrics


def test_it_serves_as_it_was_trained() -> None:
    """Units are folded into the weights: the native network also predicts labels of new samples."""
    samples = world(count=500, seed=9)
    out = torch.full((500, 3), math.nan)
    NativePredictor(learned().network).forward(samples.features, out)
    keep = ~samples.streaming
    lines = out[keep, :1] + out[keep, 1:2] * LOG2
    assert (lines - samples.budgets[keep]).abs().mean() < 0.03
    assert not out.requires_grad and not learned().network.training


@pytest.mark.parametrize("rare", [True, False])
def test_a_skewed_logit_is_still_one_of_odds(rare: bool) -> None:
    samples = world(count=4000)
    score = samples.features[:, 10] / samples.features[:, 10].std()
    samples.streaming.copy_((score > 1.3) == rare)
    for labels in (samples.bgt0, samples.k, samples.budgets):
        labels.nan_to_num_(nan=0.25)
    logits = train(samples, epochs=6).network(samples.features)[:, 2]
    assert abs(float(logits.sigmoid().mean()) - float(samples.streaming.float().mean())) < 0.03


def test_the_same_seed_gives_the_same_network() -> None:
    samples = world(count=1500)
    before = torch.random.get_rng_state()
    first, again, other = (train(samples, epochs=2, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.threshold == again.threshold and first.metrics == again.metrics
    assert torch.equal(first.margins, again.margins)
    a, b, c = (fitted.network.state_dict() for fitted in (first, again, other))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["layers.0.weight"], c["layers.0.weight"])


def test_the_standardisation_is_that_of_the_training_sequences() -> None:
    samples = world(count=1500)
    split = split_sequences(samples.sequence, 0)
    network = train(samples, epochs=1).network
    values = samples.features[split.train].double()
    torch.testing.assert_close(network.mean, values.mean(0).float())
    assert network.std[7] == 1.0 and network.std[2] == 1.0
    assert torch.allclose(network.std[8:], values.std(0, correction=0).float()[8:])


@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_the_quantile_says_how_many_budgets_suffice(quantile: float) -> None:
    samples = world(noise=0.05)
    under = train(samples, epochs=10, quantile=quantile).metrics["without_margins"]["under_predicted"]
    for share in under.values():
        assert abs(share - (1 - quantile)) < 0.12


@pytest.mark.parametrize("coverage", [0.5, 0.95])
def test_the_coverage_says_how_many_budgets_suffice_whatever_the_quantile(coverage: float) -> None:
    samples = world(noise=0.05)
    fitted = train(samples, epochs=10, quantile=0.7, coverage=coverage)
    assert fitted.margins.shape == (3, 4, 4) and fitted.metrics["settings"]["coverage"] == coverage
    for share in fitted.metrics["predictor"]["under_predicted"].values():
        assert abs(share - (1 - coverage)) < 0.06


@given(st.lists(st.integers(0, 40), min_size=3, max_size=200), st.integers(0, 99))
def test_no_sequence_is_on_two_sides(ids: list[int], seed: int) -> None:
    sequences = torch.tensor(ids)
    if len(set(ids)) < 3:
        with pytest.raises(ValueError, match="each need their own"):
            split_sequences(sequences, seed)
        return
    split = split_sequences(sequences, seed)
    sides = [set(sequences[which].tolist()) for which in (split.train, split.validation, split.test)]
    assert all(sides) and sum(map(len, sides)) == len(set(ids)) and set.union(*sides) == set(ids)
    assert bool((split.train.int() + split.validation.int() + split.test.int() == 1).all())


@given(
    st.lists(st.tuples(st.integers(-20, 20), st.booleans()), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.02, 0.1, 0.5]),
)
def test_the_threshold_keeps_its_promise(rows: list[tuple[int, bool]], miss_rate: float) -> None:
    logits, streaming = torch.tensor([r[0] / 4 for r in rows]), torch.tensor([r[1] for r in rows])
    threshold = streaming_threshold(logits, streaming, miss_rate)
    retrieval = logits[~streaming]
    assert threshold >= 0
    assert int((retrieval > threshold).sum()) <= miss_rate * len(retrieval)
    lower = [t for t in logits.tolist() if 0 <= t < threshold]
    assert all(int((retrieval > t).sum()) > miss_rate * len(retrieval) for t in lower)


def test_a_higher_miss_rate_streams_more() -> None:
    samples = world(count=3000)
    few, many = (train(samples, epochs=2, miss_rate=rate) for rate in (0.0, 0.3))
    assert few.threshold >= many.threshold
    assert few.metrics["predictor"]["miss_rate"] <= many.metrics["predictor"]["miss_rate"]
    assert few.metrics["predictor"]["streaming_recall"] <= many.metrics["predictor"]["streaming_recall"]


def test_pinball() -> None:
    error = torch.tensor([-2.0, 0.0, 3.0])
    assert pinball(error, 0.75).tolist() == [0.5, 0.0, 2.25]


def test_the_baselines_know_what_they_should() -> None:
    """Labels constant per head, and anchors that are right: each baseline is perfect on its own data."""
    samples = world(count=3000)
    head = samples.features[:, 0] * 4 + samples.features[:, 1]
    samples.streaming.copy_(head % 3 == 0)
    samples.bgt0.copy_(0.05 + head / 64)
    samples.k.copy_(0.01 + head / 1024)
    samples.budgets.copy_(samples.bgt0.unsqueeze(1) + samples.k.unsqueeze(1) * LOG2)
    samples.features[:, 35:39] = torch.where(samples.streaming.unsqueeze(1), 0.0, samples.budgets)
    metrics = train(samples, epochs=1).metrics
    for name in ("head_constant", "anchor"):
        score = metrics[name]
        assert score["streaming_auc"] == score["streaming_f1"] == score["streaming_recall"] == 1.0
        assert score["miss_rate"] == 0.0
        assert score["bgt0_mae"] < 1e-5 and score["k_mae"] < 1e-5 and score["k_r2"] > 0.9999
        assert all(mae < 1e-6 for mae in score["budget_mae"].values())
        assert set(score["under_predicted"].values()) == {0.0}


def test_metrics_that_are_not_defined() -> None:
    samples = world(count=600)
    samples.streaming.fill_(False)
    for labels in (samples.bgt0, samples.k, samples.budgets):
        labels.fill_(0.25)
    score = train(samples, epochs=1).metrics["predictor"]
    assert score["streaming_auc"] is score["streaming_f1"] is score["k_r2"] is score["budget_r2"]["16"] is None


def test_refusals() -> None:
    samples = world(count=300)
    with pytest.raises(ValueError, match=r"k has the shape \[299\] and must have \[300\]"):
        train(replace(samples, k=samples.k[1:]))
    with pytest.raises(ValueError, match="come from 2 sequences"):
        train(replace(samples, sequence=samples.sequence % 2))
    for name in ("quantile", "coverage"):
        with pytest.raises(ValueError, match=f"--{name} is 1;"):
            train(samples, **{name: 1.0})
    samples.features[17, 4] = math.nan
    with pytest.raises(ValueError, match="features holds values that are not finite"):
        train(samples)
    samples.features[17, 4] = 0
    samples.budgets[int((~samples.streaming).nonzero()[0]), 2] = math.inf
    with pytest.raises(ValueError, match="budgets holds values that are not finite"):
        train(samples)
    samples.streaming.fill_(True)
    with pytest.raises(ValueError, match="hold no retrieval head"):
        train(samples)


def test_the_table_of_metrics() -> None:
    table = report.metrics_table({0.1: learned().metrics, 0.05: learned().metrics})
    assert "tau 0.05" in table and "tau 0.10" in table
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert all(line.count("|") == rows[0].count("|") for line in rows)
    for name in ("AUC", "F1", "bgt0", "Predictor", "Without margins", "Constant a head", "Anchor's budgets"):
        assert name in table


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib comes with the extra `train`")
    random = torch.Generator().manual_seed(0)
    share = torch.rand(4, 8, generator=random)
    share[2, 3] = math.nan
    report.plot_budgets_by_head(share[:2].unsqueeze(-1).expand(-1, -1, 2), [0, 3], tmp_path / "new" / "heads.png")
    report.plot_budgets_by_head(share[:1].unsqueeze(-1).expand(-1, -1, 2), [1], tmp_path / "one.svg", titles=("a", "b"))
    report.plot_streaming_share(share, tmp_path / "share.png")
    lines = torch.rand(1, 8, 5, generator=random)
    lines[0, 1] = math.nan
    report.plot_budget_by_block(lines, [1, 16, 32, 64, 128], [2], tmp_path / "blocks.svg")
    assert all(path.stat().st_size > 5000 for path in tmp_path.rglob("*.*"))
