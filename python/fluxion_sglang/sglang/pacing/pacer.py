"""Limits the prefill passes of SGLang's scheduler by time, and chooses their prompts.

While other prompts wait, a pass takes at most `prefill_pass_ms`; a lone prompt's pass takes up to `ALONE` times as
long. While other requests decode, a stream waits for its next token at most that long plus two decode steps. Decoding
requests ride along in the pass (SGLang's mixed chunks), which reads the weights once for both. Without mixing, a decode
step follows each pass.

SGLang computes one unfinished prompt at a time to its end. Here a shorter prompt shares its passes, or takes its place:
then the longer one returns to the queue, and its computed part is a cache hit later.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Final

import torch
import torch.distributed as dist

from fluxion_sglang.sglang.containment.suspects import suspects
from fluxion_sglang.sglang.pacing.order import Turns, rest, share
from fluxion_sglang.sglang.pacing.times import PassTimes

ALONE: Final = 8
"""Factor on the target time while no other request decodes or waits. A request that arrives then waits longer. SGLang's
/health answers within 2 s as long as a pass takes less."""
STEPS: Final = 10
"""Time of a lone prompt's pass as a multiple of the fastest decode step; the larger of this and `ALONE` holds. Passes
and steps read all weights, so a pass of few tokens is inefficient."""
AIM: Final = 0.9
"""Fraction of the longest wait of a stream that passes aim at; the rest covers errors of the prediction."""
HELD_UP: Final = 3
"""Cap of a measured decode step, as a multiple of the mean, so that a pause does not count as a step."""
LOOK_S: Final = 0.5
"""Interval of SGLang's checks for disconnected clients, in seconds; its default is 4 s."""
LOOKED_AT: Final = 128
"""Queued prompts that are looked up in the radix tree before each pass, as in SGLang's own policies."""


