"""Results of a trial, as plain values for JSON."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

FULL: Final = "full"
OFF: Final = "off"
"""Stands for SGLang without the flag in place of a policy."""


class TrialError(Exception):
    """Bad input. The message is one sentence."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts from a model's files.

    Attributes:
        name: as the user gave it.
        folder: its folder; None: not on this machine.
        dtype: of its configuration.
        head_dim: elements of a key; None if keys are not stored by head.
        positions: longest context according to the configuration.
        weights_bytes: of the files; None if they are not on this machine.
        predictor: whether its folder has one.
    """

    name: str
    folder: str | None
    architecture: str
    dtype: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int | None
    positions: int
    vocabulary: int
    weights_bytes: int | None
    predictor: bool


@dataclass(frozen=True)
class Fit:
    """Capacity of this machine for KV.

    Attributes:
        available_bytes: available host memory, minus the weights if the CPU is the device.
        kv_bytes: KV of a token, all layers.
        pool_bytes: bytes of a token in the host pool: KV, metadata and moments.
        tokens: of the flag's default pool.
        most_tokens: of the largest pool that `host_tokens` may ask for.
        context: longest context of one request with the default pool.
        problem: why nothing fits; else empty.
    """

    available_bytes: int
    kv_bytes: int
    pool_bytes: int
    tokens: int
    most_tokens: int
    context: int
    problem: str = ""


@dataclass(frozen=True)
class Effort:
    """Amount of measurement at a length.

    Attributes:
        documents: prompts of a length; the largest batch has all of them.
        forced: tokens forced after each document.
        steps: decode steps of a timed run without the flag.
        rounds: timed runs of every policy and batch.
    """

    documents: int
    forced: int
    steps: int
    rounds: int

    @property
    def batches(self) -> tuple[int, ...]:
        return (1,) if self.documents == 1 else (1, self.documents)


@dataclass(frozen=True)
class Plan:
    """The measurements of a trial.

    Attributes:
        lengths: tokens of prompt and answer together.
        policies: the legal ones, `full` first.
        refused: policies that this model or server refuses, with the reason.
        steps: decode steps of a timed run with the flag.
        seconds: estimated time after the plan.
    """

    lengths: list[int]
    policies: list[str]
    refused: dict[str, str]
    effort: Effort
    steps: int
    seconds: float


@dataclass(frozen=True)
class Prefill:
    """Time to the first token of prompts without cache hits; `policy` is `full` or `off`."""

    length: int
    policy: str
    seconds: float
    runs: int


@dataclass(frozen=True)
class Decode:
    """Median time between two tokens of one request, over `runs` timed runs of `steps` decode steps."""

    length: int
    batch: int
    policy: str
    ms: float
    steps: int
    runs: int


@dataclass(frozen=True)
class Reads:
    """Reads of the middle in decode steps.

    Attributes:
        share: tokens that a head read, over those that it could have read.
        bytes_per_token: K, V and metadata read for one token of one request.
    """

    length: int
    policy: str
    share: float
    bytes_per_token: float


@dataclass(frozen=True)
class Agreement:
    """Divergence of a policy's next-token distributions from those of `full`, at forced tokens.

    Attributes:
        steps: compared steps.
        kl: KL(full || policy) in nats, the mean over the steps.
        low, high: its 95% interval.
        same: share of steps with the same most probable token.
    """

    length: int
    policy: str
    steps: int
    kl: float
    low: float
    high: float
    same: float


@dataclass(frozen=True)
class Same:
    """Greedy tokens of one prompt with policy `full` and without the flag.

    Attributes:
        agree: tokens before the first difference; `tokens` if there is none.
        gap: difference in nats of SGLang's two most probable tokens at the first difference.
    """

    length: int
    tokens: int
    agree: int
    gap: float | None = None


@dataclass(frozen=True)
class Advice:
    """The recommendation.

    Attributes:
        policy: the recommended one.
        command: ready to paste.
        reason: one sentence of numbers.
        notes: further remarks and advice.
    """

    policy: str
    command: str
    reason: str
    notes: list[str]


@dataclass
class Results:
    """The results of a trial so far.

    Attributes:
        header: date, machine, versions.
        command: the command line of the trial.
        dtype: served dtype of the model.
        servers: command lines of the servers, by description.
        refusal: why Fluxion does not serve the model; else empty.
        stopped: why the trial ended early; else empty.
        notes: what was left out, and why.
        text: description of the prompts.
    """

    header: dict[str, Any]
    command: str
    model: ModelFacts
    dtype: str = ""
    fit: Fit | None = None
    servers: dict[str, str] = field(default_factory=dict)
    refusal: str = ""
    plan: Plan | None = None
    prefill: list[Prefill] = field(default_factory=list)
    decode: list[Decode] = field(default_factory=list)
    reads: list[Reads] = field(default_factory=list)
    text: str = ""
    agreement: list[Agreement] = field(default_factory=list)
    same: list[Same] = field(default_factory=list)
    advice: Advice | None = None
    notes: list[str] = field(default_factory=list)
    stopped: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**self.header, **{k: v for k, v in dataclasses.asdict(self).items() if k != "header"}}

    def lengths(self) -> list[int]:
        """Lengths with a measurement."""
        return sorted({length for rows in (self.decode, self.prefill, self.agreement) for length in _lengths(rows)})

    def policies(self) -> list[str]:
        """The tried policies, `full` first, without `off`."""
        return self.plan.policies if self.plan else []

    def ms(self, length: int, batch: int, policy: str) -> float | None:
        found = [r.ms for r in self.decode if (r.length, r.batch, r.policy) == (length, batch, policy)]
        return found[0] if found else None

    def agreements(self, policy: str) -> list[Agreement]:
        """The policy's agreements, one per length."""
        return [row for row in self.agreement if row.policy == policy]


def _lengths(rows: Iterable[Any]) -> set[int]:
    return {row.length for row in rows}


def by_length(rows: Iterable[Any]) -> dict[int, list[Any]]:
    """Group rows by length, in rising order."""
    ordered = sorted(rows, key=lambda row: row.length)
    return {length: list(mine) for length, mine in itertools.groupby(ordered, key=lambda row: row.length)}
