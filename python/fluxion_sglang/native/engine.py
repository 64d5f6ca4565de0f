"""Wrapper of the native engine, which runs decode steps layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fluxion_sglang.native.loading import function
from fluxion_sglang.native.plan import NativePlan
from fluxion_sglang.native.pool import NativePool, Workers

T = TypeVar("T")


class AttentionLayer:
    """The constants of a layer's attention, checked once and used in any number of steps.

    Args:
        index: index into the pool's layers. scale: multiplies q.k.
        windows: [H, rows * S / 16, 2, 16, D], KV dtype, with the residents; None: a device holds them.
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
        # Keep the tensors alive: the library holds their addresses.
        self._tensors = windows, sinks
        self.handle = function("engine_layer")(engine.handle, index, windows, scale, cap, sinks, newest)


class NativeEngine:
    """Runs the layers of decode steps: resident attention, the task queue, the merge.

    Step, begin and finish belong to one thread; foreign executors may use the queue from any thread. The
    engine uses the workers of its pool.

    Args:
        q_heads: a multiple of the pool's KV heads, at most 16 times as many (the group, G).
        sinks: tokens, 16 * the pool's sink_pages. window: tokens, a multiple of 16.
        max_requests, max_pages: initial capacities (requests of a step, pages of a request); `step` grows them.
        attend_union: all heads of a group, streaming heads too, attend to the union of their selections.
        chunk_bytes: bytes that a stage of a task (scan, attention) reads per chunk; idle workers help with the other
            chunks. A layer of at least three times as many bytes wakes sleeping workers. None: the best value.
        share_prefixes: tasks owned by the CPU (see `owner` of `NativePlan`) of the same KV head and block size, whose
            requests have page tables with a common prefix, are computed in bundles. Common pages that several of them
            read come from memory once. What each head reads stays the same.
        cached_bytes: bytes of tiles that stay in the last-level cache while the tasks of a bundle attend one after
            another. They do so if they mostly read different tiles and all of these fit. None: half of a hardware
            thread's share of that cache.

    FLUXION_TASK_TIMEOUT_S (default 60) is the time that `layer_finish` waits for foreign executors.

    Raises:
        ValueError: a geometry that does not fit the pool, or a negative cache size.
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
        # Functions that are called in every layer.
        self._layer_resident = function("engine_layer_resident")
        self._layer_newest = function("engine_layer_newest")
        self._layer_begin = function("engine_layer_begin")
        self._middle_begin = function("engine_middle_begin")
        self._layer_finish = function("engine_layer_finish")
        self._reads = function("engine_reads")
        self._corrupt = function("engine_corrupt")
        self._stat_names = str(function("engine_stat_names")()).split(",")
        self._tasks = 0
        # Keep tensors alive between begin and finish: the library holds their addresses.
        self._in_use: tuple[object, ...] = ()
        self._step_plan: NativePlan | None = None  # kept alive from `plan_step` to the next step

    def corrupt(self) -> dict[int, str]:
        """Requests of the last finished layer that read corrupt host memory, each with a sentence; their output is
        zero. Empty without a canary in the pool."""
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
        """Append the step's token and compute the resident attention of a layer, before it is planned.

        A directly following `layer_begin` of the same layer with k and v None uses both. Any other call drops the
        attention. Waits for the workers.

        Args:
            at: a layer with windows.
            q, k, v: as in `layer_begin`; k, v None: window and host have the token already.
            parts: [B, Hq, 5] float32, written: the log-sum-exp (natural log) of the sinks and of the window with the
                query's own token, the norms |O| of both, and the norm of the two merged. -inf and 0 for no tokens.

        Raises:
            ValueError: a shape or dtype that does not fit; nothing was written.
            RuntimeError: the workers run another engine's layer.

        A request that cannot be computed gets the parts of no tokens, and fails the layer in `layer_finish`.
        """
        self._layer_resident(self.handle, at.handle, q, k, v, parts)
        self._in_use = ()  # an open layer was abandoned

    def layer_newest(
        self, at: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Compute a whole layer with a window (`AttentionLayer`, newest).

        Appends the step's token to the host and attends to the KV in host memory. There are no plan, residents or
        tasks, and no metadata of blocks larger than a page. Waits for the workers.

        Args:
            q, k, v, out: as in `layer_begin`.

        Raises:
            ValueError: a shape or dtype that does not fit, or a layer without a window; nothing was written.
            RuntimeError: a request cannot be computed, or the workers run another engine's layer.
        """
        self._layer_newest(self.handle, at.handle, q, k, v, out)
        self._in_use = ()

    def layer_append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Append the step's token to the host only, for a plan that needs it there.

        A directly following `middle_begin` of the same layer has k and v None.

        Args and errors: as for `layer_resident`.
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
                both have it already.
            out: [B, Hq, D], KV dtype, written by the time `layer_finish` returns.

        Returns:
            The number of tasks.

        Raises:
            ValueError: a shape or dtype that does not fit, or a layer without windows whose residents `layer_resident`
                has not attended to; nothing was started.

        An open layer is abandoned first. An invalid plan (a block size that no kind of task accepts, a list with pages
        outside the middle) fails the layer in `layer_finish`.
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
        """`layer_begin` for residents on a device: k and v go to the host only, and the middle's result is returned.

        Args:
            k, v: None: `layer_append` put them there.
            o: [B, Hq, D] float32, written where lse is not -inf. lse: [B, Hq] float32, written.
            parts: [B, Hq, 5] float32, as for `layer_resident`: the device's result, for task kinds that need it;
                copied. None: unknown.
        """
        return self._begun(self._middle_begin, plan, at, q, k, v, o, lse, parts)

    def plan_step(self, plan: NativePlan, residents_first: bool) -> None:
        """Set the plan of every layer of the current step, for a program's attention layers (`NativeProgram.attend`).

        The plan holds until the next `step`.

        Args:
            residents_first: whether the plan's task kinds need the result of resident attention.

        Raises:
            ValueError: the plan has another number of requests or heads.
        """
        function("engine_plan_step")(self.handle, plan.handle, residents_first)
        self._step_plan = plan

    def _begun(self, begin: Callable[..., Any], plan: NativePlan, at: AttentionLayer, *arguments: Any) -> int:
        """Call begin(engine, plan, layer, arguments) and keep the tensors alive until the layer ends."""
        # Set before the call: workers read the tensors as soon as it starts, and an interrupt may follow it.
        self._in_use += (plan, at, *arguments)
        self._tasks = begin(self.handle, plan.handle, at.handle, *arguments)
        self._in_use = (plan, at, *arguments)
        return self._tasks

    def layer_finish(self) -> None:
        """Help with the layer's tasks, wait for all of them, and merge the results into `out`.

        Raises:
            RuntimeError: the layer failed; the sentence names its first failure. The engine stays usable.
        """
        self.finish_by(self._layer_finish)

    def finish_by(self, finish: Callable[[Any], T]) -> T:
        """Finish the layer by a native function of the engine's handle that includes `layer_finish`; returns its
        result."""
        try:
            return finish(self.handle)
        except KeyboardInterrupt:  # maybe before the call: stop all readers before the tensors are released
            self.abandon()
            raise
        finally:
            self._in_use = ()

    def result(self, out: torch.Tensor) -> None:
        """Write the last layer's output before its rounding to the KV dtype into out, [B, Hq, D] float32.

        Valid after a successful `layer_finish`, until the next `layer_begin` or `step`.

        Raises:
            RuntimeError: at any other time.
        """
        function("engine_result")(self.handle, out)

    def reads(self, out: torch.Tensor) -> None:
        """Write the bytes that each task of the last layer read into out, [B, H, 2] int64: tile bytes, metadata bytes.

        Tile bytes count whole tiles of blocks, each once a group. Task kinds of other packages define their own reads.
        A shared read counts for each task. Valid as for `result`, and raises as it does.
        """
        self._reads(self.handle, out)

    def abandon(self) -> None:
        """End an open layer without its result. Tasks that have not begun are dropped, and claims become void."""
        function("engine_abandon")(self.handle)
        self._in_use = ()

    def queue_pop(self, executor: int) -> int:
        """Claim the next task for a foreign executor (1: torch); -1 if there is none.

        The claim must be delivered or failed. It holds until then, or until `layer_finish` times out.
        """
        return int(function("engine_queue_pop")(self.handle, executor))

    def task(self, claim: int) -> int:
        """b * H + h of a claim, or of a task index of the open layer."""
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
            tokens: tokens read, summed over the heads; for the statistics.
            tile_bytes, metadata_bytes: as in `reads`.

        Returns:
            False if the claim was void and the result was dropped.
        """
        return bool(function("engine_task_done")(self.handle, claim, o, lse, tokens, tile_bytes, metadata_bytes))

    def task_failed(self, claim: int, message: str) -> bool:
        """Fail a claim, and with it the layer; returns as `task_done`."""
        return bool(function("engine_task_failed")(self.handle, claim, message))

    def selection(self, claim: int, pages: torch.Tensor, masks: torch.Tensor) -> int:
        """Write the selection of a task of the open layer.

        Args:
            claim: a claim, or a task index.
            pages: [max] int32, written: physical pages.
            masks: [max, G] uint16, written: bit t of [i, g]: head g attends to token t of page i.

        Returns:
            The number of pages written.

        Raises:
            ValueError: more than max pages. RuntimeError: there is no such task now.
        """
        return int(function("engine_selection")(self.handle, claim, pages, masks))

    def stats(self) -> dict[str, int]:
        """Cumulative counts: layers, tasks, tasks_cpu, tasks_torch, failed_tasks, middle_tokens and tokens_read (summed
        over query heads), tile_bytes and metadata_bytes (as in `reads`, but shared reads count once), shared_tasks
        (computed in bundles), shared_tile_bytes and shared_metadata_bytes (the further bytes that these would have read
        alone).
        """
        out = torch.empty(len(self._stat_names), dtype=torch.int64)
        function("engine_stats")(self.handle, out)
        return dict(zip(self._stat_names, out.tolist(), strict=True))

    def worker_ns(self) -> list[int]:
        """Cumulative compute time of each worker in finished layers, in nanoseconds, without waiting."""
        return self._counts_of_workers()[0]

    def helped_chunks(self) -> list[int]:
        """Cumulative number of chunks that each worker has computed of other workers' tasks."""
        return self._counts_of_workers()[1]

    def _counts_of_workers(self) -> list[list[int]]:
        out = torch.empty(2, self.pool.workers.count, dtype=torch.int64)
        function("engine_worker_counts")(self.handle, out)
        return out.tolist()

    def owners(self) -> torch.Tensor:
        """[tasks] int8: the executor that completed each task of the last layer; -1 for an unfinished task."""
        out = torch.empty(self._tasks, dtype=torch.int8)
        function("engine_owners")(self.handle, out)
        return out
