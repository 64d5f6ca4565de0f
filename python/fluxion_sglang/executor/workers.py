"""Chooses number and cores of the CPU worker threads (`csrc/runtime/worker_pool.h`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.native import Workers, topology

T = TypeVar("T")


@dataclass(frozen=True)
class Beside:
    """Other threads that share the cores with the workers.

    Attributes:
        busy: threads of this rank that need a core each, without the calling thread.
        spin_us: as for `Workers`.
    """

    busy: int = 0
    spin_us: int | None = None


ALONE = Beside()


def create_workers(config: FluxionConfig, rank: int = 0, ranks: int = 1, beside: Beside = ALONE) -> Workers:
    """Create the worker pool of `config`. The default is one thread a core, physical cores first, limited by the
    control group's CPU time, minus the threads in `beside`.

    The calling thread counts as a worker and is never pinned. The others are pinned to this rank's share of
    `config.cores`, in the order given, or of the cores that the process may use. If a quota leaves some of these cores
    without a worker, no thread is pinned: another container on the machine would pin its threads to the same cores.

    Args:
        rank, ranks: this process among those that share the machine's cores, rank < ranks.
        beside: other busy threads; subtracted unless `config.workers` gives a number.
    """
    machine = topology()
    named = config.core_list()
    cores = share_of(named, rank, ranks) if named else share_of_machine(machine, rank, ranks)
    fitting = within_quota(len(cores), float(machine["cpu_quota"]), ranks)
    count = config.workers or max(fitting - beside.busy, 1)
    pinned = bool(named) or fitting == len(cores)
    return Workers(count, torch.tensor(cores, dtype=torch.int32), beside.spin_us, pinned)


def within_quota(cores: int, quota: float, ranks: int) -> int:
    """Number of threads of a rank with `cores` cores. quota: CPU time of all ranks in cores; below 0: unlimited.

    More threads than the quota would all be throttled for the rest of every period (100 ms).
    """
    return cores if quota < 0 else min(cores, max(int(quota / ranks), 1))


def share_of(cores: Sequence[T], rank: int, ranks: int) -> Sequence[T]:
    """The share of one rank of `ranks`: equal shares, and no core for two ranks unless there are too few."""
    share = len(cores) // ranks
    return cores[rank * share : (rank + 1) * share] or [cores[rank % len(cores)]]


def share_of_machine(machine: Mapping[str, Any], rank: int, ranks: int, root: Path = Path("/")) -> Sequence[int]:
    """The share of one rank of the machine: whole physical cores, grouped by NUMA node, first hardware threads first.

    Args:
        machine: the result of `topology`. root: root of its /sys.
    """
    node = {core: node["id"] for node in machine["numa"] for core in node["cores"]}
    threads: dict[int, list[int]] = {}  # by physical core
    for core in map(int, machine["cores"]):
        threads.setdefault(_first_thread(core, root), []).append(core)
    physical = sorted(threads.values(), key=lambda of_one: (node.get(of_one[0], 0), of_one[0]))
    if ranks == 1 or len(physical) < ranks:
        return share_of([int(core) for core in machine["cores"]], rank, ranks)
    mine = share_of(physical, rank, ranks)
    return [core for nth in range(max(map(len, mine))) for of_one in mine for core in of_one[nth : nth + 1]]


def _first_thread(core: int, root: Path) -> int:
    """The first hardware thread of a core's physical core; the core itself if /sys does not tell."""
    try:
        siblings = (root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return core
    found = re.match(r"\d+", siblings)
    return int(found[0]) if found else core
