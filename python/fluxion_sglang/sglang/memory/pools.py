"""Pool hooks: SGLang's logical token space gets the size of the host pool, and its KV pool is replaced.

The stock paged allocator and the stock radix tree run in that space unchanged. Logical page id = host page id.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.models.utils import get_token_to_kv_pool
from sglang.srt.runtime_context import get_context, get_disagg, get_parallel, get_schedule, get_spec

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.executor.device import maker_of
from fluxion_sglang.executor.workers import ALONE, create_workers
from fluxion_sglang.kv.host_pool import GIB, HostPool, KVShape
from fluxion_sglang.kv.landing import LandingZone
from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.kv.windows import Windows
from fluxion_sglang.sglang.memory import capacity, transfer
from fluxion_sglang.sglang.memory.sizing import Turn
from fluxion_sglang.sglang.start import served_models
from fluxion_sglang.sglang.start.options import rank_options

if TYPE_CHECKING:
    from fluxion_sglang.sglang.memory.disk import DiskLinker

logger = logging.getLogger(__name__)

CPU_WINDOW_FRACTION = 0.05
"""Largest share of the available memory for windows if host and device memory are the same."""

_turn = Turn()
"""This process's turn to measure memory."""


class FluxionKVPool(KVCache):
    """SGLang's KV pool: a host pool with every token, and device windows with the residents.

    SGLang addresses KV by logical slot; only Fluxion's attention backend knows where a slot lives. Every method that
    would expose or write device buffers by slot therefore raises an error.
    """

    def __init__(
        self,
        shape: KVShape,
        tokens: int,
        rows: int,
        config: FluxionConfig,
        device: str,
        start_layer: int,
        rank: int,
        ranks: int,
    ) -> None:
        super().__init__(
            size=tokens,
            page_size=PAGE,
            dtype=shape.dtype,
            layer_num=shape.layers,
            device=device,
            enable_memory_saver=False,
            start_layer=start_layer,
            end_layer=start_layer + shape.layers - 1,
        )
        self.config = config
        self.head_num = shape.kv_heads
        self.head_dim = self.v_head_dim = shape.head_dim
        placement = Placement(config.sinks, config.window)
        self.maker = maker_of(device)
        if self.maker is not None:
            self.maker.select()  # this rank's device, chosen by SGLang
        beside = ALONE if self.maker is None else self.maker.beside()
        workers = create_workers(config, rank, ranks, beside)
        self.host = HostPool(shape, tokens, placement, workers, canary=config.canary)
        self.windows = Windows(self.host, rows, device)
        if self.maker is not None:
            # Before any executor exists: a device's executor reads the pool at once.
            self.maker.adopt(self.host)
        self.mem_usage = self.windows.nbytes / GIB
        # For `disk`: everything that KV depends on, and a sample of the weights.
        self.manifest: Callable[[], dict[str, Any]] | None = None
        self.weights: Callable[[], str] | None = None
        self.disk: DiskLinker | None = None
        self.zone: LandingZone | None = None

    def get_kv_size_bytes(self) -> tuple[int, int]:
        half = self.windows.nbytes // 2
        return half, half

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what} is not possible with --enable-fluxion: KV lives in the host pool, which only the fluxion "
            "attention backend addresses; start the server without the feature that asked for it."
        )

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        self._refuse("Reading a device key buffer")

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        self._refuse("Reading a device value buffer")

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._refuse("Reading device KV buffers")

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
        self._refuse("Writing KV by slot")

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Buffers into which a prefill server writes: keys of all layers, then values. Called on both sides of a
        transfer.

        Returns:
            Addresses, bytes, and bytes of a page.
        """
        if self.zone is None:
            self._refuse("Sending KV to another server")
        buffers = [*self.zone.keys, *self.zone.values]
        return (
            [buffer.data_ptr() for buffer in buffers],
            [buffer.nbytes for buffer in buffers],
            [buffer[0].nbytes for buffer in buffers],
        )

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> torch.Tensor:
        """The tiles of a retracted request that no prefill restores, [layers, H, pages, bytes] uint8.

        Args:
            indices: slots of all its tokens.
        """
        return self.host.stored[:, :, self._pages(indices).long()]

    def load_cpu_copy(
        self, kv_cache_cpu: torch.Tensor, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> None:
        """Restore the tiles from `get_cpu_copy` to the request's current pages, and compute their metadata."""
        pages = self._pages(indices)
        self.host.forget_sums(pages)  # drop checksums of slots after the request's last token
        self.host.stored[:, :, pages.long()] = kv_cache_cpu
        for layer in range(self.layer_num):
            self.host.adopt(layer, pages, 0, len(indices), described=False)

    @staticmethod
    def _pages(slots: torch.Tensor) -> torch.Tensor:
        return (slots[::PAGE] // PAGE).to(torch.int32).cpu()


def _shape(configurator: Any, config: FluxionConfig) -> KVShape:
    model = configurator.model_config
    parallel = get_parallel()
    layers = configurator.layer_info.num_effective_layers
    if served_models.has_states(model):  # always in one pipeline stage
        layers = len(served_models.attention_layers(model))
    return KVShape(
        layers=layers,
        kv_heads=model.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size),
        head_dim=model.head_dim,
        dtype=configurator.kv_cache_dtype,
        int8=config.int8,
        sketched=config.sketched and get_spec().speculative_algorithm is None,  # drafts are verified without sketches
    )


