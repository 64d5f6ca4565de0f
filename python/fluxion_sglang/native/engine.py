"""The native engine: decode steps, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fluxion_sglang.native.loading import function
from fluxion_sglang.native.plan import NativePlan
from fluxion_sglang.native.pool import NativePool, Workers

T = TypeVar("T")


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
        guard: where a head is estimated to have left out more than this share of its attention, its task reads
            twice the head's blocks in the same step (docs/serving.md, "Guard rail"): the tasks of native workers in
            layers that `layer_resident` began. None: no guard.
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
        attend_union: bool,
        guard: float | None = None,
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
            guard or 0.0,
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
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        windows: torch.Tensor,
        scale: float,
        parts: torch.Tensor,
        sinks: torch.Tensor | None = None,
        cap: float = 0.0,
    ) -> None:
        """Append the step's token and compute the resident attention of a layer, before anything is planned.

        The `layer_begin` that comes next uses both, if it is of the same layer and brings neither k, v nor windows;
        any other one, `step` and `abandon` drop the attention. Waits for the workers.

        Args:
            q, k, v, windows, scale, sinks, cap: as in `layer_begin`; k, v None: window and host have the token already.
            parts: [B, Hq, 5] float32, written: the LSE (natural log) of the sinks and of the window with the query's
                own token, the norms |O| of both, and the norm of the two merged. Of no tokens: -inf and 0.

        Raises:
            ValueError: a shape, dtype or layer that does not fit; nothing was written.
            RuntimeError: the workers run another engine's layer.

        A request that cannot be computed gets the parts of no tokens, and fails the layer in `layer_finish`.
        """
        self._layer_resident(self.handle, layer, q, k, v, windows, scale, cap, sinks, parts)
        self._in_use = ()  # of a layer that was open: abandoned

    def layer_newest(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        cap: float = 0.0,
    ) -> None:
        """A whole layer whose tokens attend to the newest `window` ones (sliding-window attention).

        Appends the step's token to the host and attends where KV lies there: no plan, no residents, no tasks, and no
        metadata of blocks above a page. Waits for the workers.

        Args:
            window: tokens, this step's included; at least 1.
            q, k, v, scale, out, sinks, cap: as in `layer_begin`.

        Raises:
            ValueError: a shape, dtype, layer or window that does not fit; nothing was written.
            RuntimeError: a request cannot be computed, or the workers run another engine's layer.
        """
        self._layer_newest(self.handle, layer, q, k, v, scale, cap, window, sinks, out)
        self._in_use = ()

    def layer_append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Append the step's token to the host alone, for a plan that needs it there.

        The `middle_begin` that comes next, of the same layer, brings neither k nor v.

        Args and errors: as of `layer_resident`.
        """
        function("engine_layer_append")(self.handle, layer, k, v)
        self._in_use = ()

    def layer_begin(
        self,
        plan: NativePlan,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        windows: torch.Tensor | None,
        scale: float,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        cap: float = 0.0,
    ) -> int:
        """Start a layer of the step on the workers and return at once.

        Args:
            q: [B, Hq, D], KV dtype.
            k, v: [B, H, D], KV dtype, the token at position n - 1: written to its window slot and to the host. None:
                both places have it already.
            windows: [H, rows * S / 16, 2, 16, D], KV dtype. None: `layer_resident` computed the resident attention;
                then k and v are None, too.
            scale: multiplies q.k.
            out: [B, Hq, D], KV dtype, written by the time `layer_finish` returns.
            sinks: [Hq] float32: a logit of each head that joins the softmax and has no value (learned attention
                sinks). It counts as a resident. None: there are none, or `layer_resident` had them.
            cap: logits are cap * tanh(scale * q.k / cap), above 0; 0: they are not capped.

        Returns:
            The number of tasks.

        Raises:
            ValueError: a shape, dtype or layer that does not fit, or residents that nobody attends to; nothing was
                started.

        A layer that was begun before and not finished is abandoned first. A plan that cannot be (a block size that no
        kind of task takes, a list with pages outside the middle) fails the layer in `layer_finish`.
        """
        return self._begun(self._layer_begin, plan, layer, q, k, v, windows, scale, cap, sinks, out)

    def middle_begin(
        self,
        plan: NativePlan,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        scale: float,
        o: torch.Tensor,
        lse: torch.Tensor,
        parts: torch.Tensor | None = None,
    ) -> int:
        """`layer_begin` where the residents are a device's: k and v go to the host alone, the middle's result is given.

        Args:
            k, v: None: `layer_append` put them there.
            o: [B, Hq, D] float32, written where lse is not -inf. lse: [B, Hq] float32, written.
            parts: [B, Hq, 5] float32, as of `layer_resident`: what the device found, for early exit and the guard;
                copied. None: it is not known.
        """
        return self._begun(self._middle_begin, plan, layer, q, k, v, scale, o, lse, parts)

    def _begun(self, begin: Callable[..., Any], plan: NativePlan, *arguments: Any) -> int:
        """begin(engine, plan, arguments): every tensor among them is kept until the layer ends."""
        # Before the call: the workers may read these from its first moment on, and an interrupt may follow it.
        self._in_use += (plan, *arguments)
        self._tasks = begin(self.handle, plan.handle, *arguments)
        self._in_use = (plan, *arguments)
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
        What the guard adds is read by itself, and counts once more where another head of the group has read it. What
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
        """What a task of the open layer reads, before the guard.

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
        """Cumulative counts: layers, tasks, tasks_cpu, tasks_torch, failed_tasks, widened_tasks (that
        the guard made read more), middle_tokens and tokens_read (summed over query heads), tile_bytes and
        metadata_bytes (see `reads`, but what tasks read together counts once), shared_tasks (done together with
        others), shared_tile_bytes and shared_metadata_bytes (what these would have read besides if each had been done
        alone).
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
