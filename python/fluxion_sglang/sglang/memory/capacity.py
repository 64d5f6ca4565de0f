"""What of this machine is ours, and what the options make of it: for the launcher and for every rank."""

from __future__ import annotations

import bisect
from typing import Any

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.kv.host_pool import GIB, MAX_PAGES, KVShape
from fluxion_sglang.kv.placement import PAGE, Placement

AUTO_FRACTION = 0.5
"""Share of the available host memory that the pool takes when the user names no size."""

EXPLICIT_FRACTION = 0.9
"""Share of the available host memory that a size named by the user may take; the rest keeps the process alive."""

STATES_FRACTION = 1 / 3
"""Share of the memory for KV and states that states take, where a model has layers with states."""

SUMS, SKETCH_SUM = 16 * 8 + 15, 8
"""Bytes beside the pool that the option `canary` takes for a page of a KV head in a layer: a sum of 8 bytes for every
token, and for every entry of metadata; and for a sketch, where the pool has them (`csrc/runtime/canary.cc`)."""


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


def set_lengths(scheduler: Any) -> None:
    """Let requests be as long as the model's context and the pool have room for.

    SGLang admits a request only where the pool has a page more than prompt and answer need, and its limits leave that
    page out: a prompt a little shorter than the pool would wait for ever. Of an answer that fills the context they take
    two tokens. The row of a request has four places more than the context; drafts need them.
    """
    longest = scheduler.max_req_len
    if scheduler.spec_algorithm.is_none():
        longest = scheduler.model_config.context_len + 1  # from this SGLang takes one, and the prompt
    scheduler.max_req_len = min(longest, scheduler.max_total_num_tokens - PAGE)
    scheduler.max_req_input_len = min(scheduler.max_req_input_len, scheduler.max_req_len - 1)


def plan_states(config: FluxionConfig, shape: KVShape, available: int, each: int, least: int) -> int:
    """How many states there is room for beside the host pool, of running requests and of prefixes.

    Beside a pool of `host_tokens` they are as many as eight requests need, at least.

    Args:
        available: as of `plan_tokens`. each: bytes of a state. least: states that one request needs.

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
    states = int(whole * STATES_FRACTION) // each - 1  # SGLang's padding has one as well
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
        available: bytes of host memory this process may take (cgroup limits and other ranks on the host considered).
        states: bytes of states beside the pool, which come out of the same memory.

    Raises:
        ConfigError: the size asked for does not fit, or no useful pool fits; the sentence names the number that does.
    """

    def fitting(budget: float, beside: int = 0) -> int:
        """Tokens of the largest pool that takes no more, with so many bytes a page beside it."""

        # Page 0 is padding, so a pool of n tokens has n / 16 + 1 pages; the native library says what they take.
        def taken(pages: int) -> int:
            return shape.pool_bytes(pages * PAGE) + beside * (pages + 1)

        return bisect.bisect_right(range(1, MAX_PAGES), budget, key=taken) * PAGE

    sums = (SUMS + SKETCH_SUM * shape.sketched) * shape.layers * shape.kv_heads if config.canary > 0 else 0
    most = fitting(available * EXPLICIT_FRACTION - states, sums)
    floor = Placement(config.sinks, config.window).slots
    if config.host_tokens is not None:
        tokens = config.host_tokens // PAGE * PAGE
        asked = f"host_tokens={config.host_tokens}"
        if tokens <= MAX_PAGES * PAGE:  # more the native library cannot count
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
