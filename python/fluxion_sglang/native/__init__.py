"""The native library: loading it, and typed wrappers of its functions.

Everything here takes and returns CPU tensors; nothing copies them. The library does not know torch: tensors
cross as DLPack through apache-tvm-ffi. Sizes are in tokens or in pages of 16 tokens, as each docstring says.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import tvm_ffi

ABI_VERSION = 18
"""What `abi_version` of a library that fits this file returns."""

CLAIM_INDEX_MASK = (1 << 18) - 1
"""`claim & CLAIM_INDEX_MASK` is the index of the claimed task within its layer."""

T = TypeVar("T")

_LIBRARY = Path(__file__).parents[1] / "_native" / "libfluxion.so"
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}

# These wait for other threads, or run long: Python threads go on meanwhile. The others return within
# microseconds, and giving the lock away could cost them a whole switch interval.
_BLOCKING = frozenset(
    {
        "workers_create",
        "pool_create",
        "pool_append",
        "pool_adopt",
        "pool_append_decode",
        "pool_fill_window",
        "pool_gather",
        "measure",
        "hgca_establish",
        "hgca_step",
        "host_memory",
        "probe_read",
        "probe_attend",
        "probe_score",
        "probe_select",
        "engine_step",
        "engine_layer_resident",
        "engine_layer_append",
        "engine_layer_finish",
        "engine_selection",
        "dispatcher_create",
        "dispatcher_stop",
        "time_attend",
        "mailbox_wait",
        "mailbox_finish",
    }
)


class NativeLibraryError(RuntimeError):
    """The native library is missing, cannot be loaded, or belongs to another version of this package."""


def library_path() -> Path:
    """Where the library is: FLUXION_LIBRARY, or beside this file."""
    return Path(os.environ.get("FLUXION_LIBRARY") or _LIBRARY)


def check_complete(path: Path) -> None:
    """Raises OSError unless an ELF file has all its segments: a truncated one kills the loader (SIGBUS)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:5] != b"\x7fELF\x02":
            raise OSError("it is no 64-bit ELF library")
        (table,) = struct.unpack_from("<Q", header, 32)
        entry, count = struct.unpack_from("<HH", header, 54)
        file.seek(table)
        segments = file.read(entry * count)
    if len(segments) < entry * count:
        raise OSError("it is truncated")
    for at in range(0, entry * count, entry):
        (offset,) = struct.unpack_from("<Q", segments, at + 8)
        (length,) = struct.unpack_from("<Q", segments, at + 32)
        if offset + length > size:
            raise OSError("it is truncated")


@cache
def library() -> tvm_ffi.Module:
    """The loaded library.

    Raises:
        NativeLibraryError: missing, unloadable, or of another ABI version.
    """
    path = library_path()
    if not path.is_file():
        raise NativeLibraryError(
            f"The native library {path} does not exist; reinstall fluxion-sglang, or set FLUXION_LIBRARY to "
            "a built libfluxion.so."
        )
    try:
        check_complete(path)
        module = tvm_ffi.load_module(path)
        version = int(module.get_function("abi_version")())
    except Exception as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise NativeLibraryError(
            f"The native library {path} cannot be loaded ({reason}); reinstall fluxion-sglang on this "
            "machine, or unset FLUXION_LIBRARY."
        ) from error
    if version != ABI_VERSION:
        raise NativeLibraryError(
            f"The native library {path} has ABI version {version} and this package needs {ABI_VERSION}; "
            "reinstall fluxion-sglang so that both come from the same version, or unset FLUXION_LIBRARY."
        )
    return module


@cache
def function(name: str) -> Callable[..., Any]:
    """A function of the library; blocking ones release the GIL."""
    bound = library().get_function(name)
    bound.release_gil = name in _BLOCKING
    return bound  # type: ignore[no-any-return]


def topology() -> dict[str, Any]:
    """What this process may use of the machine.

    Returns:
        cores (list[int], best first), numa (list of {id, cores}), huge_pages ("always", "madvise", "never",
        "unknown"), cgroup_version (0, 1, 2), cgroup_limit_bytes and cgroup_available_bytes (-1: unlimited),
        mem_total_bytes, mem_available_bytes, available_bytes (the least of the two), isas (list[str], best
        last), isa (the one in use) and isa_error (why none is, or "").
    """
    report: dict[str, Any] = json.loads(str(function("topology_json")()))
    return report


