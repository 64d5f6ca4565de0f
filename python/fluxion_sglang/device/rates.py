"""How fast this machine's CPU and device are at a layer's tasks: measured once, kept in the user's cache folder.

`csrc/device/costs.h` divides a layer by these rates (docs/gpu.md).
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from enum import IntEnum
from pathlib import Path

import torch

from fluxion_sglang import __version__
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.native import Workers, function, probe, topology

logger = logging.getLogger(__name__)

TASK_PAGES = 64
"""Tiles of a timed task: 1024 tokens, some 5% of a middle of 20K."""

TASKS = (1, 2, 4, 8, 16, 32)
"""Sizes of timed batches."""

RUNS = 7
TIMEOUT_S = 10.0
CPU_BYTES = 256 << 20
"""What the CPU reads to be timed, at least: in an order of no use to a cache, and twice what the last caches have."""


@dataclass(frozen=True)
class Rates:
    """Bytes per second, but for `launch_s`; 0: cannot do it.

    Attributes:
        cpu: tiles that the workers attend to, all together; they read metadata as fast.
        link: tiles in host memory that the device attends to. hot: tiles in its own memory.
        launch_s: from a launch to its result, of a batch that reads nothing.
        stage: tiles in host memory that the device gathers into its own before it attends to them. stage_s: launch_s of
            such a batch.
    """

    cpu: float
    link: float
    hot: float
    launch_s: float
    stage: float
    stage_s: float

    def tensor(self) -> torch.Tensor:
        """[6] float64, in the order of the attributes."""
        return torch.tensor(astuple(self), dtype=torch.float64)

    def share(self, tile_bytes: int, metadata_bytes: int, cpu_bytes: int = 0, hits: float = 0.0) -> float:
        """The share of a layer's tiles that the device should read, in [0, 1] (`device_share`).

        Args:
            tile_bytes, metadata_bytes: of the tasks that either may read for; the CPU ranks all of them. cpu_bytes: of
                those that the CPU does in any case. hits: share of the tile bytes that is in the device's memory.
        """
        return float(function("device_share")(tile_bytes, metadata_bytes, cpu_bytes, self.tensor(), hits))


SIMULATED = Rates(cpu=1e9, link=1e9, hot=1e9, launch_s=0.0, stage=0.0, stage_s=0.0)
"""For the simulated device, whose speed means nothing."""


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(fixed seconds, bytes per second) of the line nearest to points (bytes, seconds), by relative distance.

    The fixed part is at least 0. A line that does not rise has an infinite rate.
    """
    # Weighted least squares with weights 1 / seconds: a microsecond counts for more in a short time.
    rows = [(1 / t, n / t) for n, t in points]
    aa, ab, bb = (sum(x * y for x, y in zip(*pair, strict=True)) for pair in _products(rows))
    a1, b1 = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = aa * bb - ab * ab
    fixed = (a1 * bb - b1 * ab) / determinant if determinant > 1e-12 * aa * bb else 0.0
    fixed = max(fixed, 0.0)
    slope = (b1 - fixed * ab) / bb
    return fixed, 1 / slope if slope > 0 else float("inf")


def _products(rows: Sequence[tuple[float, float]]) -> list[tuple[list[float], list[float]]]:
    first, second = [row[0] for row in rows], [row[1] for row in rows]
    return [(first, first), (first, second), (second, second)]


def measure(
    api: int,
    workers: Workers,
    isa: str,
    pinned: Callable[[int], torch.Tensor],
    *,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    flash: bool,
) -> Rates:
    """Time attention on the CPU's workers and on the device; a few seconds.

    Args:
        api: address of the device library's `DeviceApi`.
        pinned: makes memory that the device reads: uint8 of so many bytes.
        group, head_dim, dtype: of the model's attention.
        flash: FlashInfer attends to tiles in device memory, where it has a kernel.

    Raises:
        RuntimeError: the device failed; one sentence.
    """
    tile = 2 * PAGE * head_dim * dtype.itemsize
    tiles = pinned(2 * max(TASKS) * TASK_PAGES * tile).view(dtype).view(-1, 2, PAGE, head_dim)
    tiles.zero_()
    launch_s, link = fit(_device_times(api, tiles, group, tile, Where.IN_PLACE, flash))
    stage_s, stage = fit(_device_times(api, tiles, group, tile, Where.STAGED, flash))
    _, hot = fit(_device_times(api, tiles, group, tile, Where.HOT, flash))
    del tiles
    cpu = _cpu_rate(workers, isa, group, head_dim, dtype)
    return Rates(cpu, link, max(hot, link), launch_s, stage, stage_s)