class Pacer:
    """Plans the passes of one scheduler.

    Args:
        target: seconds of a pass while others decode or wait.
        most: most tokens of a pass, SGLang's chunked_prefill_size.
        ranks: the group of ranks that compute passes together, for CPU tensors; None: this process alone. Clocks
            differ, so rank 0 decides the size of a pass.
    """

    def __init__(self, scheduler: Any, target: float, most: int, ranks: dist.ProcessGroup | None) -> None:
        self._of = weakref.ref(scheduler)
        self._target, self._most, self._ranks = target, most, ranks
        self._page = int(scheduler.page_size)
        self._times = PassTimes()
        self._step = 0.0
        """Seconds of a decode step, a running mean."""
        self._fastest_step = 0.0
        self._ended: float | None = None
        """End of the previous pass in an uninterrupted sequence. None: the scheduler was idle."""
        self._mixes = bool(scheduler.spec_algorithm.is_none())
        sign = 1 if scheduler.schedule_low_priority_values_first else -1
        prioritized = scheduler.enable_priority_scheduling
        self._turns = Turns(self._arrival, lambda request: sign * request.priority if prioritized else 0)
        self._numbers = count()
        self._arrivals: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.orders = scheduler.policy.policy.value == "fcfs"
        """Whether this class orders prompts; with another schedule policy, SGLang's order holds."""
        self._oldest: Any | None = None
        self._first: Any | None = None
        """The oldest prompt, if the next pass is its turn."""
        self._budget = most
        self._slots = 0
        """Prompts that can be admitted beside the decoding requests, the prompt under way included."""
        self._parked: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Tokens of a prompt that were computed when it last returned to the queue."""

    @property
    def _scheduler(self) -> Any:
        return self._of()

    def _arrival(self, request: Any) -> int:
        """A request's number, in the order in which this class first saw prompts."""
        if request not in self._arrivals:
            self._arrivals[request] = next(self._numbers)
        return self._arrivals[request]

    # --- measurement ---

    def measure(self, batch: Any, began: float, ended: float) -> None:
        """Record a pass of this batch. The scheduler's work between two passes counts as part of the second, up to the
        second's own time; a longer gap is a pause.

        Args:
            began, ended: by `time.perf_counter`.
        """
        between = 0.0 if self._ended is None else began - self._ended
        seconds = ended - began + min(between, ended - began)
        self._ended = ended
        mode = batch.forward_mode
        if mode.is_decode():
            if self._step > 0:
                seconds = min(seconds, HELD_UP * self._step)
            self._step = seconds if self._step == 0 else 0.9 * self._step + 0.1 * seconds
            self._fastest_step = min(seconds, self._fastest_step or seconds)
        elif mode.is_extend() and not mode.is_target_verify():
            riders = len(batch.decoding_reqs or ()) if mode.is_mixed() else 0
            chunks = list(zip(batch.prefix_lens, batch.extend_lens, strict=True))
            chunks = chunks[: len(chunks) - riders]
            tokens = sum(count for _, count in chunks)
            if tokens > 0 and seconds > 0:
                self._times.observe(tokens, sum(_attended(start, count) for start, count in chunks), seconds)

    # --- the next pass ---

    def plan(self, original: Callable[..., Any], running: Any) -> Any:
        """AROUND Scheduler.get_new_batch_prefill, of this scheduler."""
        from sglang.srt.managers.schedule_batch import NextBatchPlan

        scheduler = self._scheduler
        self._forget_lost_results()
        prompts = self._prompts()
        if not prompts and running.is_empty():
            self._ended = None
        # A prompt whose grammar has become ready joins the queue inside `original`.
        coming = prompts or scheduler.grammar_manager.has_waiting_grammars()
        if not coming or suspects.on_trial is not None or self._closed(running):
            return original(running)
        for request in prompts:
            self._arrival(request)
        decoding = any(not request.finished() for request in running.reqs)
        self._slots = scheduler.get_num_allocatable_reqs(
            len(running.reqs), running_batch=running, num_held_rows=int(scheduler.chunked_req is not None)
        )
        self._first = None
        if self.orders and len(prompts) > 1:
            self._look_up()
            self._oldest = self._turns.oldest(prompts)
            self._first = self._oldest if self._turns.due else None
            self.sort(scheduler.waiting_queue)
        self._budget = self._tokens(decoding, prompts)
        if scheduler.chunked_req is not None:
            # Other answers have grown since this prompt was admitted, perhaps by more than SGLang reserved.
            room = self._free(running) // self._page * self._page
            if room <= 0 and decoding:
                return NextBatchPlan(batch_to_run=None, running_batch=running)  # running requests end or are retracted
            if room <= 0 and _parkable(scheduler):
                self._park()
            self._budget = max(min(self._budget, room), self._page)
        if self.orders and scheduler.chunked_req is not None and scheduler.waiting_queue:
            if self._gives_way(running):
                self._park()
            elif self._first is scheduler.waiting_queue[0]:
                self._first = None  # its turn comes later; until then others share the passes
            self.sort(scheduler.waiting_queue)
        before = scheduler.chunked_prefill_size, scheduler.is_mixed_chunk
        riders = len(running.reqs) if self._mixes else 0
        scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = self._budget + riders, self._mixes
        try:
            plan = original(running)
        finally:
            scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = before
        if (batch := plan.batch_to_run) is not None:
            if len(prompts) > 1:
                self._turns.passed(self._oldest, batch.reqs)
            if decoding and not batch.decoding_reqs and scheduler._prefill_decode_interval_remaining == 0:
                scheduler._prefill_decode_interval_remaining = 1
        return plan

    def sort(self, waiting: list[Any]) -> None:
        """Sort the queue. Also called after SchedulePolicy.calc_priority, which sorts by arrival."""
        if self.orders and len(waiting) > 1:
            self._turns.sort(waiting, self._first)

    def limit(self, waiting: list[Any], budget: int) -> int | None:
        """Tokens of the prompt under way if shorter prompts share its pass; None: all that fit."""
        room = share(budget, self._page)
        taken, under_way = 0, self._scheduler.chunked_req
        for request in waiting if self._slots > 1 else ():
            pages = -(-rest(request) // self._page) * self._page
            if taken + pages > room or not self._turns.before(request, under_way):
                break
            taken += pages
        return (budget - taken) // self._page * self._page if taken else None

    def fits_beside(self, request: Any, adder: Any) -> bool:
        """Whether a prompt may share a pass with the prompt under way. It must be computed whole, because SGLang tracks
        one unfinished prompt. It must leave room for the rest of the other, for which SGLang reserves nothing."""
        under_way = self._scheduler.chunked_req
        tokens = len(request.full_untruncated_fill_ids) - request.prefix_len - request.host_hit_length
        if adder.ceil_paged_tokens(tokens) > adder.rem_chunk_tokens:
            return False
        if (request.input_embeds is None) != (under_way.input_embeds is None):
            return False  # a batch has embeddings of all its tokens or of none
        later = len(under_way.full_untruncated_fill_ids) - under_way.extend_end + self._answer(under_way)
        return bool(tokens + request.host_hit_length + self._answer(request) + later < adder.rem_total_tokens)

    def _answer(self, request: Any) -> int:
        """Tokens that SGLang reserves for a request's answer."""
        from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

        left = max(request.sampling_params.max_new_tokens - len(request.output_ids), 0)
        return min(left, CLIP_MAX_NEW_TOKENS) + self._page

    def _closed(self, running: Any) -> bool:
        """Whether no prompt can be admitted; then SGLang does not look at the queue."""
        scheduler = self._scheduler
        return bool(
            running.batch_is_full
            and running.reqs
            and scheduler.chunked_req is None
            and not scheduler.enable_priority_preemption
        )

    def _forget_lost_results(self) -> None:
        """Clear the pending chunk of parked prompts whose last pass failed: its result was dropped and never comes."""
        expecting = [each for each in self._scheduler.waiting_queue if each in self._parked] if self._parked else []
        if not expecting:
            return
        pending = {request for batch, _ in self._scheduler.result_queue for request in batch.reqs}
        for request in expecting:
            if request not in pending:
                request.inflight_middle_chunks = 0

    def _prompts(self) -> list[Any]:
        under_way = self._scheduler.chunked_req
        return [*self._scheduler.waiting_queue, *([] if under_way is None else [under_way])]

    def _look_up(self) -> None:
        """Update the cache hits of waiting prompts, on which `rest` depends."""
        from sglang.srt.mem_cache.common import match_kv_cache

        scheduler = self._scheduler
        # In reverse, because the tree evicts the least recently touched first; the head of the queue is touched last.
        for request in reversed(scheduler.waiting_queue[:LOOKED_AT]):
            match_kv_cache(request, scheduler.tree_cache)
        if (request := scheduler.chunked_req) is not None:
            request.num_matched_prefix_tokens = request.prefix_len

    def _tokens(self, decoding: bool, prompts: list[Any]) -> int:
        """Tokens of the next pass, the same on all ranks."""
        under_way = self._scheduler.chunked_req
        first = prompts[0].num_matched_prefix_tokens if prompts else 0
        start = under_way.prefix_len if under_way is not None else first
        attended = partial(_attended, start)
        if decoding:
            seconds = AIM * (self._target + 2 * self._step) - (0 if self._mixes else self._step)
            tokens = self._times.tokens_within(seconds, attended, self._page, self._most)
        else:
            alone = max(ALONE * self._target, STEPS * self._fastest_step)
            seconds = self._target if len(prompts) > 1 else alone
            tokens = self._times.halves_within(seconds, attended, self._page, self._most)
        if self._ranks is None:
            return tokens
        agreed = torch.tensor(tokens)
        dist.broadcast(agreed, group=self._ranks, group_src=0)
        return int(agreed)

    def _gives_way(self, running: Any) -> bool:
        """Whether the prompt under way must return to the queue, because a prompt that does not fit beside it comes
        first."""
        scheduler, under_way = self._scheduler, self._scheduler.chunked_req
        if running.batch_is_full or self._slots < 2 or not _parkable(scheduler):
            return False
        if under_way.prefix_len <= self._parked.get(under_way, -1):
            return False  # the tree has lost some of what was computed; it must get further first
        first, room = scheduler.waiting_queue[0], share(self._budget, self._page)
        if rest(under_way) <= room:
            return False  # it ends in the next pass
        if self._first is under_way:
            return False
        if first is not self._first and (not self._turns.before(first, under_way) or rest(first) <= room):
            return False
        return self._has_room(first, running)

    def _free(self, running: Any) -> int:
        """Free tokens for the prompt under way, with a page reserved for each decoding request."""
        scheduler = self._scheduler
        free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        return int(free) - self._page * len(running.reqs)

    def _has_room(self, request: Any, running: Any) -> bool:
        """Whether a request can be admitted while the computed part of the prompt under way stays in the tree. The
        request's own cache hit is not free."""
        scheduler = self._scheduler
        free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        answers = sum(self._answer(each) for each in (request, *running.reqs) if not each.finished())
        return rest(request) + request.host_hit_length + answers + self._page <= free - request.prefix_len

    def _park(self) -> None:
        """Return the prompt under way to the queue. The tree has its whole pages.

        With overlapped schedules the result of its last chunk is still pending, and decrements the counter kept here.
        """
        from sglang.srt.mem_cache.common import match_kv_cache, release_kv_cache

        scheduler = self._scheduler
        request = scheduler.chunked_req
        self._parked[request] = request.prefix_len
        kept = request.inflight_middle_chunks, request.retraction_count, request.is_retracted
        release_kv_cache(request, scheduler.tree_cache, checkpoint=False)
        request.reset_for_retract()  # keeps retracted_stain: SGLang counts the cached tokens of a request once
        request.inflight_middle_chunks, request.retraction_count, request.is_retracted = kept
        scheduler.chunked_req = None
        scheduler.waiting_queue.append(request)
        request.time_stats.set_wait_queue_entry_time()
        match_kv_cache(request, scheduler.tree_cache)


def _attended(start: int, count: int) -> float:
    """The sum, over `count` tokens after `start`, of the number of tokens before each."""
    return count * (start + count / 2)


def _parkable(scheduler: Any) -> bool:
    """Whether the radix tree can hold all computed tokens of the prompt under way."""
    request = scheduler.chunked_req
    return not (
        scheduler.tree_cache.disable
        or request.skip_radix_cache_insert
        or request.return_logprob
        or request.return_hidden_states
        or request.input_embeds is not None
        or request.session is not None
        or request.to_finish is not None
        or scheduler._pending_chunked_abort_req is request
        or scheduler.enable_lora
    )


class _Process:
    """State for hooks that do not receive a scheduler. A process has one scheduler; tests make several in turn.

    Attributes:
        pacer: of the scheduler that last looked for prompts; None: it has none.
        planning: whether that scheduler is looking for prompts now.
    """

    def __init__(self) -> None:
        self._scheduler: Callable[[], Any] | None = None
        self.pacer: Pacer | None = None
        self.planning = False

    def pacer_of(self, scheduler: Any) -> Pacer | None:
        if self._scheduler is None or self._scheduler() is not scheduler:
            self._scheduler, self.pacer = weakref.ref(scheduler), _made(scheduler)
        return self.pacer

    @property
    def planner(self) -> Pacer | None:
        """The pacer that chooses prompts now, or None."""
        return self.pacer if self.planning and suspects.on_trial is None else None


_here = _Process()


def _made(scheduler: Any) -> Pacer | None:
    from sglang.srt.runtime_context import get_parallel

    from fluxion_sglang.sglang.memory.pools import FluxionKVPool

    parallel = get_parallel()
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if (
        not isinstance(pool, FluxionKVPool)
        or pool.maker is not None
        or pool.config.prefill_pass_ms == 0
        or scheduler.chunked_prefill_size is None
        or scheduler.disaggregation_mode.value != "null"
        or parallel.pp_size > 1
        or scheduler.require_mlp_sync
        or not scheduler.is_generation
    ):
        return None
    ranks = parallel.tp_group.cpu_group if parallel.tp_size > 1 else None
    return Pacer(scheduler, pool.config.prefill_pass_ms / 1000, scheduler.chunked_prefill_size, ranks)


def get_new_batch_prefill(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    """AROUND Scheduler.get_new_batch_prefill."""
    pacer = _here.pacer_of(scheduler)
    if pacer is None:
        return original(scheduler, running_batch)
    _here.planning = True
    try:
        return pacer.plan(partial(original, scheduler), running_batch)
    finally:
        _here.planning = False


def calc_priority(original: Callable[..., Any], policy: Any, waiting: list[Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND SchedulePolicy.calc_priority."""
    result = original(policy, waiting, *args, **kwargs)
    if (pacer := _here.planner) is not None:
        pacer.sort(waiting)
    return result


def shortest_prefill_chunk_limit(
    original: Callable[..., Any], policy: Any, chunked_req: Any, waiting_queue: list[Any], budget: int, page_size: int
) -> Any:
    """AROUND SchedulePolicy.shortest_prefill_chunk_limit, which SGLang calls with every policy."""
    if (pacer := _here.planner) is not None and pacer.orders:
        return pacer.limit(waiting_queue, budget)
    return original(policy, chunked_req, waiting_queue, budget, page_size)


def add_one_req(
    original: Callable[..., Any], adder: Any, req: Any, has_chunked_req: bool, truncation_align_size: int | None
) -> Any:
    """AROUND PrefillAdder.add_one_req: a prompt that shares a pass with an unfinished one must fit beside it."""
    if has_chunked_req and (pacer := _here.planner) is not None and pacer.orders:
        from sglang.srt.managers.schedule_policy import AddReqResult

        if not pacer.fits_beside(req, adder):
            return AddReqResult.OTHER
    return original(adder, req, has_chunked_req, truncation_align_size)


def process_pending_chunked_abort(original: Callable[..., None], scheduler: Any) -> None:
    """AROUND Scheduler.process_pending_chunked_abort: if the client of the prompt under way disconnects, keep the
    computed whole pages in the tree, because the client may ask again."""
    request = scheduler.chunked_req
    if (
        _here.pacer is not None
        and request is not None
        and scheduler._pending_chunked_abort_req is request
        and request.to_finish is None
        and request.extend_end > request.prefix_len
    ):
        scheduler.stash_chunked_request(request)
    original(scheduler)


async def handle_loop(original: Callable[..., Any], manager: Any) -> None:
    """AROUND TokenizerManager.handle_loop: check disconnects of requests without a stream more often."""
    from sglang.srt.managers import tokenizer_manager

    from fluxion_sglang.sglang.start.options import options_of

    if options_of(manager.server_args).prefill_pass_ms > 0:
        seconds = min(tokenizer_manager._REQUEST_STATE_WAIT_TIMEOUT, LOOK_S)
        tokenizer_manager._REQUEST_STATE_WAIT_TIMEOUT = seconds
    await original(manager)


def forward_batch_generation(
    original: Callable[..., Any], worker: Any, batch: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """AROUND TpModelWorker.forward_batch_generation: measure the pass. On a CPU the call returns after it."""
    pacer = _here.pacer
    if pacer is None or batch is None:
        return original(worker, batch, *args, **kwargs)
    began = time.perf_counter()
    result = original(worker, batch, *args, **kwargs)
    pacer.measure(batch, began, time.perf_counter())
    return result
