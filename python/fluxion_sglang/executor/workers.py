"""The CPU executor's threads (`csrc/runtime/worker_pool.h`): how many, and on which cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.native import Workers, topology


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
    `config.cores`, or of the cores that the process may use.

    Args:
        rank, ranks: this process among those that share the machine's cores, rank < ranks.
        beside: what leaves them less than that, unless `config.workers` names a number.
    """
    machine = topology()
    cores = share_of(config.core_list() or [int(core) for core in machine["cores"]], rank, ranks)
    count = config.workers or max(within_quota(len(cores), float(machine["cpu_quota"]), ranks) - beside.busy, 1)
    return Workers(count, torch.tensor(cores, dtype=torch.int32), beside.spin_us)


def within_quota(cores: int, quota: float, ranks: int) -> int:
    """Threads for one of `ranks` that has so many cores. quota: cores' worth of time for all ranks; below 0: any.

    A thread more than the quota would have all of them stopped for the rest of every period (100 ms).
    """
    return cores if quota < 0 else min(cores, max(int(quota / ranks), 1))


def share_of(cores: Sequence[int], rank: int, ranks: int) -> Sequence[int]:
    """What one rank has of cores that `ranks` divide: each as many, no core for two unless there are too few."""
    share = len(cores) // ranks
    return cores[rank * share : (rank + 1) * share] or [cores[rank % len(cores)]]
