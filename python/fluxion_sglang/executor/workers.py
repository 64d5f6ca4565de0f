"""The CPU executor's threads (`csrc/runtime/worker_pool.h`): how many, and on which cores."""

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
    """What the workers are beside.

    Attributes:
        busy: threads of this rank's that need a core each, the calling one not counted.
        spin_us: as of `Workers`.
    """

    busy: int = 0
    spin_us: int | None = None


ALONE = Beside()


def create_workers(config: FluxionConfig, rank: int = 0, ranks: int = 1, beside: Beside = ALONE) -> Workers:
    """The worker pool that `config` asks for: by default one thread a core, physical cores first, and no more than the
    control group has CPU time for, less what others need.

    The calling thread counts as a worker and is never pinned; the others are pinned to this rank's share of
    `config.cores`, in the order given, or of the cores that the process may use. Where a quota leaves some of these
    without a worker, nobody is pinned: another container on the machine would pin its own to the same first ones.

    Args:
        rank, ranks: this process among those that share the machine's cores, rank < ranks.
        beside: what leaves them less than that, unless `config.workers` names a number.
    """
    machine = topology()
    named = config.core_list()
    cores = share_of(named, rank, ranks) if named else share_of_machine(machine, rank, ranks)
    fitting = within_quota(len(cores), float(machine["cpu_quota"]), ranks)
    count = config.workers or max(fitting - beside.busy, 1)
    pinned = bool(named) or fitting == len(cores)
    return Workers(count, torch.tensor(cores, dtype=torch.int32), beside.spin_us, pinned)


def within_quota(cores: int, quota: float, ranks: int) -> int:
    """Threads for one of `ranks` that has so many cores. quota: cores' worth of time for all ranks; below 0: any.

    A thread more than the quota would have all of them stopped for the rest of every period (100 ms).
    """
    return cores if quota < 0 else min(cores, max(int(quota / ranks), 1))


def share_of(cores: Sequence[T], rank: int, ranks: int) -> Sequence[T]:
    """What one rank has of cores that `ranks` divide: each as many, no core for two unless there are too few."""
    share = len(cores) // ranks
    return cores[rank * share : (rank + 1) * share] or [cores[rank % len(cores)]]


def share_of_machine(machine: Mapping[str, Any], rank: int, ranks: int, root: Path = Path("/")) -> Sequence[int]:
    """What one rank has of all cores: whole physical ones, those of a NUMA node together, their first threads first.

    Args:
        machine: as `topology` says. root: where its /sys is.
    """
    node = {core: node["id"] for node in machine["numa"] for core in node["cores"]}
    threads: dict[int, list[int]] = {}  # of each physical core
    for core in map(int, machine["cores"]):
        threads.setdefault(_first_thread(core, root), []).append(core)
    physical = sorted(threads.values(), key=lambda of_one: (node.get(of_one[0], 0), of_one[0]))
    if ranks == 1 or len(physical) < ranks:
        return share_of([int(core) for core in machine["cores"]], rank, ranks)
    mine = share_of(physical, rank, ranks)
    return [core for nth in range(max(map(len, mine))) for of_one in mine for core in of_one[nth : nth + 1]]


def _first_thread(core: int, root: Path) -> int:
    """The first hardware thread of a core's physical core; the core itself where /sys does not say."""
    try:
        siblings = (root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return core
    found = re.match(r"\d+", siblings)
    return int(found[0]) if found else core