class Where(IntEnum):
    """From where a timed batch reads its tiles: host memory, device memory, or that after a gather."""

    IN_PLACE = 0
    HOT = 1
    STAGED = 2


def _device_times(
    api: int, tiles: torch.Tensor, group: int, tile: int, where: Where, flash: bool
) -> list[tuple[float, float]]:
    points = []
    for tasks in TASKS:
        q = torch.zeros(tasks, group, tiles.shape[-1], dtype=tiles.dtype)
        ns = torch.empty(RUNS, dtype=torch.int64)
        function("time_attend")(api, q, tiles, TASK_PAGES, int(where), flash, TIMEOUT_S, ns)
        points.append((float(tasks * TASK_PAGES * tile), statistics.median(ns.tolist()) * 1e-9))
    return points


def _cpu_rate(workers: Workers, isa: str, group: int, head_dim: int, dtype: torch.dtype) -> float:
    caches = int(topology()["last_cache_bytes_per_thread"]) * (os.cpu_count() or 1)
    tiles = _many(workers, max(CPU_BYTES, 2 * caches), (2, PAGE, head_dim), dtype)
    pages = torch.randperm(len(tiles), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    pages = pages[: len(pages) // TASK_PAGES * TASK_PAGES]
    tasks = probe.TaskList(pages, torch.arange(0, len(pages) + 1, TASK_PAGES))
    q = torch.zeros(tasks.tasks, group, head_dim, dtype=dtype)
    o, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
    ns = probe.attend(workers, isa, q, head_dim**-0.5, tiles, tasks, o, lse, runs=3)
    return len(pages) * tiles[0].nbytes / (min(ns) * 1e-9)


def _many(workers: Workers, nbytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[n, *shape] in host memory, of at most so many bytes."""
    count = nbytes // (math.prod(shape) * dtype.itemsize)
    memory = probe.host_memory(workers, nbytes).view(dtype)
    return memory[: count * math.prod(shape)].view(count, *shape)


def cache_file() -> Path:
    """Where measurements are kept: under XDG_CACHE_HOME, else ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "fluxion" / "calibration.json"


def cache_key(device: str, workers: int, isa: str, group: int, head_dim: int, dtype: torch.dtype, flash: bool) -> str:
    """What a measurement is good for: this host, device, version, number of workers, shape of a group and kernels."""
    shape = f"{group}x{head_dim}x{str(dtype).removeprefix('torch.')}"
    kernels = "flashinfer" if flash else "fluxion"
    return " | ".join([platform.node(), device, __version__, f"{workers} workers", isa, shape, kernels])


def cached(key: str, measure: Callable[[], Rates], file: Path | None = None) -> Rates:
    """The rates that are kept under a key, or what `measure` returns, which is then kept.

    A file that cannot be read or written costs a measurement, nothing else.
    """
    file = file or cache_file()
    known = _read(file)
    try:
        rates = Rates(**known[key])
    except (KeyError, TypeError):
        pass
    else:
        if all(isinstance(value, float) and value >= 0 for value in astuple(rates)):
            return rates
    start = time.monotonic()
    rates = measure()
    logger.info("Fluxion: measured the CPU and the device in %.1f s: %s", time.monotonic() - start, rates)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Another process may do the same: whoever is last wins, and no reader sees half a file.
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".json", delete=False) as out:
            json.dump({**_read(file), key: asdict(rates)}, out, indent=1)
        os.replace(out.name, file)
    except OSError as error:
        logger.info("Fluxion: the measurement is not kept, because %s cannot be written (%s)", file, error)
    return rates


def _read(file: Path) -> dict[str, dict[str, float]]:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
