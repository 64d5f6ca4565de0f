"""Prometheus counters of the decode engine on SGLang's `/metrics` (`--enable-metrics`)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from fluxion_sglang.config import ConfigError
from fluxion_sglang.executor import histograms
from fluxion_sglang.executor.accounts import SAMPLED, Totals, block_name
from fluxion_sglang.executor.phases import Phase

if TYPE_CHECKING:
    from prometheus_client import Counter

PUBLISH_S = 0.5
"""Longest delay of the counters by layer, group and part."""

FILES_BYTES: Final = 4 << 20
"""Upper bound for the size of a process's counter files, including SGLang's."""

_TASKS = "tasks_"
_TASKS_TEXT = "Tasks (request, layer, group) computed, by executor."
_COUNTERS = {
    "layers": "Decode steps of one layer.",
    "middle_tokens": "Tokens of the middle that decode heads could have read, summed over query heads.",
    "tokens_read": "Tokens of the middle that decode heads attended to, summed over query heads.",
    "tile_bytes": "Bytes of K and V that decode tasks attended to; what requests read together counts once.",
    "metadata_bytes": "Bytes of block metadata and of sketches read by decode tasks.",
    "shared_tasks": "Decode tasks done together with those of requests that begin with the same pages.",
    "shared_tile_bytes": "Bytes of K and V that were not read again, because requests begin with the same pages.",
    "shared_metadata_bytes": "The same of metadata.",
    "canary_checks": "Tiles, metadata entries and sketches of the host pool that were compared with what was written.",
    "canary_mismatches": "Those that were not what had been written, at reads and in whole checks.",
    "device_layers": "Decode steps of one layer for which a device took the CPU's part.",
    "near_tiles": "Tiles that the device chose (hot_tiles_gb) and read in its own memory.",
    "far_tiles": "Tiles that it chose and left to the CPU.",
    "near_copies": "Of these, the ones that it copied into its memory.",
    "worker_ns": "Time that the engine's workers computed in decode steps, summed over workers. What is missing to the "
    "time of the part tasks, times workers, is waiting.",
    "failed_passes": "Forward passes whose attention failed: their requests ended with an error.",
    "refused_specs": "Requests that ended because of the policy that they named.",
    "healed_windows": "Rows whose window was filled again from the host pool, because they came without a prefill.",
    "disk_read_pages": "Pages of 16 tokens that were read from files, and not computed; each rank counts its own.",
    "disk_written_pages": "Pages that were written to files.",
    "disk_refused_pages": "Files that were not what had been written; they were removed, and computed again.",
    "arrived_tokens": "Tokens of prompts that came from a prefill server into the host pool; each rank counts its own.",
    "arrival_line_ns": "Time that these prompts waited for room in which to arrive.",
    "arrival_copy_ns": "Time of copying them into the host pool, during which no request decodes.",
    "device_wait_ns": "Time that the device waited for the CPU's part of layers: it stood idle.",
    "device_step_ns": "Time of decode steps on the device, from the first layer's queries to the last layer's "
    "attention.",
}
"""Help text of the counter of each engine statistic."""
_CONTAINMENT: dict[str, tuple[str, tuple[str, ...]]] = {
    "contained_failures": (
        "Failures that ended a request and not the server, by the ring that caught them (docs/dev/faults.md). door: "
        "the request was refused with status 400 before it was sent to the scheduler.",
        ("ring",),
    ),
    "suspected_requests": (
        "Requests that were tried alone, because a pass of several requests failed and nothing named the guilty one.",
        (),
    ),
    "rebuilt_pools": (
        "Times that host pool, request table and prefix cache were emptied: they were not sound after a failure.",
        (),
    ),
}
"""Help text and labels of the counters of contained failures, which any process of the server may have."""
RINGS = ("door", "arrivals", "admission", "budgets", "passes", "loop", "outputs")
"""The rings of `sglang/containment/` that count failures."""
_GAUGES = {
    "host_pool_tokens": "Capacity of the host pool in tokens.",
    "host_pool_bytes": "Bytes of the host pool: tiles, metadata, moments and sketches.",
    "resident_tokens_per_request": "Most tokens of a request that stay on the device.",
}
_ACCOUNTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "decode_steps": ("Decode steps.", ()),
    "decode_tokens": ("Tokens that they decoded.", ()),
    "group_read_bytes": (
        "Bytes of K and V of the middle that decode steps read, by layer and KV head (group), without metadata; what "
        f"requests read together counts for each. Of one step in {SAMPLED}.",
        ("layer", "group"),
    ),
    "layer_middle_bytes": (
        "Bytes of K and V that the same steps could have read in all groups of a layer: the whole middle; none where "
        "the layer has a window.",
        ("layer",),
    ),
    "sampled_groups": (
        f"Groups by the block size of their plan; streaming ones read nothing. Of one step in {SAMPLED}.",
        ("block",),
    ),
    "timed_steps": (f"Decode steps that were timed: one in {SAMPLED}, if another one followed it directly.", ()),
    "step_seconds": (
        "Time of the timed steps, by part. resident, features: attention to the residents, and what is told "
        "to a policy that sees them first. plan: the policy. tasks: from the start of a layer's queue to its last "
        "result, with the residents where no policy sees them first. model: between the attention of layers. between: "
        "from the last layer's attention to the next step, with sampling and SGLang's scheduler. A server with the "
        "option audit has none.",
        ("part",),
    ),
}
"""Help text and labels of the counters made from `Totals`."""


def described() -> dict[str, str]:
    """Help text of every metric by its name on `/metrics`."""
    counters = {"tasks": _TASKS_TEXT} | {_name(stat): text for stat, text in _COUNTERS.items()}
    counters |= {name: text for name, (text, _) in (_ACCOUNTS | _CONTAINMENT).items()}
    return {f"fluxion_{name}_total": text for name, text in counters.items()} | {
        f"fluxion_{name}": text for name, text in (_GAUGES | histograms.DESCRIBED).items()
    }


def _name(stat: str) -> str:
    """The counter name of a statistic; nanoseconds are published as seconds."""
    return "read_tokens" if stat == "tokens_read" else stat.replace("_ns", "_seconds")


@dataclass(frozen=True)
class Kept:
    """The accounts of a process.

    Attributes:
        totals: returns the current totals; any thread may call it.
        layers, groups: indices in the model of this process's layers and groups.
        first: this process counts steps and tokens; other processes have other parts of the same steps.
    """

    totals: Callable[[], Totals]
    layers: Sequence[int]
    groups: Sequence[int]
    first: bool = True


@cache
def _refused_specs() -> Counter:
    from prometheus_client import Counter

    return Counter("fluxion_refused_specs", _COUNTERS["refused_specs"])


def count_refused_spec() -> None:
    """Count a request that was refused for its policy, in a process that has no `EngineMetrics`."""
    _refused_specs().inc()


@cache
def _containment(name: str) -> Counter:
    from prometheus_client import Counter

    text, labels = _CONTAINMENT[name]
    return Counter(f"fluxion_{name}", text, labels)


def count_contained(ring: str) -> None:
    """Count a failure that a ring of `sglang/containment/` contained."""
    _containment("contained_failures").labels(ring=ring).inc()


def count_suspects(requests: int) -> None:
    """Count requests that are tried alone."""
    _containment("suspected_requests").inc(requests)


def count_rebuilt() -> None:
    """Count a rebuild of the pools after a failure."""
    _containment("rebuilt_pools").inc()


class EngineMetrics:
    """Turns the engine's cumulative statistics into counters `fluxion_*_total` and gauges `fluxion_*`.

    Processes of one server share the counters through prometheus_client's multiprocess directory, so tensor-parallel
    ranks add up. Import and construct only after SGLang has set that directory.

    Raises:
        ConfigError: the disk has no room for the counters' files.

    Args:
        kept: the accounts to publish by layer and group, at most every `PUBLISH_S` seconds and by a separate thread.
            There may be hundreds of these counters, and a step must not wait for them.
    """

    def __init__(
        self,
        *,
        host_pool_tokens: int,
        host_pool_bytes: int,
        resident_tokens_per_request: int,
        kept: Kept | None = None,
    ) -> None:
        from prometheus_client import Counter, Gauge

        _check_room()
        self._counters = {stat: Counter(f"fluxion_{_name(stat)}", text) for stat, text in _COUNTERS.items()}
        self._tasks = Counter("fluxion_tasks", _TASKS_TEXT, ["executor"])
        values = {
            "host_pool_tokens": host_pool_tokens,
            "host_pool_bytes": host_pool_bytes,
            "resident_tokens_per_request": resident_tokens_per_request,
        }
        gauges = {}
        for name, text in _GAUGES.items():
            # Bytes differ between ranks and add up; tokens are the same on all ranks.
            mode: Literal["livesum", "livemostrecent"] = "livesum" if name.endswith("_bytes") else "livemostrecent"
            gauges[name] = Gauge(f"fluxion_{name}", text, multiprocess_mode=mode)
            gauges[name].set(values.get(name, 0))
        _containment.cache_clear()  # register again in the current registry
        for name in _CONTAINMENT:
            _containment(name)  # exists before anything fails, with a sample for each ring
        for ring in RINGS:
            _containment("contained_failures").labels(ring=ring)
        self._last: dict[str, int] = {}
        self._accounts = None if kept is None else _AccountMetrics(kept)
        _reserve_files()

    def update(self, stats: Mapping[str, int]) -> None:
        """Publish the growth since the last call.

        Args:
            stats: the engine's cumulative statistics.
        """
        for name, value in stats.items():
            growth = value - self._last.get(name, 0)
            if growth <= 0:
                continue
            if name.startswith(_TASKS):
                self._tasks.labels(executor=name.removeprefix(_TASKS)).inc(growth)
            elif name in self._counters:
                self._counters[name].inc(growth * 1e-9 if name.endswith("_ns") else growth)
        self._last = dict(stats)
        if self._accounts is not None:
            self._accounts.changed()


class _AccountMetrics:
    """Publishes the growth of `Totals`."""

    def __init__(self, kept: Kept) -> None:
        from prometheus_client import Counter

        self._kept = kept
        self._counters = {name: Counter(f"fluxion_{name}", text, labels) for name, (text, labels) in _ACCOUNTS.items()}
        self._last: dict[tuple[str, ...], float] = {}
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self.publish()  # creates all counters, also of groups that never read

    def changed(self) -> None:
        """Wake the publishing thread: the totals have grown."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="fluxion-metrics", daemon=True)
            self._thread.start()
        if not self._changed.is_set():
            self._changed.set()

    def _main(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            self.publish()
            time.sleep(PUBLISH_S)

    def publish(self) -> None:
        totals = self._kept.totals()
        if self._kept.first:
            self._grow("decode_steps", totals.steps)
            self._grow("decode_tokens", totals.tokens)
        parts = zip(self._kept.layers, totals.read_bytes, totals.middle_bytes, strict=True)
        for layer, groups, middle in parts:
            self._grow("layer_middle_bytes", middle, str(layer))
            for group, read in zip(self._kept.groups, groups, strict=True):
                self._grow("group_read_bytes", read, str(layer), str(group))
        for size, count in totals.blocks.items():
            self._grow("sampled_groups", count, block_name(size))
        self._grow("timed_steps", totals.timed_steps)
        for part, seconds in zip(Phase, totals.seconds, strict=True):
            self._grow("step_seconds", seconds, part.name.lower())

    def _grow(self, name: str, value: float, *labels: str) -> None:
        growth = value - self._last.get((name, *labels), 0)
        counter = self._counters[name].labels(*labels) if labels else self._counters[name]
        if growth > 0:
            counter.inc(growth)
        self._last[name, *labels] = value


def _files_folder() -> Path | None:
    """The folder of prometheus_client's counter files; None: counters are in memory."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    return None if folder is None else Path(folder)


def _check_room() -> None:
    """Raise ConfigError if the disk has no room for the counters. They are sparse memory-mapped files; a write into a
    hole on a full disk kills the process by a signal."""
    folder = _files_folder()
    if folder is None:
        return
    trial = folder / f"fluxion_{os.getpid()}.room"
    try:
        with trial.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, FILES_BYTES)
    except OSError as error:
        raise ConfigError(
            f"--enable-metrics keeps its counters in {folder}, which has no room for {FILES_BYTES >> 20} MiB "
            f"({error.strerror}); make room, or name another folder in PROMETHEUS_MULTIPROC_DIR."
        ) from None
    finally:
        trial.unlink(missing_ok=True)


def _reserve_files() -> None:
    """Allocate the holes of this process's files while there is room."""
    folder = _files_folder()
    for path in () if folder is None else folder.glob(f"*_{os.getpid()}.db"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
