"""The native engine: decode steps, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fluxion_sglang.native.loading import function
from fluxion_sglang.native.plan import NativePlan
from fluxion_sglang.native.pool import NativePool, Workers

T = TypeVar("T")


class AttentionLayer:
    """What is the same in every step of a layer's attention: checked once, used by any number of steps.

    Args:
        index: of the pool's layers. scale: multiplies q.k.
        windows: [H, rows * S / 16, 2, 16, D], KV dtype, that hold the residents; None: they are a device's.
        sinks: [Hq] float32: a logit of each head that joins the softmax and has no value (learned attention sinks). It
            counts as a resident. None: there are none.
        cap: logits are cap * tanh(scale * q.k / cap), above 0; 0: they are not capped.
        newest: tokens that a token attends to, its own included, at least 1 (sliding-window attention). None: all.

    Raises:
        ValueError: a shape, dtype, layer or number that does not fit the engine.
    """

    __slots__ = ("_tensors", "handle", "index")

    def __init__(
        self,
        engine: NativeEngine,
        index: int,
        scale: float,
        windows: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        cap: float = 0.0,
        newest: int | None = None,
    ) -> None:
        self.index = index
        # The library has their addresses.
        self._tensors = windows, sinks
        self.handle = function("engine_layer")(engine.handle, index, windows, scale, cap, sinks, newest)


class NativeEngine:
    """Runs the layers of decode steps: resident attention, the task queue, the merge.

    Step, begin and finish belong to one thread; foreign executors may use the queue from any thread. The
    engine uses the workers of its pool.

    Args:
        q_heads: a multiple of the pool's KV heads, at most 16 times as many (the group, G).
        sinks: tokens, 16 * the pool's sink_pages. window: tokens, a multiple of 16.
        max_requests, max_pages: capacities to start with (requests of a step, pages of a request); `step`
            grows them.
        attend_union: what one head of a group chose, all of them attend to, streaming heads too.
        chunk_bytes: what a stage of a task (scan, attention) reads at a time, so that idle workers can help with the
            rest; a layer wakes workers that sleep from three times as much on. None: what is best.
        share_prefixes: of requests whose page tables begin alike, the tasks that are for the CPU alone (see `owner` of
            `layer_begin`), of one KV head and block size, are done together: what several of them read of the common
            pages comes from memory once. What each head reads stays the same.
        cached_bytes: of tiles, what the last cache keeps while one such task after another attends to its own. Tasks
            that mostly want different tiles do so where all of these are no more bytes. None: half of a hardware
            thread's share of that cache.

    FLUXION_TASK_TIMEOUT_S (default 60) is how long `layer_finish` waits for foreign executors.

    Raises:
        ValueError: a geometry that does not fit the pool, or a cache of less than nothing.
    """

    def __init__(
        self,
        workers: Workers,
        pool: NativePool,
        *,
        q_heads: int,
        sinks: int,
        window: int,
        max_requests: int,
        max_pages: int,
        attend_union: bool = True,
        chunk_bytes: int | None = None,
        share_prefixes: bool,
        cached_bytes: int | None = None,
    ) -> None:
        if workers is not pool.workers:
            raise ValueError("The engine uses the workers of its pool; pass the Workers the pool was created with.")
        if cached_bytes is not None and cached_bytes < 0:
            raise ValueError(
                f"cached_bytes is {cached_bytes}; a cache keeps 0 bytes or more, None means the machine's."
            )
        self.pool = pool
        self.handle = function("engine_create")(
            pool.handle,
            q_heads,
            sinks,
            window,
            max_requests,
            max_pages,
            attend_union,
            chunk_bytes or 0,
            share_prefixes,
            -1 if cached_bytes is None else cached_bytes,
        )
        # The calls of every layer.
        self._layer_resident = function("engine_layer_resident")
        self._layer_newest = function("engine_layer_newest")
        self._layer_begin = function("engine_layer_begin")
        self._middle_begin = function("engine_middle_begin")
        self._layer_finish = function("engine_layer_finish")
        self._reads = function("engine_reads")
        self._corrupt = function("engine_corrupt")
        self._stat_names = str(function("engine_stat_names")()).split(",")
        self._tasks = 0
        # The library keeps addresses of these between begin and finish.
        self._in_use: tuple[object, ...] = ()
        self._step_plan: NativePlan | None = None  # and of this one from `plan_step` to the next step

    def corrupt(self) -> dict[int, str]:
        """Requests of the layer that was finished last which read what was not what had been written, each with a
        sentence: their output is zero. Only with a canary in the pool."""
        if self.pool.canary == 0:
            return {}
        lines = (line.partition("\t") for line in str(self._corrupt(self.handle)).splitlines())
        return {int(request): sentence for request, _, sentence in lines}

    def step(self, rows: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor) -> None:
        """Begin a decode step; copies its arguments.

        A request with a length or page id out of range fails every layer of the step, in `layer_finish`.

        Args:
            rows: [B] int32, rows of the device windows, all different.
            seq_lens: [B] int32, this step's token included.
            page_table: [B, M] int32, physical page of every logical page.
        """
        function("engine_step")(self.handle, rows, seq_lens, page_table)

    def layer_resident(
        self,
        at: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        parts: torch.Tensor,
    ) -> None:
        """Append the step's token and compute the resident attention of a layer, before anything is planned.

        A `layer_begin` of the same layer that comes next and brings neither k nor v uses both; any other call drops
        the attention. Waits for the workers.

        Args:
            at: a layer with windows.
            q, k, v: as in `layer_begin`; k, v None: window and host have the token already.
            parts: [B, Hq, 5] float32, written: the LSE (natural log) of the sinks and of the window with the query's
                own token, the norms |O| of both, and the norm of the two merged. Of no tokens: -inf and 0.

        Raises:
            ValueError: a shape or dtype that does not fit; nothing was written.
            RuntimeError: the workers run another engine's layer.

        A request that cannot be computed gets the parts of no tokens, and fails the layer in `layer_finish`.
        """
        self._layer_resident(self.handle, at.handle, q, k, v, parts)
        self._in_use = ()  # of a layer that was open: abandoned

    def layer_newest(
        self, at: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """A whole layer with a window (`AttentionLayer`, newest).

        Appends the step's token to the host and attends where KV lies there: no plan, no residents, no tasks, and no
        metadata of blocks above a page. Waits for the workers.

        Args:
            q, k, v, out: as in `layer_begin`.

        Raises:
            ValueError: a shape or dtype that does not fit, or a layer without a window; nothing was written.
            RuntimeError: a request cannot be computed, or the workers run another engine's layer.
        """
        self._layer_newest(self.handle, at.handle, q, k, v, out)
        self._in_use = ()

    def layer_append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Append the step's token to the host alone, for a plan that needs it there.

        A `middle_begin` of the same layer that comes next brings neither k nor v.

        Args and errors: as of `layer_resident`.
        """
        function("engine_layer_append")(self.handle, layer, k, v)
        self._in_use = ()

    def layer_begin(
        self,
        plan: NativePlan,
        at: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        out: torch.Tensor,
    ) -> int:
        """Start a layer of the step on the workers and return at once.

        Args:
            q: [B, Hq, D], KV dtype.
            k, v: [B, H, D], KV dtype, the token at position n - 1: written to its window slot and to the host. None:
                both places have it already.
            out: [B, Hq, D], KV dtype, written by the time `layer_finish` returns.

        Returns:
            The number of tasks.

        Raises:
            ValueError: a shape or dtype that does not fit, or a layer without windows whose residents `layer_resident`
                has not attended to; nothing was started.

        A layer that was begun before and not finished is abandoned first. A plan that cannot be (a block size that no
        kind of task takes, a list with pages outside the middle) fails the layer in `layer_finish`.
        """
        return self._begun(self._layer_begin, plan, at, q, k, v, out)

    def middle_begin(
        self,
        plan: NativePlan,
        at: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        o: torch.Tensor,
        lse: torch.Tensor,
        parts: torch.Tensor | None = None,
    ) -> int:
        """`layer_begin` where the residents are a device's: k and v go to the host alone, the middle's result is given.

        Args:
            k, v: None: `layer_append` put them there.
            o: [B, Hq, D] float32, written where lse is not -inf. lse: [B, Hq] float32, written.
            parts: [B, Hq, 5] float32, as of `layer_resident`: what the device found, for kinds of tasks
                that go by it; copied. None: it is not known.
        """
        return self._begun(self._middle_begin, plan, at, q, k, v, o, lse, parts)

    def plan_step(self, plan: NativePlan, residents_first: bool) -> None:
        """What every layer of the current step reads, for a program's layers of attention (`NativeProgram.attend`).

        The plan holds until the next `step`.

        Args:
            residents_first: whether the plan's kinds of tasks go by attention to the residents.

        Raises:
            ValueError: it is for another number of requests or heads.
        """
        function("engine_plan_step")(self.handle, plan.handle, residents_first)
        self._step_plan = plan

    def _begun(self, begin: Callable[..., Any], plan: NativePlan, at: AttentionLayer, *arguments: Any) -> int:
        """begin(engine, plan, layer, arguments): every tensor among them is kept until the layer ends."""
        # Before the call: the workers may read these from its first moment on, and an interrupt may follow it.
        self._in_use += (plan, at, *arguments)
        self._tasks = begin(self.handle, plan.handle, at.handle, *arguments)
        self._in_use = (plan, at, *arguments)
        return self._tasks

    def layer_finish(self) -> None:
        """Help with the layer's work, wait for all of it, and merge it into `out`.

        Raises:
            RuntimeError: the layer failed; the sentence names its first failure. The engine stays usable.
        """
        self.finish_by(self._layer_finish)

    def finish_by(self, finish: Callable[[Any], T]) -> T:
        """`layer_finish` by a native function that does more besides, of the engine's handle; its result."""
        try:
            return finish(self.handle)
        except KeyboardInterrupt:  # perhaps before the call: nobody may read the tensors when they are given away
            self.abandon()
            raise
        finally:
            self._in_use = ()

    def result(self, out: torch.Tensor) -> None:
        """The output of the last layer, before it was rounded to the KV dtype: [B, Hq, D] float32, written.

        After a `layer_finish` that raised nothing, until the next `layer_begin` or `step`.

        Raises:
            RuntimeError: at any other time.
        """
        function("engine_result")(self.handle, out)

    def reads(self, out: torch.Tensor) -> None:
        """Bytes that each task of the last layer read: [B, H, 2] int64, written: tile bytes, metadata bytes.

        Tile bytes count whole tiles of blocks, each once a group; a kind of another package says what its tasks read.
        What
        tasks read together counts for each of them. Valid as `result` is, and raises as it does.
        """
        self._reads(self.handle, out)

    def abandon(self) -> None:
        """End an open layer without its result: work that nobody has begun is not done, claims no longer hold."""
        function("engine_abandon")(self.handle)
        self._in_use = ()

    def queue_pop(self, executor: int) -> int:
        """Claim the next task for a foreign executor (1: torch); -1 when there is none.

        The claim must be delivered or failed. It holds until then, or until `layer_finish` times out.
        """
        return int(function("engine_queue_pop")(self.handle, executor))

    def task(self, claim: int) -> int:
        """b * H + h of a claim, or of a plain task index of the open layer."""
        return int(function("engine_task")(self.handle, claim))

    def task_done(
        self,
        claim: int,
        o: torch.Tensor,
        lse: torch.Tensor,
        tokens: int,
        tile_bytes: int = 0,
        metadata_bytes: int = 0,
    ) -> bool:
        """Deliver o [G, D] and lse [G] (natural log; -inf for a head that read nothing), float32.

        Args:
            tokens: how many were read, summed over the heads; for the statistics.
            tile_bytes, metadata_bytes: as in `reads`.

        Returns:
            False when the claim no longer holds; the result was dropped.
        """
        return bool(function("engine_task_done")(self.handle, claim, o, lse, tokens, tile_bytes, metadata_bytes))

    def task_failed(self, claim: int, message: str) -> bool:
        """Fail a claim, and with it the layer; returns as `task_done`."""
        return bool(function("engine_task_failed")(self.handle, claim, message))

    def selection(self, claim: int, pages: torch.Tensor, masks: torch.Tensor) -> int:
        """What a task of the open layer reads.

        Args:
            claim: a claim, or a plain task index.
            pages: [max] int32, written: physical pages.
            masks: [max, G] uint16, written: bit t of [i, g]: head g attends to token t of page i.

        Returns:
            How many pages were written.

        Raises:
            ValueError: more than max pages. RuntimeError: no such task now.
        """
        return int(function("engine_selection")(self.handle, claim, pages, masks))

    def stats(self) -> dict[str, int]:
        """Cumulative counts: layers, tasks, tasks_cpu, tasks_torch, failed_tasks, middle_tokens and tokens_read (summed
        over query heads), tile_bytes and metadata_bytes (see `reads`, but what tasks read together counts once),
        shared_tasks (done together with others), shared_tile_bytes and shared_metadata_bytes (what these would have
        read besides if each had been done alone).
        """
        out = torch.empty(len(self._stat_names), dtype=torch.int64)
        function("engine_stats")(self.handle, out)
        return dict(zip(self._stat_names, out.tolist(), strict=True))

    def worker_ns(self) -> list[int]:
        """Cumulative nanoseconds that each worker has computed in finished layers, waiting left out."""
        return self._counts_of_workers()[0]

    def helped_chunks(self) -> list[int]:
        """Cumulative number of chunks that each worker has done of tasks that another one had."""
        return self._counts_of_workers()[1]

    def _counts_of_workers(self) -> list[list[int]]:
        out = torch.empty(2, self.pool.workers.count, dtype=torch.int64)
        function("engine_worker_counts")(self.handle, out)
        return out.tolist()

    def owners(self) -> torch.Tensor:
        """[tasks] int8: the executor that did each task of the last layer; -1 when nobody finished it."""
        out = torch.empty(self._tasks, dtype=torch.int8)
        function("engine_owners")(self.handle, out)
        return out
