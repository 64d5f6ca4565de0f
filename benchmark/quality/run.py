"""The loop over cells: serve, score, compare with full attention, save.

A cell is a task at a length, under every policy. The result file is saved after each cell, so an interrupted run loses
at most one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from tqdm import tqdm

from fluxion_sglang.scoring import kl
from fluxion_sglang.scoring.serve import OFF, Reply, Request, RequestFailed, Server, Start

from . import record, stats
from .base import Codec, Sample, Task
from .plan import FULL, Cell, Plan, counted, fingerprint, groups, hears, targets

SPANS: Final = 8
"""Parts of a forced answer with separate loss and divergence."""


def run(plan: Plan, start: Start) -> dict[str, Any]:
    """Measure what the plan's results lack, and return all of them.

    Args:
        start: starts an engine; called once for the policies and once for `off`, unless everything is measured already.
    """
    passes: list[tuple[str, ...]] = [plan.policies, *([(OFF,)] if plan.off else [])]
    todo = [(policies, plan.pending(policies)) for policies in passes]
    total = sum(len(cells) for _, cells in todo) * plan.settings.samples
    # Without a terminal there is no bar, which would fill the log with copies.
    with tqdm(total=total, unit="sample", disable=None) as bar:
        for policies, cells in todo:
            if cells:
                server = start(policies[0], plan.needs)
                try:
                    for cell in cells:
                        bar.set_description(
                            f"{cell.task.name} {cell.length or ''} {OFF if OFF in policies else ''}".strip()
                        )
                        _measure(plan, cell, policies, server, bar)
                finally:
                    server.close()
    return plan.results


def _measure(plan: Plan, cell: Cell, policies: tuple[str, ...], server: Server, bar: tqdm[Any]) -> None:
    """Add the rows of one cell to the results and save them."""
    samples = plan.samples(cell)
    found = {policy: _Answers(plan.codec, cell.task, samples) for policy in policies}
    sums = {policy: stats.AuditSum() for policy in policies}
    server.audited()  # discard records of an earlier cell
    # The distributions of an answer are large, so limit concurrent ones to what keeps the engine busy.
    size = max(1, 2 * plan.settings.batch // len(policies))
    members = groups(samples)
    hearing = [policy for policy in policies if hears(policy)]
    for group in members:
        for first in range(0, len(group), size):
            part = group[first : first + size]
            if first == 0 or hearing:
                # Prefill the document for all questions and policies. One token: no decode step.
                server.generate([Request(_prompt(samples[part[0]]), policies[0], 1)])
            asked = [(i, policy) for i in part for policy in policies if policy not in hearing]
            replies = server.generate([_request(samples[i], policy) for i, policy in asked])
            for i, policy in [(i, policy) for policy in hearing for i in part]:
                server.forget()
                asked.append((i, policy))
                replies += server.generate([_request(samples[i], policy)])
            by = dict(zip(asked, replies, strict=True))
            for i, policy in asked:
                found[policy].add(i, by[i, policy], by.get((i, FULL)))
            records = server.audited()
            if not records and OFF not in policies and any(len(reply.tokens) > 1 for reply in replies):
                raise RequestFailed(
                    "The engine has written no audit, most likely because the folder for temporary files is full; name "
                    "another in TMPDIR."
                )
            stats.by_policy(records, sums)
            bar.update(len(part))
    documents = [0] * len(samples)
    for number, group in enumerate(members):
        for i in group:
            documents[i] = number
    rows = plan.results["rows"]
    where = {"task": cell.task.name, "length": cell.length}
    haystacks = sorted({str(sample.meta["haystack"]) for sample in samples if "haystack" in sample.meta})
    shared = {
        "prompts": fingerprint(samples),
        "haystack": ", ".join(haystacks) or None,
        "documents": documents,
    }
    rows[:] = [row for row in rows if not (row.items() >= where.items() and row["policy"] in policies)]
    for policy in policies:
        rows.append({**where, "policy": policy, **found[policy].row(), **sums[policy].row(), **shared})
    # In the pass without the flag, `full` may come from an earlier run.
    full = next((row for row in rows if row.items() >= where.items() and row["policy"] == FULL), None)
    for row in rows[-len(policies) :]:
        stats.compare(row, full, plan.settings.seed)
    rows[:] = record.rounded(rows)
    record.save(plan.settings.out, plan.results)


class _Answers:
    """The answers of one policy to the samples of a cell."""

    def __init__(self, codec: Codec, task: Task, samples: Sequence[Sample]) -> None:
        self._codec, self._task, self._samples = codec, task, samples
        self._values: dict[int, float] = {}
        self._answers: dict[int, str] = {}
        self._divergences: dict[int, list[float]] = {}
        self._forced: dict[int, list[float]] = {}
        """Log probabilities of the forced tokens that count."""
        self._agree: list[bool] = []
        """For each forced step that counts, whether the most probable token is that of `full`."""

    def add(self, i: int, reply: Reply, full: Reply | None) -> None:
        """Add the answer to sample `i`.

        Args:
            full: the same under full attention; None where it is not at hand.
        """
        sample = self._samples[i]
        if targets(sample):
            self._forced[i] = [reply.logprobs[step] for step in counted(sample)]
            value = -float(np.mean(self._forced[i]))
        else:
            value = self._task.score(sample, self._codec.decode(reply.tokens))
        self._values[i] = round(value, 6)
        self._answers[i] = hashlib.sha256(str(reply.tokens).encode()).hexdigest()[:8]
        if full is not None:
            found = kl.divergences(full.tokens, full.steps, reply.tokens, reply.steps)
            if targets(sample):  # forced tokens never differ: every step is there, the first left out
                found = [found[step - 1] for step in counted(sample)]
                self._agree += [full.steps[at].likeliest == reply.steps[at].likeliest for at in counted(sample)]
            self._divergences[i] = found

    def row(self) -> dict[str, Any]:
        values = [self._values[i] for i in range(len(self._samples))]
        measure = "perplexity" if targets(self._samples[0]) else "score"
        # Samples have equal weight. A mean over all steps would suppress answers that go wrong early, which compare few
        # steps.
        means = [float(np.mean(found)) for _, found in sorted(self._divergences.items()) if found]
        return {
            "measure": measure,
            "score": stats.score(values, measure),
            "kl": float(np.mean(means)) if means else None,
            "kl_steps": sum(map(len, self._divergences.values())),
            "same": float(np.mean(self._agree)) if self._agree else None,
            "samples": values,
            "answers": [self._answers[i] for i in range(len(self._samples))],
            **({f"{name}_by_span": _by_span(found) for name, found in self._by_step()} if self._forced else {}),
        }

    def _by_step(self) -> list[tuple[str, list[list[float]]]]:
        found = [("loss", [[-value for value in values] for values in self._forced.values()])]
        return found + ([("kl", list(self._divergences.values()))] if self._divergences else [])


def _by_span(samples: list[list[float]]) -> list[float]:
    """Means over `SPANS` parts of the answers, the first one next to the prompt. Empty if an answer is shorter than
    SPANS."""
    if min(map(len, samples)) < SPANS:
        return []
    return [float(np.mean([np.mean(part) for part in parts])) for parts in zip(*map(_parts, samples), strict=True)]


def _parts(values: list[float]) -> list[np.ndarray]:
    return np.array_split(np.asarray(values), SPANS)


def _prompt(sample: Sample) -> tuple[int, ...]:
    return sample.prompt[: len(sample.prompt) - targets(sample)]


def _request(sample: Sample, policy: str) -> Request:
    forced = sample.prompt[len(sample.prompt) - targets(sample) :]
    return Request(_prompt(sample), policy, len(forced) or sample.max_new_tokens, forced)
