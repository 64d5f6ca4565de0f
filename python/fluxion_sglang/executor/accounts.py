"""Counts the bytes that decode steps read, by layer and group, and the time of their parts, for `fluxion explain`."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass

import torch

from fluxion_sglang.executor.phases import Phase
from fluxion_sglang.kv.host_pool import KVShape
from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.native import NativeEngine
from fluxion_sglang.policy.base import SKETCHED, DecodeStep

SAMPLED = 4
"""Sampling interval in steps. Accounting for every step would cost half a percent of a small model's time."""


@dataclass(frozen=True)
class Totals:
    """Cumulative counts over whole decode steps of this process. All but steps and tokens cover sampled steps only.

    Attributes:
        steps, tokens: number of steps, and of tokens that they decoded.
        read_bytes: bytes of K and V of the middle read, by layer and group. A shared read counts for each request.
        middle_bytes: bytes of K and V of the middle in all groups of each layer; 0 for a layer with a window.
        blocks: number of groups by block size of their plan; 0 means that they read nothing.
        timed_steps, seconds: number of sampled steps directly followed by another step, and their time by `Phase`.
    """

    steps: int
    tokens: int
    read_bytes: list[list[int]]
    middle_bytes: list[int]
    blocks: dict[int, int]
    timed_steps: int
    seconds: tuple[float, ...]


class Accounts:
    """Interface of step accounting; this base class keeps nothing. A step calls the methods in this order."""

    def begin(self) -> None:
        """A step begins."""

    def began(self, step: DecodeStep) -> None:
        """The plan of the current step is ready; its layers follow."""

    def lap(self, part: Phase) -> None:
        """Charge the time since the last call of `began` or `lap` to `part`."""

    @property
    def watches(self) -> bool:
        """Whether the current step is sampled layer by layer."""
        return False

    def layer(self, layer: int, native: NativeEngine, blk: torch.Tensor | None) -> None:
        """A layer is done; `native` holds what it read. blk: [B, H] int32 of its plan; None: a layer with a window."""

    def served(self, layers: int, native: NativeEngine) -> None:
        """The first layers of a step are done, without accounts of their reads."""

    def interrupted(self) -> None:
        """Other work runs between two steps; its time is not charged to a step."""


class StepAccounts(Accounts):
    """Sums over whole steps. One thread at a time calls the methods of `Accounts`; any thread may call `totals`.

    Args:
        timed: whether to time steps.
        sampled: sampling interval in steps.
    """

    def __init__(self, shape: KVShape, timed: bool = True, sampled: int = SAMPLED) -> None:
        self._layers, self._groups = shape.layers, shape.kv_heads
        self._token_bytes = shape.token_bytes
        self._timed, self._every = timed, sampled
        # State of the current step.
        self._lengths: dict[int, int] = {}
        self._middle_tokens = 0
        self._sizes: list[int] = []  # block sizes, one per request and group of every finished layer
        self._done = 0  # finished layers
        self._sampled = False
        self._whole = False  # all layers are done, and no other work has run since
        self._ns = [0] * len(Phase)
        self._mark = self._gap = 0
        self._make_room(0)
        # State guarded by _lock.
        self._lock = threading.Lock()
        self._read_bytes = torch.zeros(self._layers, self._groups, dtype=torch.int64)
        self._has_middle = [False] * self._layers
        self._blocks: Counter[int] = Counter()
        self._steps = self._tokens = self._all_middle_tokens = self._timed_steps = 0
        self._all_ns = [0] * len(Phase)

    def _make_room(self, batch: int) -> None:
        # Every layer of a step writes its own slice. Steps of equal batch size accumulate in _sum.
        self._reads = torch.zeros(self._layers, batch, self._groups, 2, dtype=torch.int64)
        self._reads_of = self._reads.unbind(0)
        self._sum = torch.zeros_like(self._reads)
        self._batch = batch

    def begin(self) -> None:
        now = time.perf_counter_ns()
        self._gap, self._mark = now - self._mark, now

    def began(self, step: DecodeStep) -> None:
        if self._sampled and self._whole and self._timed and self._follows(step):
            self._ns[Phase.BETWEEN] += self._gap
            with self._lock:
                self._all_ns = [total + ns for total, ns in zip(self._all_ns, self._ns, strict=True)]
                self._timed_steps += 1
        if step.batch != self._batch:
            with self._lock:
                self._fold()
                self._make_room(step.batch)
        self._done, self._whole = 0, False
        self._sampled = self._steps % self._every == 0
        if self._sampled:
            self._lengths = _lengths(step)
            self._sizes.clear()
            self._middle_tokens = sum(step.middle.tolist())
            self._ns = [0] * len(Phase)
            self.lap(Phase.PLAN)

    def _follows(self, step: DecodeStep) -> bool:
        """Whether this step directly follows the previous one, that is, some request decodes its next token."""
        return any(self._lengths.get(row) == length - 1 for row, length in _lengths(step).items())

    def lap(self, part: Phase) -> None:
        if not self._sampled:
            return
        now = time.perf_counter_ns()
        self._ns[part] += now - self._mark
        self._mark = now

    @property
    def watches(self) -> bool:
        return self._sampled

    def layer(self, layer: int, native: NativeEngine, blk: torch.Tensor | None) -> None:
        if layer != self._done:
            return  # an earlier layer failed
        self._done += 1
        if self._sampled and blk is not None:
            native.reads(self._reads_of[layer])
            self._sizes += blk.flatten().tolist()
            self._has_middle[layer] = True
        if self._done < self._layers:
            return
        self._whole = True
        with self._lock:
            self._steps += 1
            self._tokens += self._batch
            if self._sampled:
                self._sum += self._reads
                self._blocks.update(self._sizes)
                self._all_middle_tokens += self._middle_tokens

    def served(self, layers: int, native: NativeEngine) -> None:
        self._sampled = False
        for layer in range(layers):
            self.layer(layer, native, None)

    def interrupted(self) -> None:
        self._whole = False

    def _fold(self) -> None:
        self._read_bytes += self._sum[..., 0].sum(1)
        self._sum.zero_()

    def totals(self) -> Totals:
        with self._lock:
            self._fold()
            return Totals(
                steps=self._steps,
                tokens=self._tokens,
                read_bytes=self._read_bytes.tolist(),
                middle_bytes=[has * self._all_middle_tokens * self._token_bytes for has in self._has_middle],
                blocks=dict(self._blocks),
                timed_steps=self._timed_steps,
                seconds=tuple(ns * 1e-9 for ns in self._all_ns),
            )


def _lengths(step: DecodeStep) -> dict[int, int]:
    return dict(zip(step.rows.tolist(), step.seq_lens.tolist(), strict=True))


def block_name(size: int) -> str:
    """A block size as a metric label: `streaming` for a group that reads nothing, `sketched`, or `other` for another
    package's task kind."""
    names = {0: "streaming", SKETCHED: "sketched"} | {blk: str(blk) for blk in BLOCKS}
    return names.get(size, "other")
