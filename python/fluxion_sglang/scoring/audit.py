"""The audit of a server: computes every layer again with full attention, and compares the results."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.executor.decode import DecodeEngine, Layer, native_plan
from fluxion_sglang.executor.merge import attention_with_lse, merge_state
from fluxion_sglang.executor.observer import Observer
from fluxion_sglang.kv.host_pool import GIB
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.policy import parse_spec
from fluxion_sglang.policy.base import DecodeStep, Policy
from fluxion_sglang.scoring.audit_file import AuditLog, record_dtype

logger = logging.getLogger(__name__)


class Audit(Observer):
    """Logs for each decode step of an engine the bytes that it read and the error of its output.

    The reference is the native engine's full attention for the same query on the same KV; the second run of a layer
    appends no token. Errors are computed from the float32 results, before they are rounded to the KV dtype.

    If a device holds the residents, the host has only the middle's result. The audited and the full middle are then
    merged with the same attention to the residents, which the host computes from its own pool. So errors there show the
    effect of the selection in the middle, without the device's rounding.

    Layers with a window are exact and have no records.

    Args:
        log: gets one array a step (`audit_file.record_dtype`).
        every: audits steps in which the length of the first request is a multiple of this.

    Attributes:
        log: None after a write error; requests then continue without an audit.
    """

    def __init__(self, engine: DecodeEngine, log: AuditLog, every: int = 1) -> None:
        self.log: AuditLog | None = log
        self._every = every
        self._engine, self._native, self._pool = engine, engine.native, engine.pool
        self._exact = parse_spec("full")
        self._step: DecodeStep | None = None
        self._policies: Sequence[Policy] = ()
        self._records: list[np.ndarray] = []
        self._not_ours: dict[str, int] = {}

    def began(self, step: DecodeStep, policies: Sequence[Policy]) -> None:
        self._step = step if int(step.seq_lens[0]) % self._every == 0 else None
        if self._step is None:
            return
        self._exact.begin_step(step)
        self._policies = policies
        self._records = []

    def decoded(self, layer: Layer) -> None:
        if self.log is None or self._step is None:
            return
        if layer.variant.window is None:
            self._compare(layer, self._step)
        if layer.index == self._pool.shape.layers - 1 and self._records:
            self._write(self.log, np.concatenate(self._records))

    def _compare(self, layer: Layer, step: DecodeStep) -> None:
        reads = torch.empty((step.batch, step.kv_heads, 2), dtype=torch.int64)
        self._native.reads(reads)
        before = self._engine.done()
        got, want = self._merged(layer) if layer.out is None else self._whole(layer)
        for name, value in self._engine.done().items():
            self._not_ours[name] = self._not_ours.get(name, 0) + value - before[name]
        self._records.append(self._record(layer.index, reads, head_errors(got, want)))

    def count(self, stats: dict[str, int]) -> dict[str, int]:
        return {name: value - self._not_ours.get(name, 0) for name, value in stats.items()}

    def _exactly(self, layer: Layer, begin: Callable[..., object], *where: Any) -> None:
        """Compute the layer again with full attention and no new token, to `where`, the outputs of `begin`."""
        begin(native_plan(self._exact.plan(layer.index, layer.q)), layer.of, layer.q, None, None, *where)
        self._native.layer_finish()

    def _whole(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's result and the exact result, [B, Hq, D] float32 each."""
        got, want = (torch.empty(layer.q.shape, dtype=torch.float32) for _ in range(2))
        self._native.result(got)
        self._exactly(layer, self._native.layer_begin, torch.empty_like(layer.q))
        self._native.result(want)
        return got, want

    def _merged(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for a layer whose residents are on a device; its middle is in the mailbox's slot."""
        slot = layer.slot
        whole = torch.empty_like(slot.o), torch.empty_like(slot.lse)
        self._exactly(layer, self._native.middle_begin, *whole)
        residents = self._residents(layer.index, layer.q, layer.scale)
        got, want = (_merged(residents, *middle) for middle in ((slot.o, slot.lse), whole))
        return got, want

    def _write(self, log: AuditLog, records: np.ndarray) -> None:
        try:
            log.append(records)
        except OSError as error:
            self.log = None
            logger.error(
                "Fluxion: the audit ends here, because its file cannot be written (%s); serving goes on", error
            )

    def _residents(self, layer: int, q: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to the residents of every request, from the host pool: o [B, Hq, D] and lse [B, Hq], float32."""
        assert self._step is not None and self._step.page_table is not None
        placement = self._pool.placement
        found = []
        for pages, n, query in zip(self._step.page_table, self._step.seq_lens.tolist(), q, strict=True):
            there = [
                i for i in range(-(-n // PAGE)) if i < placement.sink_pages or i * PAGE >= placement.window_start(n)
            ]
            k, v = (kv[:, : placement.resident(n)].float() for kv in self._pool.gather(layer, pages[there]))
            found.append(attention_with_lse(query.unsqueeze(0).float(), k, v, scale, causal=False))
        o, lse = zip(*found, strict=True)
        return torch.cat(o), torch.cat(lse)

    def _record(self, layer: int, reads: torch.Tensor, errors: torch.Tensor) -> np.ndarray:
        step, shape = self._step, self._pool.shape
        assert step is not None
        records = np.zeros(step.batch, record_dtype(self._engine.q_heads))
        records["policy"] = [policy.spec for policy in self._policies]
        records["layer"] = layer
        records["length"] = step.seq_lens.numpy()
        records["middle"] = step.middle.numpy()
        records["tile_bytes"], records["metadata_bytes"] = reads.sum(1).T.numpy()
        records["kv_bytes"] = step.middle.to(torch.int64).numpy() * shape.token_bytes
        records["error"] = errors.numpy()
        return records


def _merged(residents: tuple[torch.Tensor, torch.Tensor], o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """[B, Hq, D]: residents and middle merged; o [B, Hq, D] is read where lse [B, Hq] is not -inf."""
    read = (lse != -math.inf).unsqueeze(-1)
    return merge_state(*residents, torch.where(read, o, 0.0), lse)[0]


def head_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """||got_h - want_h||_2 / max_h' ||want_h'||_2 per head (Fluxion, Eq. 2); 0 if the two are equal.

    Args:
        got, want: [B, Hq, D] float32.

    Returns:
        [B, Hq] float32.
    """
    distance = (got - want).norm(dim=-1)
    largest = want.norm(dim=-1).amax(dim=-1, keepdim=True)
    return torch.where(distance == 0, distance, distance / largest)


def observer(engine: DecodeEngine, options: FluxionConfig, identity: object) -> Audit:
    """Make the observer of the option `audit`. Raises OSError and ValueError as `AuditLog`."""
    path = options.path("audit")
    assert path is not None
    gib = options.beside_path("audit", "gb", None)
    most = None if gib is None else int(gib * GIB)
    return Audit(engine, AuditLog(path, most), options.beside_path("audit", "every", 1))
