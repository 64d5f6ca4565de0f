"""The GPU executor: a native thread that has a device read for tasks (`csrc/device/dispatcher.h`)."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.device import rates as calibration
from fluxion_sglang.device.crossover import READ_SHARE, crossover
from fluxion_sglang.device.library import DeviceLibrary, load
from fluxion_sglang.device.rates import Rates
from fluxion_sglang.executor.base import Executor, ExecutorId, LayerWork
from fluxion_sglang.kv.host_pool import GIB, HostPool
from fluxion_sglang.native import NativeEngine, NativePool, function

logger = logging.getLogger(__name__)

LOGGED_CONTEXT = 32768
"""Tokens of the requests for which the log compares this with plain SGLang."""

MAX_ENTRIES = 1 << 18
"""Most tiles of a batch: a task that reads more stays with the CPU."""


NEVER = 1 << 62
"""Of bytes that are to reach it."""


@dataclass(frozen=True)
class DispatcherOptions:
    """How the dispatcher works.

    Attributes:
        streams: of the device, two batches each. tasks, entries: of a batch, at most (entries: tiles).
        batch_bytes: a batch with so many bytes of tiles waits for no further task.
        hot_bytes: device memory for copies of tiles. A tile gets one the `touches`-th time (1 or 2) that it was
            missing; with 2, if the first was at most `horizon` steps ago.
        stage_bytes: device memory of a batch for tiles that it gathers before it reads them, each once. stage_from:
            bytes of tiles in host memory from which a batch does so, 0: always, `NEVER`: never; None: from where it is
            faster by the rates.
        flash: FlashInfer attends to batches whose tiles are all in device memory, where it has a kernel.
    """

    streams: int = 2
    tasks: int = 32
    entries: int = 1 << 14
    batch_bytes: int = 8 << 20
    hot_bytes: int = 0
    touches: int = 2
    horizon: int = 16
    stage_bytes: int = 8 << 20
    stage_from: int | None = None
    flash: bool = True


class Dispatcher:
    """The thread, from here until `stop`.

    Args:
        api: address of a device library's `DeviceApi`; the library must stay loaded.

    Raises:
        RuntimeError: the device failed. ValueError: options that cannot be.
    """

    def __init__(self, engine: NativeEngine, api: int, rates: Rates, options: DispatcherOptions | None = None) -> None:
        o = options or DispatcherOptions()
        self._handle = function("dispatcher_create")(
            engine.handle, api, o.streams, o.tasks, o.entries, o.batch_bytes, o.hot_bytes, o.touches, o.horizon,
            o.stage_bytes, -1 if o.stage_from is None else o.stage_from, o.flash, rates.tensor(),
        )  # fmt: skip
        self._names = str(function("dispatcher_stat_names")()).split(",")
        self._lost = function("dispatcher_lost")
        # Before the device library is unloaded, and while what the thread logs to is there.
        atexit.register(_stop, weakref.ref(self))

    def stop(self) -> None:
        """End the thread. Batches on their way are waited for, a few seconds at most; may be called again."""
        function("dispatcher_stop")(self._handle)

    @property
    def lost(self) -> str:
        """Why the device is lost, or "": then the CPU does all tasks."""
        return str(self._lost(self._handle))

    def stats(self) -> dict[str, int]:
        """Cumulative counts: tasks (delivered), batches, failed_tasks, late_batches, tile_bytes (read by batches),
        link_bytes (that crossed the link for it: of a staged tile once), hot_hits, hot_misses, hot_copies,
        hot_evictions, hot_stale, staged_tiles (tiles), flashinfer_batches (that FlashInfer attended to); and two of
        now: quarantined_streams, hot_slots (used).
        """
        out = torch.empty(len(self._names), dtype=torch.int64)
        function("dispatcher_stats")(self._handle, out)
        return dict(zip(self._names, out.tolist(), strict=True))

    def times(self) -> torch.Tensor:
        """[n, 4] int64: submitted, done (`time.monotonic_ns`), tasks and bytes of tiles of every batch since the last
        call; of more than 8192, the oldest. One thread at a time."""
        out = torch.empty(8192, 4, dtype=torch.int64)
        return out[: function("dispatcher_times")(self._handle, out)]


def _stop(dispatcher: weakref.ref[Dispatcher]) -> None:
    if (alive := dispatcher()) is not None:
        alive.stop()


class GpuExecutor(Executor):
    """Has a device compute tasks beside the native workers; its thread needs nothing from the calling one.

    Args:
        library: of the device; the host pool's memory must be readable by it.
        rates: of this machine; None: they are measured where no earlier process did.
        say: what the log is to say of the rates, once.
    """

    id = ExecutorId.GPU

    def __init__(
        self,
        library: DeviceLibrary,
        options: DispatcherOptions | None = None,
        rates: Rates | None = None,
        say: Callable[[Rates], str] | None = None,
    ) -> None:
        self._library, self._options, self._rates, self._say = library, options or DispatcherOptions(), rates, say
        self.dispatcher: Dispatcher | None = None
        self._told = False

    def bind(self, engine: NativeEngine, q_heads: int) -> None:
        rates = self._rates or measured(self._library, engine.pool, q_heads, self._options.flash)
        if self._say is not None:
            logger.info("Fluxion: %s", self._say(rates))
        self.dispatcher = Dispatcher(engine, self._library.api(), rates, self._options)

    def drain(self, work: LayerWork) -> None:
        if self._told or self.dispatcher is None or not (why := self.dispatcher.lost):
            return
        self._told = True
        logger.error("Fluxion: %s; tasks are computed by the CPU alone from now on", why)

    def stats(self) -> dict[str, int]:
        return {f"gpu_{name}": value for name, value in (self.dispatcher.stats() if self.dispatcher else {}).items()}


def measured(library: DeviceLibrary, pool: NativePool, q_heads: int, flash: bool) -> Rates:
    """Of this machine and a model with so many query heads; a few seconds, once.

    Args:
        flash: as in DispatcherOptions.

    Raises:
        RuntimeError: the device failed.
    """
    if library.backend == "sim":
        return calibration.SIMULATED
    tiles = pool.tensor("tiles", 0)
    group, head_dim, workers, isa = q_heads // len(tiles), tiles.shape[-1], pool.workers, pool.isa
    flash = flash and library.plan_bytes(1, 1, group, head_dim, tiles.dtype) > 0
    key = calibration.cache_key(str(library.info()["name"]), workers.count, isa, group, head_dim, tiles.dtype, flash)

    def measure() -> Rates:
        return calibration.measure(
            library.api(),
            workers,
            isa,
            library.pinned_empty,
            group=group,
            head_dim=head_dim,
            dtype=tiles.dtype,
            flash=flash,
        )

    return calibration.cached(key, measure)


def create(config: FluxionConfig, pool: HostPool) -> list[Executor]:
    """The executor that `executors` "cpu+gpu" asks for.

    Raises:
        DeviceError: there is no device.
    """
    options = DispatcherOptions(
        entries=min(pool.pages, MAX_ENTRIES),
        hot_bytes=int(config.hot_tiles_gb * GIB),
        flash=config.gpu_kernels == "flashinfer",
    )
    library = load("sim" if os.environ.get("FLUXION_DEVICE") == "sim" else "cuda")
    free = int(library.info()["free_bytes"])
    if options.flash and not library.has_flashinfer:
        logger.warning(
            "Fluxion: libfluxion_cuda.so was built without FlashInfer, so Fluxion's own kernels attend to the middle "
            "on the GPU; `fluxion doctor` says how to build it"
        )

    def say(rates: Rates) -> str:
        share = 1.0 if config.policy == "full" else READ_SHARE
        at = crossover(pool.shape, pool.placement, rates, context=LOGGED_CONTEXT, device_bytes=free, read_share=share)
        return at.sentence()

    return [GpuExecutor(library, options, say=say)]
