"""Prefill on another server: KV arrives through SGLang's transfer backends and is appended to the host pool.

The prefill server is SGLang without the flag. It writes pages in SGLang's layout, so the decode server gives it pages
of the landing zone (`kv/landing.py`), numbered independently of the host pool's. When a request's KV has arrived, it is
appended to the host pool, before the request is in a batch or in the radix tree.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.runtime_context import get_parallel

from fluxion_sglang.kv.landing import LandingZone, Run
from fluxion_sglang.kv.page_table import page_table
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.sglang import compat, hooking
from fluxion_sglang.sglang.containment.passes import Failures, agreed
from fluxion_sglang.sglang.requests import rows

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver as Receiver
else:
    Receiver = object

logger = logging.getLogger(__name__)

_zone: LandingZone | None = None
"""This process's landing zone."""


def receives(server_args: Any) -> bool:
    """Whether another server prefills prompts."""
    return bool(server_args.disaggregation_mode == "decode")


def install(zone: LandingZone) -> None:
    """Let KV arrive in `zone`. Raises CompatError if this SGLang lacks a required name."""
    global _zone
    compat.check(compat.TRANSFER_NEEDS)
    _zone = zone  # must be set before the hooks run
    hooking.put_in(HOOKS)
    hooking.assert_applied(HOOKS)


def _here() -> LandingZone:
    assert _zone is not None, "installed with the pool"
    return _zone


class Landing(Receiver):
    """Changes a backend's receiver (`landing`): the prefill server writes into the landing zone, once there is room.

    The last `clear` frees a receiver's run. SGLang calls it when the prefill server has acknowledged that it writes no
    more, or after a time-out (SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT). `failure_exception` also calls
    `clear`, before the acknowledgement; that call does not free the run.
    """

    run = Run(0, 0)
    _held: Callable[[Any], None] | None = None
    _pages = 0
    _fails = False
    _since = 0.0

    def send_metadata(self, kv_indices: Any, *args: Any, **kwargs: Any) -> None:
        self._pages = len(kv_indices)
        send = super().send_metadata
        self._held, self._since = lambda pages: send(pages, *args, **kwargs), time.monotonic()
        self._ask()

    def _ask(self) -> None:
        if self._held is None or self.conclude_state is not None:
            return
        if time.monotonic() - self._since > self.kv_mgr.waiting_timeout:  # the prefill server has given up
            return self._refuse("Other requests had the room in which its KV would have arrived for too long.")
        try:
            run = _here().ask(self, self._pages) if self._pages else Run(0, 0)
        except ValueError as error:
            return self._refuse(f"The prompt is too long for this server: {error}.")
        if run is None:
            return
        self.run, send, self._held = run, self._held, None
        send(np.arange(run.first, run.first + run.pages, dtype=np.int32))

    def _refuse(self, why: str) -> None:
        from sglang.srt.disaggregation.base import KVPoll

        self._leave_line()
        self.kv_mgr.record_failure(self.bootstrap_room, why)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)

    def _leave_line(self) -> None:
        """Stop waiting for a run. The prefill server does not know any pages yet, so it cannot write."""
        if self._held is not None:
            self._held = None
            _here().leave(self)

    def poll(self) -> Any:
        from sglang.srt.disaggregation.base import KVPoll

        status = super().poll()
        if status == KVPoll.Failed:
            self._leave_line()
        else:
            self._ask()
        return status

    def abort(self) -> None:
        if self._held is not None:
            # The transfer queue waits for an acknowledgement, which SGLang requests only after this call.
            self.ensure_abort_notified(force_arm=True)
            self._leave_line()
        super().abort()

    def clear(self) -> None:
        super().clear()
        if not self._fails:
            self._held = None
            _here().leave(self)

    def failure_exception(self) -> None:
        self._leave_line()
        self._fails = True
        try:
            super().failure_exception()
        finally:
            self._fails = False


@cache
def landing(receiver: type) -> type:
    """A subclass of a backend's receiver that uses the landing zone."""
    return type(f"Landing{receiver.__name__}", (Landing, receiver), {})


def get_kv_class(original: Callable[..., type | None], transfer_backend: Any, class_type: Any) -> type | None:
    """AROUND disaggregation.utils.get_kv_class: return landing receivers, but for the fake one, which moves no data."""
    found = original(transfer_backend, class_type)
    lands = class_type.name == "RECEIVER" and transfer_backend.name != "FAKE"
    return landing(found) if lands and found is not None else found


def commit(original: Callable[..., None], queue: Any, decode_req: Any) -> None:
    """AROUND DecodeTransferQueue._commit_transfer_to_req: first append the arrived KV to the host pool.

    If that fails on any rank, the request ends on all of them, and the server continues.
    """
    request = decode_req.req
    found = Failures(None, {})
    try:
        _land(queue.scheduler, decode_req.kv_receiver, request)
    except Exception as error:
        logger.exception("Fluxion: KV that has arrived could not be taken over")
        found = Failures(f"KV from the prefill server could not be taken over: {error}", {})
    if get_parallel().attn_tp_size > 1:
        found = agreed(found, queue.gloo_group)
    if found.reason is None:
        return original(queue, decode_req)
    from sglang.srt.disaggregation.utils import prepare_abort

    prepare_abort(request, found.reason, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
    decode_req.kv_receiver.clear()
    decode_req.kv_receiver = None


def _land(scheduler: Any, receiver: Any, request: Any) -> None:
    """Append the arrived tokens. They are the request's last ones; its pages already have the earlier tokens."""
    pool = scheduler.tp_worker.model_runner.token_to_kv_pool
    stop, row = request.kv.kv_committed_len, request.kv.req_pool_idx
    pages = page_table(scheduler.req_to_token_pool.req_to_token, torch.tensor([row]), stop)[0]
    run = getattr(receiver, "run", None)
    if run is None:  # SGLang's own warm-up request, without KV
        shape, start = pool.host.shape, request.kv.cache_protected_len
        nothing = torch.zeros(stop - start, shape.kv_heads, shape.head_dim, dtype=shape.dtype)
        for layer in range(pool.layer_num):
            pool.host.append(layer, pages, start, nothing, nothing)
        return
    start = (len(pages) - run.pages) * PAGE
    if start < 0:
        raise RuntimeError(f"{run.pages} pages were sent of {len(pages)}")
    if run.pages == 0:
        return
    began = time.monotonic_ns()
    for layer in range(pool.layer_num):
        pool.host.append(layer, pages, start, *_here().tokens(layer, run, stop - start))
    _here().arrived(stop - start, time.monotonic_ns() - began)


def free_row(original: Callable[..., None], table: Any, req: Any) -> None:
    """AROUND DecodeReqToTokenPool.free."""
    row = req.kv.req_pool_idx
    original(table, req)
    rows.tell(table, [row])


HOOKS: dict[compat.Need, Callable[..., Any]] = {
    compat.KV_CLASS: get_kv_class,
    compat.COMMIT_TRANSFER: commit,
    compat.FREE_DECODE_ROW: free_row,
    compat.CLEAR_DECODE_ROWS: rows.clear,
}
