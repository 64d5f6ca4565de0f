"""Prometheus counters of what the decode engine did, on SGLang's own `/metrics` (`--enable-metrics`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

_TASKS = "tasks_"
_TASKS_TEXT = "Tasks (request, layer, group) computed, by executor."
_COUNTERS = {
    "layers": ("layers", "Decode steps of one layer."),
    "widened_tasks": ("widened_tasks", "Decode tasks that the guard rail made read more."),
    "middle_tokens": (
        "middle_tokens",
        "Tokens of the middle that decode heads could have read, summed over query heads.",
    ),
    "tokens_read": ("read_tokens", "Tokens of the middle that decode heads attended to, summed over query heads."),
    "tile_bytes": (
        "tile_bytes",
        "Bytes of K and V that decode tasks attended to; the keys that oracle policies scan are not counted, and what "
        "requests read together counts once.",
    ),
    "metadata_bytes": ("metadata_bytes", "Bytes of block metadata read by decode tasks."),
    "shared_tasks": (
        "shared_tasks",
        "Decode tasks done together with those of requests that begin with the same pages.",
    ),
    "shared_tile_bytes": (
        "shared_tile_bytes",
        "Bytes of K and V that were not read again, because requests begin with the same pages.",
    ),
    "shared_metadata_bytes": ("shared_metadata_bytes", "The same of block metadata."),
    "microbatches": ("microbatches", "Microbatches that decode tasks of policy psa have read."),
    "device_layers": ("device_layers", "Decode steps of one layer for which a device took the CPU's part."),
    "gpu_batches": ("gpu_batches", "Batches of decode tasks that the device was given."),
    "gpu_late_batches": ("gpu_late_batches", "Batches that the device did not finish in time."),
    "gpu_tile_bytes": ("gpu_tile_bytes", "Bytes of K and V that the device's decode tasks attended to."),
    "gpu_link_bytes": ("gpu_link_bytes", "The part of it that the device read in host memory."),
    "gpu_staged_tiles": ("gpu_staged_tiles", "Tiles that the device gathered before it attended to them."),
    "gpu_hot_hits": ("gpu_hot_hits", "Tiles that the device read in its own memory."),
    "gpu_hot_misses": ("gpu_hot_misses", "Tiles that it looked for there and did not find."),
    "gpu_hot_evictions": ("gpu_hot_evictions", "Tiles that had to leave the device's memory for others."),
}
"""The engine's statistic -> name and text of its counter."""
_SECONDS = {
    "device_wait_ns": (
        "device_wait_seconds",
        "Time that the device waited for the CPU's part of layers: it stood idle.",
    ),
    "device_step_ns": (
        "device_step_seconds",
        "Time of decode steps on the device, from the first layer's queries to the last layer's attention.",
    ),
}
"""A statistic in nanoseconds -> name and text of its counter."""
_GAUGES = {
    "host_pool_tokens": "Capacity of the host pool in tokens.",
    "host_pool_bytes": "Bytes of the host pool: tiles, metadata and moments.",
    "resident_tokens_per_request": "Most tokens of a request that stay on the device.",
}
_STATE = ("policy_state_bytes", "Memory that policies remember requests in.")


def described() -> dict[str, str]:
    """What every metric counts, by its name on `/metrics`."""
    counters = {"tasks": _TASKS_TEXT, **dict(_COUNTERS.values()), **dict(_SECONDS.values())}
    gauges = {**_GAUGES, _STATE[0]: _STATE[1]}
    return {f"fluxion_{name}_total": text for name, text in counters.items()} | {
        f"fluxion_{name}": text for name, text in gauges.items()
    }


class EngineMetrics:
    """Turns the engine's cumulative statistics into counters `fluxion_*_total` and gauges `fluxion_*`.

    Processes of one server share the counters through prometheus_client's multiprocess directory, so tensor-parallel
    ranks add up. Import and construct only after SGLang has set that directory.
    """

    def __init__(self, *, host_pool_tokens: int, host_pool_bytes: int, resident_tokens_per_request: int) -> None:
        from prometheus_client import Counter, Gauge

        self._counters = {stat: Counter(f"fluxion_{name}", text) for stat, (name, text) in _COUNTERS.items()}
        self._seconds = {stat: Counter(f"fluxion_{name}", text) for stat, (name, text) in _SECONDS.items()}
        self._tasks = Counter("fluxion_tasks", _TASKS_TEXT, ["executor"])
        values = {
            "host_pool_tokens": host_pool_tokens,
            "host_pool_bytes": host_pool_bytes,
            "resident_tokens_per_request": resident_tokens_per_request,
        }
        for name, text in _GAUGES.items():
            # Every rank has a pool of its own bytes; tokens are the same for all.
            mode: Literal["livesum", "livemostrecent"] = "livesum" if name.endswith("_bytes") else "livemostrecent"
            Gauge(f"fluxion_{name}", text, multiprocess_mode=mode).set(values[name])
        self._state = Gauge(f"fluxion_{_STATE[0]}", _STATE[1], multiprocess_mode="livesum")
        self._last: dict[str, int] = {}

    def update(self, stats: Mapping[str, int], state_bytes: int = 0) -> None:
        """Publish the growth since the last call; `stats` are the engine's cumulative statistics."""
        self._state.set(state_bytes)
        for name, value in stats.items():
            growth = value - self._last.get(name, 0)
            if growth <= 0:
                continue
            if name.startswith(_TASKS):
                self._tasks.labels(executor=name.removeprefix(_TASKS)).inc(growth)
            elif name in self._counters:
                self._counters[name].inc(growth)
            elif name in self._seconds:
                self._seconds[name].inc(growth * 1e-9)
        self._last = dict(stats)
