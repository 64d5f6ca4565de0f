"""Compute the numbers of a row from samples and audit records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fluxion_sglang.scoring.audit_file import SPEC_BYTES

RESAMPLES: Final = 10_000
LEVEL: Final = 0.95

Floats = NDArray[np.float64]

MEASURES: Final[dict[str, Callable[[Floats], Floats]]] = {
    "score": lambda mean: mean,
    # Samples hold the mean negative log likelihood of their targets.
    "perplexity": np.exp,
}
"""Functions from the mean of the samples to the score of a task."""


def score(samples: Sequence[float], measure: str) -> float:
    return float(MEASURES[measure](np.asarray(np.mean(samples))))


def resampled_deltas(
    policy: Sequence[float], full: Sequence[float], clusters: Sequence[int], measure: str, seed: int
) -> Floats | None:
    """[RESAMPLES] differences of scores, policy minus full. Each uses as many clusters as there are, drawn with
    replacement.

    This is a paired bootstrap of clusters: samples of one document fail together, so documents are drawn, with both
    policies' samples (pairs cluster bootstrap of Cameron, Gelbach and Miller, 2008). Means of n drawn documents have a
    spread that is too small by sqrt((n - 1) / n), which is corrected.

    Args:
        policy, full: the same samples under both, in the same order.
        clusters: each sample's document.

    Returns:
        None with fewer than two documents, which give no spread.
    """
    documents, owner = np.unique(np.asarray(clusters), return_inverse=True)
    count = len(documents)
    if count < 2:
        return None
    sums = np.zeros((count, 3))
    np.add.at(sums, owner, np.stack([policy, full, np.ones(len(owner))], axis=1))
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    drawn = draws @ sums
    means = MEASURES[measure](drawn[:, :2] / drawn[:, 2:])
    whole = sums.sum(axis=0)
    observed = MEASURES[measure](whole[:2] / whole[2])
    deltas, delta = means[:, 0] - means[:, 1], observed[0] - observed[1]
    return np.asarray(delta + (deltas - delta) * np.sqrt(count / (count - 1)))


def interval(deltas: Floats) -> tuple[float, float]:
    """The middle `LEVEL` of a resampled distribution (percentile method)."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(deltas, [tail, 1 - tail])
    return float(low), float(high)


def compare(row: dict[str, Any], full: dict[str, Any] | None, seed: int) -> None:
    """Add a row's difference to `full` with the interval, and the share of equal answers.

    Both rows hold every sample, so this can be repeated with another interval.
    """
    row |= dict.fromkeys(("delta", "delta_low", "delta_high"))
    if full is None:
        return
    row["delta"] = row["score"] - full["score"]
    if row["measure"] == "score":  # forced tokens are always equal; there, steps are compared
        row["same"] = float(np.mean([a == b for a, b in zip(row["answers"], full["answers"], strict=True)]))
    deltas = resampled_deltas(row["samples"], full["samples"], row["documents"], row["measure"], seed)
    if deltas is not None:
        row["delta_low"], row["delta_high"] = interval(deltas)


class AuditSum:
    """Sum of the audit records of one policy in one cell.

    Steps without a middle are left out, because there is nothing to select.
    """

    def __init__(self) -> None:
        self._errors: list[NDArray[np.float32]] = []
        self._layers: set[int] = set()
        self._records = 0
        self._read = 0
        self._whole = 0

    def add(self, records: NDArray[Any]) -> None:
        """Add records of `fluxion_sglang.scoring.audit_file`."""
        records = records[records["middle"] > 0]
        self._errors.append(records["error"].ravel())
        self._layers.update(np.unique(records["layer"]).tolist())
        self._records += len(records)
        self._read += int(records["tile_bytes"].sum()) + int(records["metadata_bytes"].sum())
        self._whole += int(records["kv_bytes"].sum())

    def row(self) -> dict[str, float | None]:
        """Mean and 99th percentile of the error; fraction of the host KV read; bytes read per generated token.

        All None if nothing was recorded.
        """
        if not self._records:
            return dict.fromkeys(("error_mean", "error_p99", "read_fraction", "bytes_per_token"))
        errors = np.concatenate(self._errors)
        return {
            "error_mean": float(errors.mean(dtype=np.float64)),
            "error_p99": float(np.quantile(errors, 0.99)),
            "read_fraction": self._read / self._whole,
            "bytes_per_token": self._read / (self._records / len(self._layers)),
        }


def by_policy(arrays: Iterable[NDArray[Any]], into: dict[str, AuditSum]) -> None:
    """Add every record to the sum of its policy, if `into` has that policy."""
    for array in arrays:
        for spec in np.unique(array["policy"]):
            name = next((name for name in into if name.encode()[:SPEC_BYTES] == spec), None)
            if name is not None:
                into[name].add(array[array["policy"] == spec])
