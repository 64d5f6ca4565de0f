"""The data of a picture of a server or an audit: shares of the middle that were read, over time, and their cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fluxion_sglang.executor.phases import Phase

MODEL_PARTS = ("model", "between")
"""Parts of a decode step that are not attention."""
PART_TEXTS = {
    "resident": "attention to sinks and window",
    "features": "what the policy sees of each head",
    "plan": "the policy",
    "tasks": "attention to the middle",
    "model": "the model outside attention",
    "between": "end of the model, sampling, scheduler",
}
RESIDENT_IN_TASKS = "attention"
"""Text for `tasks` if no policy observes the residents first: they are then attended to beside the queue."""


class ReadsError(Exception):
    """There is nothing to show. The message says why and what to do."""


@dataclass(frozen=True)
class Timeline:
    """Reads over time: T points in time (of a server) or decode steps (of an audit).

    Attributes:
        at: [T], seconds since the first reading, or the number of the step, from 1.
        read, middle: [T, layers] bytes that were read, and bytes of the whole middle.
        tokens_per_s: [T]; empty for an audit.
    """

    at: np.ndarray
    read: np.ndarray
    middle: np.ndarray
    tokens_per_s: np.ndarray

    def __len__(self) -> int:
        return len(self.read)

    def binned(self, points: int) -> Timeline:
        """At most `points` points; adjacent ones are merged."""
        if len(self) <= points:
            return self
        starts = np.linspace(0, len(self), points, endpoint=False).astype(int)
        ends = np.append(starts[1:], len(self))
        tokens = (
            np.add.reduceat(self.tokens_per_s, starts) / (ends - starts)
            if len(self.tokens_per_s)
            else self.tokens_per_s
        )
        return Timeline(
            self.at[ends - 1], np.add.reduceat(self.read, starts), np.add.reduceat(self.middle, starts), tokens
        )

    def shares(self) -> np.ndarray:
        """[T, layers]; NaN without a middle."""
        return ratio(self.read, self.middle)

    def total(self) -> np.ndarray:
        """[T]: the share of all layers together."""
        return ratio(self.read.sum(1), self.middle.sum(1))


@dataclass(frozen=True)
class PolicyRow:
    """Reads and errors of one policy's requests in an audit; shares are of the middle's bytes.

    Attributes:
        records: one per layer, request and step. p99: of the errors of single heads.
    """

    policy: str
    records: int
    share: float
    metadata: float
    error: float
    p99: float


@dataclass(frozen=True)
class Picture:
    """The data of a picture.

    Attributes:
        source: the server's URL or the file's name, with the time or policies covered.
        steps, tokens: decode steps, and tokens that they decoded.
        layers, columns: indices of layers, and of groups (a server) or query heads (an audit).
        share: [layers, groups] of the middle that was read, without metadata; for an audit [layers, 1].
        metadata: bytes of block metadata read, as a share of the middle's.
        parts: seconds of a decode step, by part; empty if no step was timed.
        blocks: share of the groups by the block size of their plan.
        errors: [layers, query heads], mean; for audits only.
        policies: for audits only.
    """

    source: str
    steps: int
    tokens: int
    layers: list[int]
    columns: list[int]
    share: np.ndarray
    layer_share: np.ndarray
    mean_share: float
    metadata: float
    timeline: Timeline
    parts: Mapping[str, float] = field(default_factory=dict)
    blocks: Mapping[str, float] = field(default_factory=dict)
    errors: np.ndarray | None = None
    policies: tuple[PolicyRow, ...] = ()

    @property
    def audited(self) -> bool:
        return self.errors is not None

    @property
    def part_names(self) -> dict[str, str]:
        """A text for each part of the step, in order of time."""
        names = {part.name.lower(): PART_TEXTS[part.name.lower()] for part in Phase}
        if not self.parts.get("resident"):
            names["tasks"] = RESIDENT_IN_TASKS
            del names["resident"], names["features"]
        return names


def ratio(part: Any, whole: Any) -> np.ndarray:
    part, whole = np.broadcast_arrays(np.asarray(part, float), np.asarray(whole, float))
    return np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0)
