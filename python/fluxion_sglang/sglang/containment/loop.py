"""Runs the scheduler's loop, and contains exceptions that leave it.

In SGLang an exception of the scheduler ends the server. Here it ends only the guilty request: the one that the
traceback names, or the only one of the pass, or the one that `suspects.py` finds. All other requests go back into the
queue by SGLang's own retraction and are prefilled again, with their generated tokens. Then the loop is entered again.
The hook is around the loop, so it costs nothing per step.

If pools are inconsistent afterwards, they are emptied, and the model stays loaded. A failure that repeats at once
without a guilty request ends the server.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from http import HTTPStatus
from typing import Any

import torch
import torch.distributed as dist

from fluxion_sglang.sglang.containment import budgets, counts, frames, ledger
from fluxion_sglang.sglang.containment.arrivals import NotTakenIn, refuse
from fluxion_sglang.sglang.containment.ending import answer, reason, said
from fluxion_sglang.sglang.containment.suspects import TrialEnds, suspects

logger = logging.getLogger(__name__)

AGREE_S = 60.0
"""Seconds that a rank waits for the others to report their failure. After that it ends, and the server with it."""

REBUILDS, UNEXPLAINED = 2, 5
"""Number of rebuilds, and of failures without a guilty request, within `MINUTE_S`; the next one ends the server."""
MINUTE_S = 60.0

_SCAN = "_get_new_batch_prefill_raw"
"""SGLang's function that admits requests; its local `adder` holds those of the next pass."""

_RESULTS = "process_batch_result"


def dispatch_event_loop(original: Callable[..., Any], scheduler: Any) -> Any:
    """AROUND scheduler.dispatch_event_loop."""
    from sglang.srt.runtime_context import get_exec, get_parallel

    budgets.install(scheduler.device, bool(get_exec().graph.enable_torch_compile))
    if get_parallel().pp_size > 1:  # pipeline stages run different passes and cannot agree on one
        return original(scheduler)
    loop = Loop(scheduler, _group())
    while True:
        try:
            return original(scheduler)
        except Exception as error:
            loop.contain(error)


