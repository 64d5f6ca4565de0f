"""The CPU executor's threads (`csrc/runtime/worker_pool.h`): how many, and on which cores."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.native import Workers, topology


def create_workers(config: FluxionConfig, rank: int = 0, ranks: int = 1) -> Workers:
    """The worker pool that `config` asks for: by default one thread a core, physical cores first.

    The calling thread counts as a worker and is never pinned; the others are pinned to this rank's share of
    `config.cores`, or of the cores that the process may use.

    Args:
        rank, ranks: this process among those that share the machine's cores, rank < ranks.
    """
    cores = share_of(config.core_list() or [int(core) for core in topology()["cores"]], rank, ranks)
    return Workers(config.workers or len(cores), torch.tensor(cores, dtype=torch.int32))


def share_of(cores: Sequence[int], rank: int, ranks: int) -> Sequence[int]:
    """What one rank has of cores that `ranks` divide: each as many, no core for two unless there are too few."""
    share = len(cores) // ranks
    return cores[rank * share : (rank + 1) * share] or [cores[rank % len(cores)]]