def least_over_ranks(value: int) -> int:
    """The smallest value of all ranks, because all must present the same logical space to the scheduler."""
    if get_parallel().launch_world_size > 1:
        tensor = torch.tensor(value, dtype=torch.int64)
        torch.distributed.all_reduce(
            tensor, op=torch.distributed.ReduceOp.MIN, group=get_parallel().world_group.cpu_group
        )
        value = int(tensor.item())
    return value


def resolve_memory_pool_config(original: Callable[..., Any], configurator: Any, pre_model_load_memory: int) -> Any:
    """AROUND KVCacheConfigurator._resolve_memory_pool_config: capacity in host tokens, and rows that fit the device."""
    if configurator.is_draft_worker:
        return original(configurator, pre_model_load_memory)
    config = rank_options(configurator.server_args)
    shape = _shape(configurator, config)
    placement = Placement(config.sinks, config.window)
    _begin_sizing(configurator)
    available = capacity.available_bytes(configurator.server_args)
    states = _plan_states(configurator, config, shape, available)
    resolved = original(configurator, pre_model_load_memory)

    arriving, beside = 0, ""
    if transfer.receives(configurator.server_args):
        # Requests whose KV is arriving have rows, too. The zone has room for the longest of them.
        arriving = get_disagg().disaggregation_decode_extra_slots or 0
        zone = _zone_pages(configurator, capacity.plan_tokens(config, shape, available))
        available -= LandingZone.nbytes(shape, zone)
        beside = f", beside a landing zone of {LandingZone.nbytes(shape, zone) / GIB:.2f} GiB for {zone * PAGE} tokens"

    # SGLang's own figure, for a pool that holds all KV, is the number of tokens that fit the device.
    # Rows are one more than requests: row 0 is SGLang's padding.
    room, each = resolved.max_total_num_tokens, placement.slots
    if (maker := maker_of(configurator.device)) is None:
        if config.hot_tiles_gb > 0:
            raise ConfigError(
                f"hot_tiles_gb is {config.hot_tiles_gb:g}, but the CPU is the device and there is no GPU that keeps "
                "tiles; serve with --device cuda or leave hot_tiles_gb out."
            )
    else:
        longest = capacity.plan_tokens(config, shape, available)
        room -= maker.reserved_tokens(shape, config, longest)
        model = configurator.model_config
        group = model.num_attention_heads // get_parallel().attn_tp_size // shape.kv_heads
        each += maker.request_tokens(shape, config, group, min(model.context_len, longest))
    rows, limit = room // each - 1, "--mem-fraction-static or --max-total-tokens"
    if config.hot_tiles_gb > 0:
        limit += ", or have the GPU keep less (host_tokens, hot_tiles_gb)"
    if configurator.device == "cpu":
        fitting = int(available * CPU_WINDOW_FRACTION) // shape.window_bytes(placement) - 1
        rows, limit = min((rows, limit), (fitting, "the free memory"))
        available -= (min(rows, resolved.max_running_requests + arriving) + 1) * shape.window_bytes(placement)
    rows -= arriving
    if rows < 1 <= rows + arriving:
        raise ConfigError(
            f"the device has room for the sinks and windows of {rows + arriving} requests, and {arriving} rows are for "
            "those whose KV is arriving; lower --disaggregation-decode-extra-slots or --max-running-requests."
        )
    if rows < 1:
        raise ConfigError(
            f"the device has no room for the sinks and window ({placement.slots} tokens) of a single request; lower "
            f"sinks or window in --fluxion-config, or raise {limit}."
        )
    try:
        tokens = least_over_ranks(capacity.plan_tokens(config, shape, available, states))
    except ConfigError as error:
        raise ConfigError(f"{str(error).removesuffix('.')}{beside}.") from None
    resolved.max_running_requests = least_over_ranks(min(resolved.max_running_requests, rows))
    resolved.max_total_num_tokens = tokens
    logger.info(
        "Fluxion: host pool of %d tokens, %.2f GiB (KV and all that describes it); largest context %d tokens; "
        "device windows of %d tokens for %d requests, %.1f MiB%s; policy %s",
        tokens,
        shape.pool_bytes(tokens) / GIB,
        min(tokens, configurator.model_config.context_len),
        placement.slots,
        resolved.max_running_requests,
        (resolved.max_running_requests + arriving + 1) * shape.window_bytes(placement) / 2**20,
        beside,
        config.policy,
    )
    return resolved


