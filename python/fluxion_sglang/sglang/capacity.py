"""What of this machine is ours, and what the options make of it: for the launcher and for every rank."""

from __future__ import annotations

import dataclasses
from typing import Any

from fluxion_sglang.config import FluxionConfig


def ranks_on_host(server_args: Any) -> int:
    """Processes of this server on one host that have a host pool: tensor- and pipeline-parallel ranks of all replicas.

    SGLang's own count sees one data-parallel replica, but the replicas start together and share the memory.
    """
    return max(server_args.tp_size * server_args.pp_size * server_args.dp_size // server_args.nnodes, 1)


def rank_on_host(server_args: Any) -> int:
    """This process among `ranks_on_host`, replica by replica. Replicas on several hosts SGLang refuses."""
    import torch
    from sglang.srt.runtime_context import get_parallel

    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    replica = get_parallel().dp_rank or 0  # None: there is no data parallelism
    return (replica * server_args.tp_size * server_args.pp_size + rank) % ranks_on_host(server_args)


def available_bytes(server_args: Any) -> int:
    """Host memory that one rank may take, cgroup limits included."""
    from sglang.srt.mem_cache.host_memory import available_host_memory_bytes

    return available_host_memory_bytes(allow_cgroup_fallback=True) // ranks_on_host(server_args)


def rank_config(server_args: Any) -> FluxionConfig:
    """--fluxion-config for one rank.

    `host_memory_gb` is for all ranks of the host together. `--max-total-tokens`, SGLang's own word for the capacity in
    tokens, is the default of `host_tokens`.
    """
    config = FluxionConfig.parse(server_args.fluxion_config)
    if config.host_memory_gb is not None:
        return dataclasses.replace(config, host_memory_gb=config.host_memory_gb / ranks_on_host(server_args))
    if config.host_tokens is None and server_args.max_total_tokens is not None:
        return dataclasses.replace(config, host_tokens=server_args.max_total_tokens)
    return config
