"""Ends a request that can never be admitted, so that those behind it continue."""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fluxion_sglang.sglang.containment import counts
from fluxion_sglang.sglang.containment.ending import answer, reason
from fluxion_sglang.sglang.containment.suspects import suspects

PATIENCE_S, LOOKS = 0.05, 3
"""Seconds and looks at the queue without a running request, after which its first request counts as stuck."""

LOOKS_OF_RANKS = 60
"""Looks for several ranks. Their clocks differ, but they look equally often."""


class _Watch:
    """Tracks how long the first request of the queue is not admitted although nothing runs."""

    def __init__(self) -> None:
        self._seen, self._looks, self._since = ("", 0), 0, 0.0

    def stuck(self, request: Any, passes: int, ranks: int) -> bool:
        now = time.monotonic()
        if (request.rid, passes) != self._seen:
            self._seen, self._looks, self._since = (request.rid, passes), 0, now
        self._looks += 1
        if ranks > 1:
            return self._looks >= LOOKS_OF_RANKS
        return self._looks >= LOOKS and now - self._since >= PATIENCE_S


_watch = _Watch()


def on_idle(original: Callable[..., None], scheduler: Any) -> None:
    """AROUND Scheduler.on_idle: called in every iteration of the loop in which nothing runs."""
    from sglang.srt.runtime_context import get_disagg, get_parallel

    original(scheduler)
    if not scheduler.waiting_queue or get_disagg().disaggregation_mode != "null" or _busy(scheduler):
        return
    trial, request = suspects.on_trial, scheduler.waiting_queue[0]
    if trial is not None and trial not in scheduler.waiting_queue:
        suspects.end_trial()  # it waits elsewhere, so the others may continue
    elif _watch.stuck(request, scheduler.forward_ct, get_parallel().launch_world_size):
        _end(scheduler, request)


def _busy(scheduler: Any) -> bool:
    """Whether requests may be waiting for something other than room."""
    linker = scheduler.tree_cache.linker
    return bool(
        (linker is not None and linker.pending_offloads)  # pages are being written to files
        or scheduler.enable_lora_overlap_loading  # adapters are being copied
        or not scheduler.running_batch.is_empty()
        or scheduler.chunked_req is not None
        or scheduler._engine_paused
        or scheduler.forward_sleep_time
    )


def _end(scheduler: Any, request: Any) -> None:
    size = scheduler.max_total_num_tokens
    tokens = len(request.origin_input_ids) + len(request.output_ids)
    if scheduler.tree_cache.session_records():
        status = HTTPStatus.SERVICE_UNAVAILABLE
        why = (
            f"the {tokens} tokens of this request do not fit beside what open sessions hold of the host pool; close "
            "sessions, or try again later."
        )
    else:
        status = HTTPStatus.BAD_REQUEST
        why = (
            f"the {tokens} tokens of this request and its answer do not fit into the host pool of {size} tokens; send "
            "a shorter prompt, or start the server with larger host_tokens."
        )
    answer(scheduler, request, reason(why, status))
    counts.contained("admission")
