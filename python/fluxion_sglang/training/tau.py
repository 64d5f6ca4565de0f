"""Chooses a predictor's default tau: serves held-out sequences with each tau, and compares the errors with targets.

The ends of the sequences are decoded with the true tokens forced, so that all policies have the same contexts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from tqdm import tqdm

from fluxion_sglang.scoring.kl import divergence
from fluxion_sglang.scoring.serve import Request, RequestFailed, Server
from fluxion_sglang.training.dataset import TokenSequence

NAME: Final = "calibration.json"
"""The file beside the predictor with the results of every tau and the default."""

FORCED: Final = 64
"""Most tokens at the end of a text that are decoded."""

End = tuple[TokenSequence, int]
"""A sequence and the number of tokens at its end that are decoded."""


def ends(sequences: Iterable[TokenSequence]) -> list[End]:
    """The parts of sequences to decode: whole answers, or the ends of texts.

    A sequence with fewer than two such tokens is left out, because the first token comes from the prefill, which is
    exact.
    """
    found = [(sequence, sequence.answer or min(FORCED, len(sequence.tokens) // 8)) for sequence in sequences]
    return [(sequence, count) for sequence, count in found if count >= 2]


def measure(server: Server, ends: Sequence[End], taus: Sequence[float]) -> list[dict[str, Any]]:
    """Serve the ends with every tau; `ends` is not empty.

    Returns:
        Rows for `full` and every tau: kl, nats a token; right, share of answers whose every token is the most
        probable (None: texts only); read, bytes over those of the middle; error_mean and error_p99 of heads; beyond,
        share of heads and steps whose error exceeds tau (None for full).

    Raises:
        RequestFailed: the engine did not serve a sequence.
    """
    policies: dict[str, float | None] = {"full": None, **{f"fluxion:{tau:g}": tau for tau in taus}}
    kl: dict[str, list[float]] = {policy: [] for policy in policies}
    right: dict[str, list[bool]] = {policy: [] for policy in policies}
    audits: dict[str, list[Any]] = {policy: [] for policy in policies}
    for sequence, count in tqdm(ends, desc="calibrating", unit="seq"):
        prompt, targets = sequence.tokens[:-count], sequence.tokens[-count:]
        reference = None
        for policy in policies:
            (reply,) = server.generate([Request(prompt, policy, count, targets)])
            records = server.audited()
            # The first token comes from the prefill. Every layer with a middle writes a record a step.
            if (there := sum(map(len, records))) == 0 or there % (count - 1):
                raise RequestFailed(
                    "The engine's audit is not whole, most likely because the folder for temporary files is full; name "
                    "another in TMPDIR."
                )
            audits[policy] += records
            reference = reference or reply
            pairs = list(zip(reference.steps, reply.steps, strict=True))[1:]
            kl[policy] += [divergence(full, other) for full, other in pairs]
            if sequence.answer:
                named = tuple(int(step.ids[step.logprobs.argmax()]) for step in reply.steps)
                right[policy].append(named == targets)
    rows = []
    for policy, tau in policies.items():
        records = np.concatenate(audits[policy])
        read = (records["tile_bytes"].sum() + records["metadata_bytes"].sum()) / records["kv_bytes"].sum()
        rows.append(
            {
                "policy": policy,
                "tau": tau,
                "kl": float(np.mean(kl[policy])),
                "right": float(np.mean(right[policy])) if right[policy] else None,
                "read": float(read),
                "error_mean": float(records["error"].mean()),
                "error_p99": float(np.quantile(records["error"], 0.99)),
                "beyond": None if tau is None else float((records["error"] > tau).mean()),
            }
        )
        print(json.dumps(rows[-1]))
    return rows


def outcome(rows: Sequence[dict[str, Any]], kl: float, accuracy: float) -> dict[str, Any]:
    """The content of `NAME`: tau, the default; met, whether it meets the targets; the targets; the rows.

    The default is the largest tau that meets both targets; if none does, the smallest.

    Args:
        rows: from `measure`, `full` first.
        kl: most nats a token. accuracy: largest share of answers that may be lost.
    """
    full, *others = rows
    fitting = [
        row["tau"]
        for row in others
        if row["kl"] <= kl and (full["right"] is None or row["right"] >= full["right"] - accuracy)
    ]
    tau = max(fitting) if fitting else min(row["tau"] for row in others)
    return {"tau": tau, "met": bool(fitting), "kl": kl, "accuracy": accuracy, "rows": list(rows)}


def verdict(found: dict[str, Any]) -> str:
    """One sentence about an `outcome`. Files of earlier versions lack `met`."""
    tau = f"tau {found['tau']:g}"
    if "met" not in found:
        return f"{tau} is the default."
    targets = f"--kl {found['kl']:g} and --accuracy {found['accuracy']:g}"
    if found["met"]:
        return f"{tau} is the default, the largest that keeps {targets}."
    return (
        f"No tau keeps {targets}; {found['tau']:g}, the smallest, is the default: use more data, smaller --taus, or "
        "serve full."
    )
