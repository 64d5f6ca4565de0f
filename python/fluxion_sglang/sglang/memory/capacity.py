"""Divides this machine's memory according to the options, for the launcher and for every rank."""

from __future__ import annotations

import bisect
from typing import Any

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.kv.host_pool import GIB, MAX_PAGES, KVShape
from fluxion_sglang.kv.placement import PAGE, Placement

AUTO_FRACTION = 0.5
"""The default pool's share of the available host memory."""

EXPLICIT_FRACTION = 0.9
"""Largest share of the available host memory for an explicit size; the rest is for the process itself."""

STATES_FRACTION = 1 / 3
"""Share of the memory for KV and states that goes to states, for models with stateful layers."""

SUMS, SKETCH_SUM = 16 * 8 + 15, 8
"""Bytes beside the pool that the option `canary` takes per page, KV head and layer: 8 bytes for every token and for
every entry of metadata; and for a sketch, if the pool has them (`csrc/runtime/canary.cc`)."""


def ranks_on_host(server_args: Any) -> int:
    """Number of processes with a host pool on one host: tensor- and pipeline-parallel ranks of all replicas.

    SGLang's own count covers one data-parallel replica, but the replicas start together and share the memory.
    """
    return max(server_args.tp_size * server_args.pp_size * server_args.dp_size // server_args.nnodes, 1)


def rank_on_host(server_args: Any) -> int:
    """Index of this process among `ranks_on_host`, replica by replica. SGLang refuses replicas on several hosts."""
    import torch
    from sglang.srt.runtime_context import get_parallel

    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    replica = get_parallel().dp_rank or 0  # None: there is no data parallelism
    return (replica * server_args.tp_size * server_args.pp_size + rank) % ranks_on_host(server_args)


def available_bytes(server_args: Any) -> int:
    """Host memory available to one rank, cgroup limits included."""
    from sglang.srt.mem_cache.host_memory import available_host_memory_bytes

    return available_host_memory_bytes(allow_cgroup_fallback=True) // ranks_on_host(server_args)


def set_lengths(scheduler: Any) -> None:
    """Raise the length limits of requests to the model's context and the pool's room.

    SGLang admits a request only if the pool has a page more than prompt and answer need. Its limits ignore that page,
    so a prompt a little shorter than the pool would wait forever. Its limits also cut two tokens of an answer that
    fills the context. The row of a request has four places more than the context; drafts need them.
    """
    longest = scheduler.max_req_len
    if scheduler.spec_algorithm.is_none():
        longest = scheduler.model_config.context_len + 1  # SGLang subtracts one, and the prompt
    scheduler.max_req_len = min(longest, scheduler.max_total_num_tokens - PAGE)
    scheduler.max_req_input_len = min(scheduler.max_req_input_len, scheduler.max_req_len - 1)


def plan_states(config: FluxionConfig, shape: KVShape, available: int, each: int, least: int) -> int:
    """Number of states, of running requests and of prefixes, that fit beside the host pool.

    Beside a pool of `host_tokens` there are at least as many as eight requests need.

    Args:
        available: as for `plan_tokens`. each: bytes of a state. least: states that one request needs.

    Raises:
        ConfigError: there is no room for one request.
    """
    if config.host_tokens is not None:
        pool = shape.pool_bytes(config.host_tokens // PAGE * PAGE)
        whole = max(pool / (1 - STATES_FRACTION), (8 * least + 1) * each / STATES_FRACTION)
        asked = f"host_tokens={config.host_tokens}"
    elif config.host_memory_gb is not None:
        whole, asked = config.host_memory_gb * GIB, f"host_memory_gb={config.host_memory_gb:g}"
    else:
        whole, asked = available * AUTO_FRACTION, "the default host pool"
    states = int(whole * STATES_FRACTION) // each - 1  # SGLang's padding takes one
    if states < least:
        raise ConfigError(
            f"{asked} leaves room for {max(states, 0)} states of this model, {each / 2**20:.1f} MiB each, and one "
            f"request needs {least}; pass host_memory_gb={(least + 1) * each / STATES_FRACTION / GIB:.3f} or more, or "
            "--max-mamba-cache-size."
        )
    return states


def plan_tokens(config: FluxionConfig, shape: KVShape, available: int, states: int = 0) -> int:
    """Capacity of the host pool in tokens, a multiple of 16.

    Args:
        available: bytes of host memory for this process (cgroup limits and other ranks on the host considered).
        states: bytes of states beside the pool, from the same memory.

    Raises:
        ConfigError: the requested size does not fit, or no useful pool fits; the sentence gives the largest that does.
    """

    def fitting(budget: float, beside: int = 0) -> int:
        """Tokens of the largest pool within `budget` bytes, if each page takes `beside` more bytes."""

        # Page 0 is padding, so a pool of n tokens has n / 16 + 1 pages; the native library computes their size.
        def taken(pages: int) -> int:
            return shape.pool_bytes(pages * PAGE) + beside * (pages + 1)

        return bisect.bisect_right(range(1, MAX_PAGES), budget, key=taken) * PAGE

    sums = (SUMS + SKETCH_SUM * shape.sketched) * shape.layers * shape.kv_heads if config.canary > 0 else 0
    most = fitting(available * EXPLICIT_FRACTION - states, sums)
    floor = Placement(config.sinks, config.window).slots
    if config.host_tokens is not None:
        tokens = config.host_tokens // PAGE * PAGE
        asked = f"host_tokens={config.host_tokens}"
        if tokens <= MAX_PAGES * PAGE:  # the native library cannot count more
            asked += f" needs {shape.pool_bytes(tokens) / GIB:.2f} GiB of host memory"
    elif config.host_memory_gb is not None:
        tokens = fitting(config.host_memory_gb * GIB - states)
        asked = f"host_memory_gb={config.host_memory_gb:g}"
        if tokens < floor:
            raise ConfigError(
                f"{asked} holds only {tokens} tokens of this model, fewer than one request's sinks and window "
                f"({floor}); pass at least {shape.pool_bytes(floor) / GIB:.3f}."
            )
    else:
        tokens, asked = fitting(available * AUTO_FRACTION - states), "the default host pool"
    if tokens > most:
        raise ConfigError(
            f"{asked}, but only {available / GIB:.2f} GiB are available to this process; "
            f"pass host_tokens={most} or less."
        )
    if tokens < floor:
        raise ConfigError(
            f"{asked} would hold {tokens} tokens, fewer than one request's sinks and window ({floor}), because only "
            f"{available / GIB:.2f} GiB of host memory are available; free memory, lower window, or use another model."
        )
    return tokens