def _plan_states(configurator: Any, config: FluxionConfig, shape: KVShape, available: int) -> int:
    """Tell SGLang the number of states, unless the operator sets it. Returns the bytes of all states."""
    if not served_models.has_states(configurator.model_config):
        return 0
    each = configurator.mambaish_config.mamba2_cache_params.mamba_cache_per_req
    states = get_schedule().max_mamba_cache_size
    if states is None:
        least = configurator._calculate_mamba_ratio()
        states = least_over_ranks(capacity.plan_states(config, shape, available, each, least))
        get_context().override("fluxion.states", max_mamba_cache_size=states)
    taken: int = (states + 1) * each
    logger.info(
        "Fluxion: %d states of requests and of prefixes, %.2f GiB (%.1f MiB each)", states, taken / GIB, each / 2**20
    )
    return taken


def _zone_pages(configurator: Any, tokens: int) -> int:
    """Pages of a landing zone for the longest request, if the host pool has `tokens`."""
    return -(-min(configurator.model_config.context_len, tokens) // PAGE)


def build_token_to_kv_pool(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    """AROUND KVCacheConfigurator._build_token_to_kv_pool: our pool in place of a device-sized one."""
    if configurator.is_draft_worker:
        return original(configurator, **kwargs)
    config = rank_options(configurator.server_args)
    pool = FluxionKVPool(
        _shape(configurator, config),
        kwargs["sizes"].max_total_num_tokens,
        # Row 0 is SGLang's padding row, to which padded batches write.
        rows=kwargs["req_to_token_pool"].req_to_token.shape[0],
        config=config,
        device=str(configurator.device),
        start_layer=configurator.layer_info.start_layer,
        rank=capacity.rank_on_host(configurator.server_args),
        ranks=capacity.ranks_on_host(configurator.server_args),
    )
    if transfer.receives(configurator.server_args):
        pool.zone = LandingZone(pool.host.shape, _zone_pages(configurator, pool.size))
        transfer.install(pool.zone)
    _end_sizing()
    return pool


def _begin_sizing(configurator: Any) -> None:
    """Until `_end_sizing`, keep other servers of this machine from measuring memory (`sizing.py`).

    The ranks of a server measure together, in the turn of the first one on each host. Replicas of data parallelism are
    independent processes; those after the first do not wait.
    """
    if capacity.rank_on_host(configurator.server_args) == 0:
        _turn.wait()
    least_over_ranks(0)  # a barrier: the first rank has its turn


def _end_sizing() -> None:
    least_over_ranks(0)  # a barrier: all ranks have their memory
    _turn.end()


def enable_fused_set_kv_buffer(original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """AROUND models.utils.enable_fused_set_kv_buffer: keep rope kernels from writing our KV by logical slot."""
    pool = get_token_to_kv_pool()
    return False if isinstance(pool, FluxionKVPool) else original(*args, **kwargs)