def _group() -> dist.ProcessGroup | None:
    """The group of ranks that compute passes together, for their agreement; None for one rank. A collective."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.tp_size == 1:
        return None
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=AGREE_S))
    assert isinstance(group, dist.ProcessGroup)
    return group


class Loop:
    """Contains exceptions that leave the loop of one scheduler.

    Args:
        ranks: the group that computes passes together; None: this process alone.
    """

    def __init__(self, scheduler: Any, ranks: dist.ProcessGroup | None = None) -> None:
        self._scheduler, self._ranks = scheduler, ranks
        self._rebuilt: deque[float] = deque(maxlen=REBUILDS)
        self._unexplained: deque[float] = deque(maxlen=UNEXPLAINED)

    def contain(self, error: Exception) -> None:
        """End the guilty request, and restore the scheduler so that its loop can be entered again.

        Raises:
            Exception: `error`, if that is not possible.
        """
        from sglang.srt.utils.common import DynamicGradMode

        with DynamicGradMode():
            if isinstance(error, TrialEnds):
                suspects.end_trial()
                self._clear_away(error, guilty=None)
                return
            if isinstance(error, NotTakenIn):
                if not self._agreed(("message", type(error.__cause__).__name__, error.message.rid)):
                    raise error
                refuse(self._scheduler, error.message, error.__cause__ or error)
                self._clear_away(error, guilty=None)
                return
            if isinstance(error, torch.AcceleratorError):  # every later pass would fail, too
                raise error
            passed = self._requests_of(error)
            guilty = self._guilty(error, passed)
            state = [(_rid(request), request.to_finish is not None) for request in ledger.unanswered()]
            if not self._agreed((type(error).__name__, _rid(guilty), [_rid(request) for request in passed], state)):
                raise error
            logger.error("Fluxion: SGLang's scheduler failed; %s", _outcome(guilty, passed), exc_info=error)
            trouble = None
            try:
                self._clear_away(error, guilty)
                self._blame(guilty, passed, error)
                self._check_pools()
            except Exception as second:
                logger.exception("Fluxion: what the failure left behind could not be cleared away")
                trouble = said(second)
            if not self._agreed(trouble is None):
                raise error
            if trouble is not None:
                self._rebuild(error, trouble)
            if guilty is None and not passed and _too_many(self._unexplained):
                raise error
            counts.contained("loop")

    def _requests_of(self, error: Exception) -> list[Any]:
        """Unanswered requests of the pass that failed, or that was being formed; oldest first."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        if frames.went_through(error, _SCAN):
            adder = frames.local(error, _SCAN, "adder")
            found = [] if adder is None else list(adder.can_run_list)
            if not found:  # it failed while scanning the queue; a trial runs apart from the queue
                trial, scheduler = suspects.on_trial, self._scheduler
                found = [*scheduler.waiting_queue, *scheduler.running_batch.reqs] if trial is None else [trial]
        else:
            batches = frames.passed_down(error, ScheduleBatch)
            found = [request for batch in batches for request in batch.reqs or ()]
        wanted = {id(request) for request in found}
        return [request for request in ledger.unanswered() if id(request) in wanted]

    def _guilty(self, error: Exception, passed: Sequence[Any]) -> Any | None:
        from sglang.srt.managers.schedule_batch import Req

        named = frames.culprit(error, Req)
        if named is not None and not ledger.answered(named):
            return named
        return passed[0] if len(passed) == 1 else None

    def _blame(self, guilty: Any | None, passed: Sequence[Any], error: Exception) -> None:
        from sglang.srt.runtime_context import get_disagg

        rest = [request for request in passed if not ledger.answered(request)]
        if guilty is not None:
            suspects.clear()
        elif get_disagg().disaggregation_mode == "decode":  # its queues cannot hold a trial
            for request in rest:
                self._end(request, reason(_sentence(error), HTTPStatus.INTERNAL_SERVER_ERROR))
        elif rest:
            suspects.accuse(rest)

    def _agreed(self, mine: object) -> bool:
        """Whether every rank failed in the same way. A rank that continued alone would wait in a collective forever."""
        if self._ranks is None:
            return True
        found: list[Any] = [None] * dist.get_world_size(self._ranks)
        try:
            dist.all_gather_object(found, mine, group=self._ranks)
        except Exception:
            logger.exception("Fluxion: another rank did not fail in %g s; the server ends", AGREE_S)
            return False
        if any(each != mine for each in found):
            logger.error("Fluxion: the ranks failed in different ways (%s); the server ends", found)
            return False
        return True

    # --- restoring the scheduler ---

    def _clear_away(self, error: Exception, guilty: Any) -> None:
        """Remove all requests from batches: each is answered or goes back into the queue."""
        scheduler = self._scheduler
        self._close_free_group()
        self._take_results(error)
        pending = scheduler._pending_chunked_abort_req
        queued = self._queued()
        there = [request for request in ledger.unanswered() if request not in queued or request is guilty]
        self._forget_batches()
        self._finish_loads()
        for request in queued:  # admitted by an incomplete scan of the queue
            self._unlock(request)
        back = []
        for request in there:
            if request is guilty and not request.finished():  # a complete answer is sent
                self._end(request, reason(_sentence(error), HTTPStatus.INTERNAL_SERVER_ERROR))
            elif request.finished():
                self._send(request)
            elif request is pending or request.to_finish is not None:
                why = request.to_finish or request.discard_output_reason
                self._end(request, None if why is None else why.to_json())
            else:
                back.append(request)
        for request in back:
            self._take_back(request)
        self._requeue(back)

    def _unlock(self, request: Any) -> None:
        """Unlock the prefix in the tree of a request without a row."""
        if request.lock is not None and not request.kv.holds_kv:
            self._scheduler.tree_cache.unlock(request.lock)
            request.lock = None

    def _finish_loads(self) -> None:
        """Finish reads of KV from files (`disk`), so that nothing is written into pages that will be freed."""
        scheduler = self._scheduler
        if (linker := scheduler.tree_cache.linker) is None:
            return
        slots = dict(linker.private_load_indices)
        for rid in list(linker.inflight_load_rids):
            linker.release_request(rid)  # its read has not begun
        linker.finish_loads()
        linker.private_load_indices.clear()
        for request in ledger.unanswered():
            if request.rid in slots and not request.kv.holds_kv:
                scheduler.token_to_kv_pool_allocator.free(slots[request.rid])

    def _close_free_group(self) -> None:
        allocator = self._scheduler.token_to_kv_pool_allocator
        if allocator.free_group is not None:
            allocator.free_group_end()

    def _take_results(self, error: Exception) -> None:
        """Process the complete results of earlier passes, so that their tokens count."""
        scheduler = self._scheduler
        results, scheduler.result_queue = getattr(scheduler, "result_queue", ()), deque()
        if frames.went_through(error, _RESULTS):
            return  # later passes used tokens whose results were not processed
        for batch, result in results:
            if getattr(result, "delay_sample_func", None) is not None:
                return  # not sampled yet
            try:
                scheduler.process_batch_result(batch, result)
            except Exception:
                self._close_free_group()
                logger.exception("Fluxion: the results of a pass are dropped, and its tokens are computed again")
                return

    def _queued(self) -> set[Any]:
        """Requests that wait in some queue and are in no pass."""
        scheduler = self._scheduler
        found = {*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue}
        if (prealloc := getattr(scheduler, "disagg_decode_prealloc_queue", None)) is not None:
            entries = [*prealloc.queue, *prealloc.pending_reqs, *scheduler.disagg_decode_transfer_queue.queue]
            found |= {getattr(entry, "req", entry) for entry in (*entries, *prealloc.retracted_queue)}
        return found

    def _forget_batches(self) -> None:
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        scheduler = self._scheduler
        scheduler.last_batch = scheduler.cur_batch_for_debug = scheduler.chunked_req = None
        scheduler._pending_chunked_abort_req = None
        scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)

    def _end(self, request: Any, why: dict[str, object] | None) -> None:
        self._free(request)
        answer(self._scheduler, request, why)

    def _send(self, request: Any) -> None:
        """Send the last output of a request that finished in the failed pass."""
        self._free(request)
        try:
            self._scheduler.output_streamer.stream_output([request], request.return_logprob)
        except Exception as error:
            self._end(request, reason(_sentence(error), HTTPStatus.INTERNAL_SERVER_ERROR))

    def _take_back(self, request: Any) -> None:
        """Free the request's rows and pages by SGLang's retraction."""
        from sglang.srt.managers.schedule_batch import release_req
        from sglang.srt.runtime_context import get_disagg

        scheduler = self._scheduler
        if get_disagg().disaggregation_mode == "decode" and request.kv.holds_kv:
            kept = release_req(
                req=request,
                remaing_req_count=0,
                req_to_token_pool=scheduler.req_to_token_pool,
                token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
                tree_cache=scheduler.tree_cache,
                hisparse_coordinator=scheduler.hisparse_coordinator,
            )
            if not kept:
                self._end(request, reason("the KV of this request is lost.", HTTPStatus.INTERNAL_SERVER_ERROR))
            return
        self._free(request)
        request.reset_for_retract()

    def _free(self, request: Any) -> None:
        """Free the row, pages and lock of a request in any state. Its KV does not enter the tree."""
        from sglang.srt.mem_cache.common import release_kv_cache

        scheduler = self._scheduler
        if not request.kv.holds_kv:
            self._unlock(request)
            return
        session, request.session = request.session, None
        streaming = scheduler.tree_cache.session
        slot = None if session is None else streaming.slots.get(session.session_id)
        if slot is not None and slot.kv is request.kv:
            # Otherwise the session would keep the record, with KV that the pass has not computed.
            del streaming.slots[session.session_id]
            request.lock, slot.lock = slot.lock, None
        # Free everything allocated, including uncommitted tokens and tokens after the end of an answer.
        finished_len, request.finished_len = request.finished_len, None
        request.kv.kv_committed_len = request.kv.kv_allocated_len
        try:
            release_kv_cache(request, scheduler.tree_cache, checkpoint=False)
        finally:
            request.session, request.finished_len = session, finished_len

    def _requeue(self, requests: Sequence[Any]) -> None:
        """Put requests at the front of the queue, in their order, regardless of the limit for new requests."""
        from sglang.srt.runtime_context import get_disagg

        scheduler = self._scheduler
        requests = [request for request in requests if not ledger.answered(request)]
        if get_disagg().disaggregation_mode == "decode":
            for request in requests:
                scheduler._add_request_to_queue(request, is_retracted=True)
            return
        scheduler.waiting_queue[:0] = requests
        for request in requests:
            request.time_stats.set_wait_queue_entry_time()

    # --- Last resort ---

    def _check_pools(self) -> None:
        """Run SGLang's own idle check: no request holds pages now, so the totals must match.

        Raises:
            RuntimeError: they do not.
        """
        from sglang.srt.runtime_context import get_disagg

        if get_disagg().disaggregation_mode == "decode":
            return  # arriving KV holds pages
        checker = self._scheduler.invariant_checker
        leaks, messages = checker._check_all_pools(self._scheduler.pool_stats_observer.get_pool_stats())
        if leaks:
            raise RuntimeError(" ".join(messages))

    def _rebuild(self, error: Exception, why: str) -> None:
        """Empty the pools and keep the model. Requests of the failed pass end; waiting ones continue.

        Raises:
            Exception: `error`, if the last rebuilds were just before, or a rebuild is impossible.
        """
        from sglang.srt.managers.schedule_batch import ReqKvInfo
        from sglang.srt.runtime_context import get_disagg

        scheduler = self._scheduler
        # Prefill servers write into the pool of a decode server.
        if get_disagg().disaggregation_mode == "decode" or _too_many(self._rebuilt):
            raise error
        logger.error("Fluxion: the pools are emptied (%s); prefixes and the KV of sessions are computed again", why)
        counts.rebuilt()
        suspects.clear()
        queued = self._queued()
        ended = [request for request in ledger.unanswered() if request not in queued]
        self._forget_batches()
        scheduler.result_queue = deque()
        for request in (*ended, *queued):
            request.kv, request.lock = ReqKvInfo(), None
        scheduler.tree_cache.reset()
        scheduler.req_to_token_pool.clear()
        scheduler.token_to_kv_pool_allocator.clear()
        scheduler.req_to_token_pool.reset_aux_cache_allocator()
        if scheduler.draft_worker:
            scheduler.draft_worker.clear_cache_pool()
        for request in ended:
            self._end(request, reason(_sentence(error), HTTPStatus.INTERNAL_SERVER_ERROR))


def _too_many(times: deque[float]) -> bool:
    """Note an event. Returns whether it also happened `times.maxlen` times within the last minute."""
    now, full = time.monotonic(), len(times) == times.maxlen
    recent = full and now - times[0] < MINUTE_S
    times.append(now)
    return recent


def _rid(request: Any | None) -> str | None:
    return None if request is None else str(request.rid)


def _outcome(guilty: Any | None, passed: Sequence[Any]) -> str:
    if guilty is not None:
        return f"request {_rid(guilty)} is ended, and the others are computed again"
    if len(passed) > 1:
        return f"one of {len(passed)} requests is to blame, and each is tried alone"
    return "no request is to blame"


def _sentence(error: BaseException) -> str:
    return f"this request made the scheduler fail ({said(error)}), and it alone is ended; change it, or report it."
