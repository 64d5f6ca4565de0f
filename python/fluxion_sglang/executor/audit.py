"""The engine of an audited server: every layer once more with everything read, and the two compared."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fluxion_sglang.audit import AuditLog, record_dtype
from fluxion_sglang.executor.engine import DecodeEngine
from fluxion_sglang.policy import parse_spec
from fluxion_sglang.policy.base import DecodeStep, Policy

if TYPE_CHECKING:
    from fluxion_sglang.device.mailbox import Mailbox

logger = logging.getLogger(__name__)


class AuditedEngine(DecodeEngine):
    """A `DecodeEngine` that appends to an audit log what each decode step read and how far its output is from exact.

    Exact is the native engine's attention over everything for the same query, on the same KV: the second run of a
    layer appends no token. Errors are taken from the float32 results, before they are rounded to the KV dtype.

    Args:
        log: gets one array a step (`fluxion_sglang.audit.record_dtype`). The rest is `DecodeEngine`'s.

    Attributes:
        log: None once it could not be written: requests are worth more than records, so they go on without.
    """

    def __init__(self, log: AuditLog, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log: AuditLog | None = log
        self._exact = parse_spec("full")
        self._specs: list[str] = []
        self._records: list[np.ndarray] = []
        self._not_ours: dict[str, int] = {}

    def begin_step(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        policies: Sequence[Policy] | None = None,
    ) -> DecodeStep:
        step = super().begin_step(rows, seq_lens, page_table, policies)
        self._exact.begin_step(step)
        self._specs = [policy.spec for policy in policies or [self.policy] * step.batch]
        self._records = []
        return step

    def decode(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        out = super().decode(layer, q, k, v, scale)
        if self.log is None:
            return out
        assert self._step is not None
        got, want = (torch.empty(q.shape, dtype=torch.float32) for _ in range(2))
        reads = torch.empty((self._step.batch, self._step.kv_heads, 2), dtype=torch.int64)
        self.native.result(got)
        self.native.reads(reads)
        self._decode_exactly(layer, q, scale)
        self.native.result(want)
        self._records.append(self._record(layer, reads, head_errors(got, want)))
        if layer == self.pool.shape.layers - 1:
            self._write(self.log, np.concatenate(self._records))
        return out

    def serve(self, layer: int, sequence: int, mailbox: Mailbox, scale: float, timeout_s: float) -> bool:
        raise RuntimeError("An audit needs whole results, and a device has half of each; serve without `audit`.")

    def _write(self, log: AuditLog, records: np.ndarray) -> None:
        try:
            log.append(records)
        except OSError as error:
            self.log = None
            logger.error(
                "Fluxion: the audit ends here, because its file cannot be written (%s); serving goes on", error
            )

    def stats(self) -> dict[str, int]:
        """As the base class's, without what the audit itself read."""
        return {name: value - self._not_ours.get(name, 0) for name, value in super().stats().items()}

    def _decode_exactly(self, layer: int, q: torch.Tensor, scale: float) -> None:
        before = self.native.stats()
        plan = self._exact.plan(layer, q)
        self.native.layer_begin(
            layer, q, None, None, self.windows.layers[layer], plan.blk, plan.budget, plan.value, scale,
            torch.empty_like(q),
        )  # fmt: skip
        self.native.layer_finish()
        for name, value in self.native.stats().items():
            self._not_ours[name] = self._not_ours.get(name, 0) + value - before[name]

    def _record(self, layer: int, reads: torch.Tensor, errors: torch.Tensor) -> np.ndarray:
        step, shape = self._step, self.pool.shape
        assert step is not None
        records = np.zeros(step.batch, record_dtype(self.q_heads))
        records["policy"] = self._specs
        records["layer"] = layer
        records["length"] = step.seq_lens.numpy()
        records["middle"] = step.middle.numpy()
        records["tile_bytes"], records["metadata_bytes"] = reads.sum(1).T.numpy()
        records["kv_bytes"] = step.middle.to(torch.int64).numpy() * (
            2 * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
        )
        records["error"] = errors.numpy()
        return records


def head_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """||got_h - want_h||_2 / max_h' ||want_h'||_2 per head (Fluxion, Eq. 2); 0 where the two are equal.

    Args:
        got, want: [B, Hq, D] float32.

    Returns:
        [B, Hq] float32.
    """
    distance = (got - want).norm(dim=-1)
    largest = want.norm(dim=-1).amax(dim=-1, keepdim=True)
    return torch.where(distance == 0, distance, distance / largest)
