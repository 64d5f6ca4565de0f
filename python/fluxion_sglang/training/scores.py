"""Evaluates a predictor, or a baseline, on samples outside its training set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.predictor.features import INDEX


@dataclass(frozen=True)
class Samples:
    """S samples of (step, layer, query head), with the labels of one tau.

    Attributes:
        features: [S, 41] float32.
        bgt0, k: [S] float32, labels of Eq. 1. budgets: [S, 4] float32, least budgets at blocks of 16, 32, 64, 128
            tokens. All three are ignored for streaming heads.
        streaming: [S] bool: sinks and window suffice.
        sequence: [S] int64, index of the sequence, because whole sequences are held out.
    """

    features: torch.Tensor
    bgt0: torch.Tensor
    k: torch.Tensor
    budgets: torch.Tensor
    streaming: torch.Tensor
    sequence: torch.Tensor

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, which: torch.Tensor) -> Samples:
        return Samples(*(values[which] for values in vars(self).values()))


def one_block(features: torch.Tensor) -> torch.Tensor:
    """[S, 4]: the budget of one block, the least of a head that reads, for features [S, 41]."""
    tokens = torch.expm1(features[:, INDEX["cpu_tokens"]]).clamp(min=1.0).unsqueeze(1)
    return (torch.tensor(BLOCKS) / tokens).clamp(max=1.0)


def score(
    line: torch.Tensor, budgets: torch.Tensor, logits: torch.Tensor, decision: torch.Tensor, test: Samples
) -> dict[str, Any]:
    """Metrics of one method on the test samples; None for an undefined number.

    Budgets are used as in serving: at least one block, at most 1. Regression metrics cover all true retrieval heads,
    also those that the method calls streaming; `miss_rate` is the share of these.
    """
    keep = ~test.streaming
    served = torch.minimum(torch.maximum(budgets, one_block(test.features))[keep], torch.ones(()))
    labels = test.budgets[keep]
    return {
        "streaming_auc": _auc(test.streaming, logits),
        "streaming_f1": _f1(test.streaming, decision),
        "miss_rate": float(decision[keep].float().mean()),
        "streaming_recall": float(decision[~keep].float().mean()) if bool((~keep).any()) else None,
        "bgt0_mae": float((line[keep, 0] - test.bgt0[keep]).abs().mean()),
        "bgt0_r2": _r2(test.bgt0[keep], line[keep, 0]),
        "k_mae": float((line[keep, 1] - test.k[keep]).abs().mean()),
        "k_r2": _r2(test.k[keep], line[keep, 1]),
        "budget_mae": _by_block((served - labels).abs().mean(0)),
        "budget_r2": {str(blk): _r2(labels[:, j], served[:, j]) for j, blk in enumerate(BLOCKS)},
        # Tolerate a thousandth, because the label itself is a whole number of blocks.
        "under_predicted": _by_block((served < labels * (1 - 1e-3)).float().mean(0)),
        "mean_budget": _by_block(served.mean(0)),
        "mean_label": _by_block(labels.mean(0)),
    }


def _by_block(values: torch.Tensor) -> dict[str, float]:
    return {str(blk): float(value) for blk, value in zip(BLOCKS, values, strict=True)}


def _r2(labels: torch.Tensor, predictions: torch.Tensor) -> float | None:
    """Share of the labels' variance that is explained; None if the variance is 0."""
    labels, predictions = labels.double(), predictions.double()
    spread = ((labels - labels.mean()) ** 2).sum()
    return float(1 - ((labels - predictions) ** 2).sum() / spread) if spread > 0 else None


def _auc(labels: torch.Tensor, scores: torch.Tensor) -> float | None:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels.numpy(), scores.numpy())) if 0 < int(labels.sum()) < len(labels) else None


def _f1(labels: torch.Tensor, decisions: torch.Tensor) -> float | None:
    from sklearn.metrics import f1_score

    return float(f1_score(labels.numpy(), decisions.numpy(), zero_division=0.0)) if bool(labels.any()) else None
