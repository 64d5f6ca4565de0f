"""The picture of an audit file."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from fluxion_sglang.commands.reads.picture import Picture, PolicyRow, ReadsError, Timeline, ratio
from fluxion_sglang.scoring.audit_file import read as read_audit
from fluxion_sglang.scoring.audit_file import record_dtype


def of_audit(path: Path, policy: str | None = None) -> Picture:
    """The picture of an audit file, or of one policy's requests in it; raises ReadsError."""
    steps = _audited_steps(path)
    records = np.concatenate(steps)
    found = [name.decode(errors="replace") for name in np.unique(records["policy"])]
    if policy is not None:
        if policy not in found:
            raise ReadsError(f"{path} has no request with policy {policy!r}; it has {_policies(found)}.")
        wanted = policy.encode()
        steps = [step[step["policy"] == wanted] for step in steps]
        steps = [step for step in steps if len(step)]
        records, found = np.concatenate(steps), [policy]
    layers = int(records["layer"].max()) + 1
    read, middle = (np.array([_per_layer(step, name, layers) for step in steps]) for name in ("tile_bytes", "kv_bytes"))
    if not middle.sum():
        raise ReadsError(
            f"The requests of {path} had no middle: none was longer than sinks and window. Audit a longer prompt."
        )
    errors = np.stack([_mean_errors(records[records["layer"] == layer]) for layer in range(layers)])
    return Picture(
        source=f"{path}, {_policies(found)}",
        steps=len(steps),
        tokens=int((records["layer"] == 0).sum()),
        layers=list(range(layers)),
        columns=list(range(errors.shape[1])),
        share=ratio(read.sum(0), middle.sum(0))[:, None],
        layer_share=ratio(read.sum(0), middle.sum(0)),
        mean_share=float(read.sum() / middle.sum()),
        metadata=float(records["metadata_bytes"].sum() / middle.sum()),
        timeline=Timeline(np.arange(1, len(steps) + 1), read, middle, np.empty(0)),
        errors=errors,
        policies=tuple(_policy_row(name, records[records["policy"] == name.encode()]) for name in found),
    )


def _audited_steps(path: Path) -> list[np.ndarray]:
    try:
        steps, _ = read_audit(path)
    except OSError as error:
        raise ReadsError(f"{path} cannot be read ({error.strerror or error}); give the server's audit file.") from error
    except ValueError as error:
        raise ReadsError(f"{path} is no audit file; give the file that the server's option audit named.") from error
    if not steps:
        raise ReadsError(f"{path} has no decode step yet; send the server a request first.")
    if any(step.dtype.names != record_dtype(1).names for step in steps):
        raise ReadsError(f"{path} is an array of another kind; give the file that the server's option audit named.")
    if len({step.dtype for step in steps}) > 1:
        raise ReadsError(
            f"{path} holds audits of models with different numbers of heads; give every server a file of its own."
        )
    return steps


def _per_layer(step: np.ndarray, name: str, layers: int) -> np.ndarray:
    return np.bincount(step["layer"], weights=step[name], minlength=layers)


def _mean_errors(records: np.ndarray) -> np.ndarray:
    """[query heads], mean over records of layers with a middle and a finite reference output."""
    errors = records["error"][(records["middle"] > 0) & np.isfinite(records["error"]).all(1)]
    return errors.mean(0, dtype=np.float64) if len(errors) else np.full(records["error"].shape[1], np.nan)


def _policy_row(policy: str, records: np.ndarray) -> PolicyRow:
    there = records[records["middle"] > 0]
    errors = there["error"][np.isfinite(there["error"])]
    bytes_there = float(there["kv_bytes"].sum())
    return PolicyRow(
        policy=policy,
        records=len(records),
        share=float(there["tile_bytes"].sum()) / bytes_there if bytes_there else math.nan,
        metadata=float(there["metadata_bytes"].sum()) / bytes_there if bytes_there else math.nan,
        error=float(errors.mean()) if errors.size else math.nan,
        p99=float(np.quantile(errors, 0.99)) if errors.size else math.nan,
    )


def _policies(names: list[str]) -> str:
    return ("policy " if len(names) == 1 else "policies ") + ", ".join(names)
