"""The CPU executor: native threads that pull tasks without Python (`csrc/runtime`)."""

from __future__ import annotations

import os

import torch

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.native import Workers


def create_workers(config: FluxionConfig) -> Workers:
    """The worker pool that `config` asks for: by default one thread a core that this process may run on.

    The calling thread counts as a worker and is never pinned; the others are pinned to `config.cores`, or to the
    process's own cores.
    """
    cores = config.core_list() or sorted(os.sched_getaffinity(0))
    count = config.workers or len(cores)
    return Workers(count, torch.tensor(cores, dtype=torch.int32))