def pool_bytes(layers: int, kv_heads: int, pages: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of host memory that a NativePool of this shape maps; `pages` counts page 0.

    Raises:
        ValueError: a shape or dtype that the kernels do not serve.
    """
    return int(function("pool_bytes")(layers, kv_heads, pages, head_dim, _dtype_id(dtype)))


def _dtype_id(dtype: torch.dtype) -> int:
    if dtype not in _DTYPES:
        raise ValueError(f"The KV dtype is {dtype}; the kernels serve torch.bfloat16 and torch.float32.")
    return _DTYPES[dtype]


class Workers:
    """Persistent threads that compute; the calling thread is one of them and is never pinned.

    Args:
        count: threads, the caller included.
        cores: int32 core numbers for the others, thread w on cores[w % len]; None: every core this process
            may use.

    Raises:
        ValueError: a bad count, or a core this process may not run on.
        RuntimeError: the threads cannot be started.
    """

    def __init__(self, count: int, cores: torch.Tensor | None = None) -> None:
        empty = torch.empty(0, dtype=torch.int32)
        self.handle = function("workers_create")(count, empty if cores is None else cores)
        self.count = count

    @property
    def cores(self) -> list[int]:
        """The cores that threads are dealt to."""
        return [int(core) for core in str(function("workers_cores")(self.handle)).split(",")]


class NativePool:
    """Tiles, metadata and moments of every layer in one mapping (layouts: `tensor`).

    Args:
        pages: page ids 0..pages-1; page 0 is padding.
        dtype: torch.bfloat16 or torch.float32.
        sink_pages: logical pages below this number count into no coarse entry and no moments.
        spread: share of the half width of a block's min/max box that its score counts, in (0, 1].
        isa: kernels to use, one of `topology()["isas"]`; None: the best, or FLUXION_ISA.

    Raises:
        ValueError: a shape the kernels do not serve.
        RuntimeError: the memory is not there.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        layers: int,
        kv_heads: int,
        pages: int,
        head_dim: int,
        dtype: torch.dtype,
        sink_pages: int,
        spread: float = 1.0,
        isa: str | None = None,
    ) -> None:
        self.workers = workers
        self.handle = function("pool_create")(
            workers.handle, layers, kv_heads, pages, head_dim, _dtype_id(dtype), sink_pages, spread, isa or ""
        )
        self._append = function("pool_append")
        self._check = function("pool_check")
        self._adopt = function("pool_adopt")
        self._append_decode = function("pool_append_decode")
        self._fill_window = function("pool_fill_window")
        self._gather = function("pool_gather")
        self._views: dict[tuple[str, int], torch.Tensor] = {}

    @property
    def isa(self) -> str:
        """The kernels in use."""
        return str(function("pool_isa")(self.handle))

    def tensor(self, name: str, layer: int) -> torch.Tensor:
        """A view of a layer's memory, which stays mapped as long as the view lives.

        Args (H KV heads, P pages, D head_dim):
            name: "tiles" [H, P, 2, 16, D], KV dtype: K, then V, of a page.
                "meta0".."meta3" [H, ceil(P / 2^j), 2, D], KV dtype: {min, max} over the keys of a block of
                2^j pages; coarse levels live at [last page >> j].
                "tag1".."tag3" [ceil(P / 2^j)] int32: the last page of the block whose entry is there, or -1.
                "moments" [H, P, 2 D + 8] float64: sums along the path of k, v, |k|^1..4, |v|^1..4.
            "memory" [bytes] uint8: all of the above, of all layers; whole pages of 4096 bytes.
        """
        view = self._views.get((name, layer))
        if view is None:
            view = self._views[name, layer] = torch.from_dlpack(function("pool_tensor")(self.handle, name, layer))
        return view

    def append(self, layer: int, pages: torch.Tensor, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write tokens start..start+T-1 of a request, and what is derived from every page that this fills.

        Args:
            pages: [>= ceil((start + T) / 16)] int32, the request's pages from its first.
            k, v: [T, H, D], KV dtype; any strides, D contiguous.

        Raises:
            ValueError: a page id or position out of range; nothing was written.
        """
        self._append(self.handle, layer, pages, start, k, v)

    def check(self, pages: torch.Tensor, start: int, count: int) -> None:
        """Raise ValueError where `append` of so many tokens would."""
        self._check(self.handle, pages, start, count)

    def adopt(self, layer: int, pages: torch.Tensor, start: int, count: int) -> None:
        """`append` of tokens that a device wrote (`DeviceLibrary.write_pages`): what follows from their path.

        Once for every write, when it is done and before anybody reads what it wrote.

        Raises:
            ValueError: as in `append`.
        """
        self._adopt(self.handle, layer, pages, start, count)

    def append_decode(
        self, layer: int, seq_lens: torch.Tensor, page_table: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write the last token of each of B requests.

        Args:
            seq_lens: [B] int32, this token included. page_table: [B, M] int32. k, v: [B, H, D], KV dtype.

        Raises:
            ValueError: as in `append`.
        """
        self._append_decode(self.handle, layer, seq_lens, page_table, k, v)

    def fill_window(
        self,
        layer: int,
        windows: torch.Tensor,
        row: int,
        n: int,
        pages: torch.Tensor,
        sinks: int,
        window: int,
    ) -> None:
        """Copy the sinks and window of a request of n tokens into a row of the device windows.

        Args:
            windows: [H, rows * S / 16, 2, 16, D], KV dtype, S = sinks + window + 16.
            pages: [>= ceil(n / 16)] int32.
            sinks, window: tokens, multiples of 16.

        Raises:
            ValueError: a row, length or page id out of range; nothing was written.
        """
        self._fill_window(self.handle, layer, windows, row, n, pages, sinks, window)

    def gather(self, layer: int, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy whole pages out of the tiles.

        Args:
            pages: [m] int32. k, v: [H, 16 m, D], KV dtype, written; the last two dimensions contiguous.

        Raises:
            ValueError: a page id out of range; nothing was written.
        """
        self._gather(self.handle, layer, pages, k, v)


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
        share_prefixes: bool = False,
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
        self._step = function("engine_step")
        self._layer_resident = function("engine_layer_resident")
        self._layer_append = function("engine_layer_append")
        self._layer_begin = function("engine_layer_begin")
        self._layer_finish = function("engine_layer_finish")
        self._set_resident = function("engine_set_resident")
        self._queue_pop = function("engine_queue_pop")
        self._task = function("engine_task")
        self._task_done = function("engine_task_done")
        self._result = function("engine_result")
        self._reads = function("engine_reads")
        self._abandon = function("engine_abandon")
        self._task_failed = function("engine_task_failed")
        self._selection = function("engine_selection")
        self._stats = function("engine_stats")
        self._owners = function("engine_owners")
        self._worker_counts = function("engine_worker_counts")
        self._stat_names = str(function("engine_stat_names")()).split(",")
        self._empty = torch.empty(0)
        self._tasks = 0
        # The library keeps addresses of these between begin and finish.
        self._in_use: tuple[torch.Tensor, ...] = ()

    def step(self, rows: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor) -> None:
        """Begin a decode step; copies its arguments.

        A request with a length or page id out of range fails every layer of the step, in `layer_finish`.

        Args:
            rows: [B] int32, rows of the device windows, all different.
            seq_lens: [B] int32, this step's token included.
            page_table: [B, M] int32, physical page of every logical page.
        """
        self._step(self.handle, rows, seq_lens, page_table)

    def layer_resident(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        windows: torch.Tensor,
        scale: float,
        parts: torch.Tensor,
    ) -> None:
        """Append the step's token and compute the resident attention of a layer, before anything is planned.

        The `layer_begin` that comes next uses both, if it is of the same layer and brings neither k, v nor windows;
        any other one, `step` and `abandon` drop the attention. Waits for the workers.

        Args:
            q, k, v, windows, scale: as in `layer_begin`; k, v None: window and host have the token already.
            parts: [B, Hq, 5] float32, written: the LSE (natural log) of the sinks and of the window with the query's
                own token, the norms |O| of both, and the norm of the two merged. Of no tokens: -inf and 0.

        Raises:
            ValueError: a shape, dtype or layer that does not fit; nothing was written.
            RuntimeError: the workers run another engine's layer.

        A request that cannot be computed gets the parts of no tokens, and fails the layer in `layer_finish`.
        """
        self._layer_resident(
            self.handle,
            layer,
            q,
            self._empty if k is None else k,
            self._empty if v is None else v,
            windows,
            scale,
            parts,
        )
        self._in_use = ()  # of a layer that was open: abandoned

    def layer_append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Append the step's token to the host alone, for a plan that needs it there.

        The `layer_begin` that comes next, of the same layer and with `middle`, brings neither k nor v.

        Args and errors: as of `layer_resident`.
        """
        self._layer_append(self.handle, layer, k, v)
        self._in_use = ()

    def layer_begin(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        windows: torch.Tensor | None,
        blk: torch.Tensor,
        budget: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        out: torch.Tensor | None,
        owner: torch.Tensor | None = None,
        listed: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        record: tuple[torch.Tensor, torch.Tensor] | None = None,
        given: tuple[torch.Tensor, torch.Tensor] | None = None,
        stop: torch.Tensor | None = None,
        spread: torch.Tensor | None = None,
        middle: tuple[torch.Tensor, torch.Tensor] | None = None,
        parts: torch.Tensor | None = None,
    ) -> int:
        """Start a layer of the step on the workers and return at once.

        Args:
            q: [B, Hq, D], KV dtype.
            k, v: [B, H, D], KV dtype, the token at position n - 1: written to its window slot and to the
                host. None: both places have it already.
            windows: [H, rows * S / 16, 2, 16, D], KV dtype. None: `layer_resident` computed the resident attention
                (then k and v are None too), or `set_resident` delivers it.
            blk: [B, H] int32, block size in tokens (16, 32, 64, 128), 0 for no task; 1 selects single tokens by
                their exact scores, each head its own (`attend_union` means blocks); -1 reads what `listed` has.
            budget: [B, Hq] float32, fraction of the middle each head reads; 0 is a streaming head.
            value: [B, H] float32, priority; larger runs earlier.
            scale: multiplies q.k.
            out: [B, Hq, D], KV dtype, written by the time `layer_finish` returns; None with `middle`.
            owner: [B, H] int32, the executor that alone may take each task (0 cpu: the workers, 1 torch, 2 gpu), 3 for
                any; None: any takes all. An executor takes its own before those for any, each by value.
            listed: offsets, pages and masks (`policy.base.Listed`) of the groups of block size -1.
            record: chosen and scores (`policy.base.Record`), written by the tasks of `listed` that the workers do.
            given: o and lse (`policy.base.Given`), merged into what the tasks find.
            stop: [B, H] float32: in (0, 1), the heads of a group read until each has this share of its attention by
                PSA's estimate, and at most their budgets; 0 and 1: they read their budgets. None: 0 for all. Early
                exit needs blocks of 16 tokens or more, and `layer_resident` before, or `parts`.
            spread: [B, H] float32 in [0, 1], by which the groups that stop early score blocks; None: 1 for all.
            middle: where the residents are a device's, o [B, Hq, D] and lse [B, Hq], float32, written instead of `out`:
                the middle's result alone; o where lse is not -inf. k and v then go to the host alone; None:
                `layer_append` put them there.
            parts: [B, Hq, 5] float32, as of `layer_resident`: what the device found, for early exit and the guard;
                copied. None: it is not known.

        Returns:
            The number of tasks.

        Raises:
            ValueError: a shape, dtype or layer that does not fit; nothing was started.

        A layer that was begun before and not finished is abandoned first. A list that names pages outside the middle,
        unsorted pages or offsets that cannot be fails the layer in `layer_finish`.
        """
        empty = self._empty
        lists = (*(listed or (empty,) * 3), *(record or (empty,) * 2), *(given or (empty,) * 2))
        in_use = tuple(t for t in (q, k, v, windows, out, *lists, *(middle or ())) if t is not None)
        # Before the call: the workers may read these from its first moment on, and an interrupt may follow it.
        self._in_use += in_use
        self._tasks = self._layer_begin(
            self.handle,
            layer,
            q,
            empty if k is None else k,
            empty if v is None else v,
            empty if windows is None else windows,
            blk,
            budget,
            value,
            empty if owner is None else owner,
            scale,
            empty if out is None else out,
            *lists,
            empty if stop is None else stop,
            empty if spread is None else spread,
            *(middle or (empty, empty)),
            empty if parts is None else parts,
        )
        self._in_use = in_use
        return self._tasks

    def set_resident(self, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Deliver the layer's resident attention: o [B, Hq, D], lse [B, Hq], float32; copied."""
        self._set_resident(self.handle, o, lse)

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
        finally:
            self._in_use = ()

    def result(self, out: torch.Tensor) -> None:
        """The output of the last layer, before it was rounded to the KV dtype: [B, Hq, D] float32, written.

        After a `layer_finish` that raised nothing, until the next `layer_begin` or `step`.

        Raises:
            RuntimeError: at any other time.
        """
        self._result(self.handle, out)

    def reads(self, out: torch.Tensor) -> None:
        """Bytes that each task of the last layer read: [B, H, 2] int64, written: tile bytes, metadata bytes.

        Tile bytes count whole tiles of blocks, and of single tokens (block size 1) the rows of K and V attended to;
        each once a group. The keys that single tokens were chosen by are not counted, those of listed tokens that
        were ranked are. What the guard adds is read by itself, and counts once more where another head of the group has
        read it; so does what heads that stop early read in different microbatches. What tasks read together counts for
        each of them. Valid as `result` is, and raises as it does.
        """
        self._reads(self.handle, out)

    def abandon(self) -> None:
        """End an open layer without its result: work that nobody has begun is not done, claims no longer hold."""
        self._abandon(self.handle)
        self._in_use = ()

    def queue_pop(self, executor: int) -> int:
        """Claim the next task for a foreign executor (1 torch, 2 gpu); -1 when there is none.

        The claim must be delivered or failed. It holds until then, or until `layer_finish` times out.
        """
        return int(self._queue_pop(self.handle, executor))

    def task(self, claim: int) -> int:
        """b * H + h of a claim, or of a plain task index of the open layer."""
        return int(self._task(self.handle, claim))

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
        return bool(self._task_done(self.handle, claim, o, lse, tokens, tile_bytes, metadata_bytes))

    def task_failed(self, claim: int, message: str) -> bool:
        """Fail a claim, and with it the layer; returns as `task_done`."""
        return bool(self._task_failed(self.handle, claim, message))

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
        return int(self._selection(self.handle, claim, pages, masks))

    def stats(self) -> dict[str, int]:
        """Cumulative counts: layers, tasks, tasks_cpu, tasks_torch, tasks_gpu, failed_tasks, widened_tasks (that
        the guard made read more), middle_tokens and tokens_read (summed over query heads), tile_bytes and
        metadata_bytes (see `reads`, but what tasks read together counts once), shared_tasks (done together with
        others), shared_tile_bytes and shared_metadata_bytes (what these would have read besides if each had been done
        alone), microbatches (of tasks that stop early).
        """
        out = torch.empty(len(self._stat_names), dtype=torch.int64)
        self._stats(self.handle, out)
        return dict(zip(self._stat_names, out.tolist(), strict=True))

    def worker_ns(self) -> list[int]:
        """Cumulative nanoseconds that each worker has computed in finished layers, waiting left out."""
        return self._counts_of_workers()[0]

    def helped_chunks(self) -> list[int]:
        """Cumulative number of chunks that each worker has done of tasks that another one had."""
        return self._counts_of_workers()[1]

    def _counts_of_workers(self) -> list[list[int]]:
        out = torch.empty(2, self.pool.workers.count, dtype=torch.int64)
        self._worker_counts(self.handle, out)
        return out.tolist()

    def owners(self) -> torch.Tensor:
        """[tasks] int8: the executor that did each task of the last layer; -1 when nobody finished it."""
        out = torch.empty(self._tasks, dtype=torch.int8)
        self._owners(self.handle, out)
        return out
