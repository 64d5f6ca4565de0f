"""The engine of an audited server: every layer once more with everything read, and the two compared."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fluxion_sglang.executor.engine import DecodeEngine
from fluxion_sglang.executor.merge import attention_with_lse, merge_state
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.lab.audit_file import AuditLog, record_dtype
from fluxion_sglang.policy import parse_spec
from fluxion_sglang.policy.base import DecodeStep, Policy

if TYPE_CHECKING:
    from fluxion_sglang.device.mailbox import Mailbox

logger = logging.getLogger(__name__)


class AuditedEngine(DecodeEngine):
    """A `DecodeEngine` that appends to an audit log what each decode step read and how far its output is from exact.

    Exact is the native engine's attention over everything for the same query, on the same KV: the second run of a
    layer appends no token. Errors are taken from the float32 results, before they are rounded to the KV dtype.

    Where the residents are a device's, the host has half of each result: the middle that it answered and the whole
    middle are merged with one and the same attention to the residents, which the host computes from its own pool. So
    errors are what the choice of the middle costs there, and the device's rounding is in neither.

    Args:
        log: gets one array a step (`fluxion_sglang.lab.audit_file.record_dtype`). The rest is `DecodeEngine`'s.

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
        if self.log is not None:
            got, want = (torch.empty(q.shape, dtype=torch.float32) for _ in range(2))
            reads = self._reads()
            self.native.result(got)
            self._decode_exactly(layer, q, scale, windows=self.windows.layers[layer], out=torch.empty_like(q))
            self.native.result(want)
            self._note(self.log, layer, reads, head_errors(got, want))
        return out

    def served(self, layer: int, sequence: int, mailbox: Mailbox, scale: float) -> None:
        super().served(layer, sequence, mailbox, scale)
        if self.log is not None:
            assert self._step is not None
            slot = mailbox.slot(sequence, self._step.batch)
            whole = torch.empty_like(slot.o), torch.empty_like(slot.lse)
            reads = self._reads()
            self._decode_exactly(layer, slot.q, scale, middle=whole)
            residents = self._residents(layer, slot.q, scale)
            got, want = (_merged(residents, *middle) for middle in ((slot.o, slot.lse), whole))
            self._note(self.log, layer, reads, head_errors(got, want))

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

    def _reads(self) -> torch.Tensor:
        """[B, H, 2], what the tasks of the last layer read (`NativeEngine.reads`)."""
        assert self._step is not None
        reads = torch.empty((self._step.batch, self._step.kv_heads, 2), dtype=torch.int64)
        self.native.reads(reads)
        return reads

    def _decode_exactly(self, layer: int, q: torch.Tensor, scale: float, **results: Any) -> None:
        """The layer once more, with everything read; results go where these arguments of `layer_begin` say."""
        before = self.native.stats()
        plan = self._exact.plan(layer, q)
        where = {"windows": None, "out": None, **results}
        self.native.layer_begin(
            layer, q, None, None, **where, blk=plan.blk, budget=plan.budget, value=plan.value, scale=scale
        )
        self.native.layer_finish()
        for name, value in self.native.stats().items():
            self._not_ours[name] = self._not_ours.get(name, 0) + value - before[name]

    def _residents(self, layer: int, q: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to the residents of every request, from the host pool: o [B, Hq, D] and lse [B, Hq], float32."""
        assert self._step is not None
        placement = self.pool.placement
        found = []
        for pages, n, query in zip(self._page_table, self._step.seq_lens.tolist(), q, strict=True):
            there = [
                i for i in range(-(-n // PAGE)) if i < placement.sink_pages or i * PAGE >= placement.window_start(n)
            ]
            k, v = (kv[:, : placement.resident(n)].float() for kv in self.pool.gather(layer, pages[there]))
            found.append(attention_with_lse(query.unsqueeze(0).float(), k, v, scale, causal=False))
        o, lse = zip(*found, strict=True)
        return torch.cat(o), torch.cat(lse)

    def _note(self, log: AuditLog, layer: int, reads: torch.Tensor, errors: torch.Tensor) -> None:
        """Keep what was found of a layer; with the last one the step goes to the log."""
        self._records.append(self._record(layer, reads, errors))
        if layer == self.pool.shape.layers - 1:
            self._write(log, np.concatenate(self._records))

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


def _merged(residents: tuple[torch.Tensor, torch.Tensor], o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """[B, Hq, D]: residents and middle as one; o [B, Hq, D] is read where lse [B, Hq] is not -inf."""
    read = (lse != -math.inf).unsqueeze(-1)
    return merge_state(*residents, torch.where(read, o, 0.0), lse)[0]


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
