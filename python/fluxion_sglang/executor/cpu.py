"""The CPU executor: native threads that pull tasks without Python (`csrc/runtime`)."""

from __future__ import annotations

import torch

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.native import Workers, topology


def create_workers(config: FluxionConfig, rank: int = 0, ranks: int = 1) -> Workers:
    """The worker pool that `config` asks for: by default one thread a core, physical cores first.

    The calling thread counts as a worker and is never pinned; the others are pinned to `config.cores`, or to this
    rank's share of the cores that the process may use.

    Args:
        rank, ranks: this process among those that share the machine's cores.
    """
    cores = config.core_list()
    if not cores:
        allowed = [int(core) for core in topology()["cores"]]
        share = max(len(allowed) // ranks, 1)
        first = rank % ranks * share
        cores = allowed[first : first + share] or allowed
    return Workers(config.workers or len(cores), torch.tensor(cores, dtype=torch.int32))
