"""The attention backend: maps SGLang's forward passes to extends and decode steps over the host pool."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.runtime_context import get_parallel, get_spec

from fluxion_sglang import plugins
from fluxion_sglang.config import OBSERVERS
from fluxion_sglang.executor.accounts import StepAccounts
from fluxion_sglang.executor.decode import DecodeEngine
from fluxion_sglang.executor.device import Device
from fluxion_sglang.executor.histograms import ReadHistograms
from fluxion_sglang.executor.host import HostDevice
from fluxion_sglang.executor.metrics import EngineMetrics, Kept
from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.kv.page_table import page_table
from fluxion_sglang.native import CorruptMemory, NativeLayers
from fluxion_sglang.policy import Policy, parse_spec
from fluxion_sglang.policy.base import TOLD
from fluxion_sglang.sglang.containment.passes import FailureGuard
from fluxion_sglang.sglang.memory.pools import FluxionKVPool
from fluxion_sglang.sglang.requests import predictors
from fluxion_sglang.sglang.requests.requests import RequestPolicies
from fluxion_sglang.sglang.requests.rows import watch
from fluxion_sglang.sglang.start import served_models
from fluxion_sglang.sglang.steps import stand_ins, states
from fluxion_sglang.sglang.steps.graphs import StepGraphs, backbone_of
from fluxion_sglang.sglang.steps.layers import Contained, install
from fluxion_sglang.sglang.steps.replays import Replays, variant_of
from fluxion_sglang.sglang.steps.speculation import tree_bits

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A request of an extend pass.

    Attributes:
        place: batch index.
        policy: its own, or None. wishes: its recording wishes, or None.
        rides: it decodes one token in a prefill pass of others (a mixed chunk), on a device that computes such passes
            as prefills.
    """

    place: int
    request: ExtendRequest
    policy: Policy | None
    rides: bool
    wishes: Mapping[str, Any] | None


class FluxionAttnBackend(AttentionBackend):
    """Exact extend over a prefix in the host pool; decode by policy.

    Page tables are built in `init_forward_metadata` for one forward pass only: between passes SGLang may rebind a
    request's row to other pages that hold the same tokens.
    """

    _places: Sequence[int] = ()
    """In an extend pass, the batch index of each request by its number on the device (`HostDevice`)."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, FluxionKVPool):
            raise RuntimeError(
                f"the fluxion attention backend got a {type(pool).__name__} instead of the host pool, so the pool hook "
                "did not apply; run `fluxion doctor` and check that fluxion-sglang matches this SGLang version."
            )
        layers = served_models.check_attention_layers(runner.model, beside_device=pool.maker is not None)
        served_models.check_recorded(pool.config, layers, runner.model_config)
        draft = None if runner.spec_algorithm.is_none() else get_spec().speculative_num_draft_tokens
        served_models.check_windows(draft, layers)
        self._places_of = _places(layers, pool.host.shape.layers)
        # Models read these two attributes of a backend (sglang.srt.model_executor.forward_context).
        self.token_to_kv_pool = pool
        self.req_to_token_pool = runner.req_to_token_pool
        options = pool.config
        context = predictors.context(options, runner)
        policy = predictors.server_policy(options, context)
        predictors.check_ranks(policy, options, runner)
        if draft is not None and not policy.exact:
            policy = _verifying(policy)
        identity, heads = partial(predictors.identity, options, runner), layers[0].tp_q_head_num
        self.engine = DecodeEngine(
            pool.host,
            pool.windows,
            policy,
            [],
            options,
            q_heads=heads,
            # Initial capacities; the engine grows on demand.
            max_requests=min(self.req_to_token_pool.size, 64),
            max_tokens=min(self.req_to_token_pool.max_context_len, pool.size, 1 << 16),
            first_layer=0 if served_models.has_states(runner.model_config) else pool.start_layer,
            first_head=get_parallel().attn_tp_rank * heads,
        )
        if options.disk is not None:
            from fluxion_sglang.sglang.memory import disk  # its names in SGLang are checked if the option is used

            pool.manifest = partial(disk.manifest, runner, pool)
            pool.weights = partial(disk.weights_digest, runner.model, whole=False)
        for name in OBSERVERS:
            if getattr(options, name) is not None:
                self.engine.observers.append(plugins.load(plugins.OBSERVERS, name)(self.engine, options, identity))
        self.device = self._device(runner, layers)
        self.failures = FailureGuard(self._finish, self.device.abort, self._publish)
        self.engine.corrupt = self._lose
        self.graphs = self._other_layers(runner) if pool.maker is None else None
        self.metrics: EngineMetrics | None = None
        if runner.server_args.enable_metrics:
            self.metrics = EngineMetrics(
                host_pool_tokens=pool.size,
                host_pool_bytes=pool.host.nbytes,
                resident_tokens_per_request=pool.host.placement.slots,
                kept=self._kept_accounts(runner, layers, timed=options.audit is None),
            )
            # Insert it before other observers: an audit lets the engine compute each layer again.
            self.engine.observers.insert(0, ReadHistograms(self.engine.native, pool.host.shape))
        self._first = get_parallel().attn_tp_rank == get_parallel().pp_rank == 0
        self._counted = True  # whether the metrics are up to date with the decoded steps
        self._healed = 0
        self._events: dict[str, int] = {}
        self.requests = RequestPolicies(
            policy,
            options.request_policies,
            context,
            options.audit is not None,
            self._check_wishes,
            one=draft is not None,
            canary=options.canary > 0,
            sketched=pool.host.shape.sketched,
            mixes=self.device.mixes,
        )
        self._model, self._weights = runner.model, predictors.norms(runner.model)
        self._predictor = predictors.folder_of(options, runner)
        watch(self.req_to_token_pool, self._ended, self._flushed)
        self._records = options.record is not None
        self._chunks: list[_Chunk] = []

    def _other_layers(self, runner: ModelRunner) -> StepGraphs | None:
        """Replace SGLang's GPU kernels; returns the graphs of decode steps, if the model has them."""
        stand_ins.install()
        pool = self.token_to_kv_pool
        graphs = self._model_kernels(runner) if pool.config.model_kernels != "off" else None
        if served_models.has_states(runner.model_config):
            if graphs is None:
                states.install(Contained(NativeLayers(pool.host.workers), self.failures.run), nullcontext)
            else:
                states.install(graphs.layers, graphs.paused)
        return graphs

    def _model_kernels(self, runner: ModelRunner) -> StepGraphs | None:
        """Run the model's other layers on the native workers. Returns the graphs of its decode steps, or None."""
        pool = self.token_to_kv_pool
        native = Contained(NativeLayers(pool.host.workers), self.failures.run)
        count = install(runner.model, native, pack=not runner.server_args.enable_torch_compile)
        logger.info("Fluxion: %d linear layers run on the native workers", count)
        if pool.config.model_kernels == "on":
            return None
        alone = get_parallel().launch_world_size == 1 and not runner.server_args.enable_lora
        backbone = backbone_of(runner.model)
        if alone and backbone is not None:
            assert isinstance(self.device, HostDevice)
            with_states = states.DecodeStates(runner) if served_models.has_states(runner.model_config) else None
            return StepGraphs(backbone, native, self.failures, Replays(self.device, self._index), with_states)
        why = "it has no part that can be replayed" if alone else "there are several ranks, or adapters"
        logger.info("Fluxion: decode steps of this model run without graphs, because %s", why)
        return None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode = forward_batch.forward_mode
        if mode.is_decode():
            self.failures.run(lambda: self._begin_decode(forward_batch))
        elif mode.is_target_verify():
            self.failures.run(lambda: self._begin_verify(forward_batch))
        elif mode.is_extend():
            self.failures.run(lambda: self._begin_extend(forward_batch))

    def _ended(self, freed: Iterable[int]) -> None:
        """Drop the state of freed rows."""
        for row in freed:
            self.engine.forget(row)

    def _flushed(self) -> None:
        """Warn if the weights have changed: SGLang also flushes after `update_weights_*`."""
        if (weights := predictors.norms(self._model)) == self._weights:
            return
        self._weights = weights
        if self._predictor is not None:
            logger.warning(
                "Fluxion: the model has other weights, and the predictor in %s is that of the old ones; restart the "
                "server, or use a policy that needs none.",
                self._predictor,
            )

    def _check_wishes(self, wishes: object, tokens: int) -> None:
        for observer in self.engine.observers if self._records else ():
            observer.check(wishes, tokens)

    def _kept_accounts(self, runner: ModelRunner, layers: Sequence[RadixAttention], timed: bool) -> Kept:
        """Let the engine keep accounts; without times if an audit computes every layer twice."""
        pool, model = self.token_to_kv_pool, runner.model_config
        shape = pool.host.shape
        accounts = self.engine.accounts = StepAccounts(shape, timed)
        first_head = get_parallel().attn_tp_rank * layers[0].tp_q_head_num
        # With more ranks than KV heads, several ranks hold the same KV head.
        first_group = first_head * int(model.get_total_num_kv_heads()) // int(model.num_attention_heads)
        return Kept(
            accounts.totals,
            layers=[layer.layer_id for layer in layers],
            groups=range(first_group, first_group + shape.kv_heads),
            first=first_head == 0 and pool.start_layer == 0,
        )

    def _device(self, runner: ModelRunner, layers: Sequence[RadixAttention]) -> Device:
        """The device of the passes: the CPU itself, or a device beside the CPU."""
        pool = self.token_to_kv_pool
        if pool.maker is None:
            return HostDevice(pool.host, pool.windows, self.engine, pool.config.prefill_budget)
        device = pool.maker.make(
            pool.host,
            pool.windows,
            self.engine,
            q_heads=layers[0].tp_q_head_num,
            scales=[float(layer.scaling) for layer in layers],
            max_requests=max(runner.max_running_requests, pool.windows.rows),
            max_tokens=min(runner.model_config.context_len, pool.size),
            config=pool.config,
        )
        logger.info("Fluxion: passes run on %s", device.description)
        return device

    def _finish(self) -> None:
        self.device.finish()
        self._publish()

    def _publish(self) -> None:
        events = {
            "failed_passes": self.failures.failed,
            # All ranks refuse and heal the same, and their counters are added up.
            "refused_specs": self.requests.refused if self._first else 0,
            "healed_windows": self._healed if self._first else 0,
        }
        for source in (self.token_to_kv_pool.disk, self.token_to_kv_pool.zone):
            if source is not None:
                events |= source.stats()
        if self.metrics is not None and not (self._counted and events == self._events):
            stats = self.engine.stats() | self.device.stats() | events
            self.metrics.update(stats)
        self._counted, self._events = True, events

    # --- CUDA graphs of decode steps (option cuda_graphs) ---

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to do: the device owns all memory of graphs, with room for the largest batch."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Called before a graph is captured or replayed. Graphs contain only decode steps. They are padded with
        requests whose rows the device ignores."""
        if in_capture:
            self.device.begin_dummy()
            return
        real = forward_batch.batch_size - forward_batch.num_padding
        self.failures.run(lambda: self._begin_decode(forward_batch, real))

    def _lose(self, request: int, sentence: str) -> None:
        """End a request of the pass that read corrupt memory. request: in an extend pass, an index of `_places`."""
        self.failures.lose(self._places[request] if self._places else request, sentence)

    def _begin_decode(self, forward_batch: ForwardBatch, requests: int | None = None) -> None:
        """Begin a decode step of the batch's first `requests`, by default all."""
        self._start()
        there = forward_batch.req_pool_indices[:requests]
        rows = there.cpu()
        if not rows.any():  # only SGLang's padding row: a warm-up
            self.device.begin_dummy()
            return
        lengths = forward_batch.seq_lens_cpu[:requests].to(torch.int64)
        pages = page_table(self.req_to_token_pool.req_to_token, there, int(lengths.max()))
        generations = self.req_to_token_pool.req_generation[rows]
        self._ready_rows(rows, lengths, pages, generations)
        self._counted, self._chunks, self._places = False, [], ()
        self.device.begin_decode(rows, lengths, pages, self.requests.current)
        # Mark before the layers run. If they fail, the row's request ends, and the next one has another generation.
        self.token_to_kv_pool.windows.mark(rows, generations, lengths)

    def _ready_rows(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        pages: torch.Tensor,
        generations: torch.Tensor,
        first: int = 0,
    ) -> None:
        """Prepare files and windows of requests that decode, from batch index `first` (see
        `DecodeEngine.begin_step`)."""
        if (disk := self.token_to_kv_pool.disk) is not None:
            disk.append(pages, lengths[:, None] - 1)
        for i in self.token_to_kv_pool.windows.stale(rows, generations, lengths - 1):
            try:
                self.device.heal(int(rows[i]), int(lengths[i]) - 1, pages[i])
            except CorruptMemory as error:
                self.failures.lose(first + i, str(error))
            self.engine.forget(int(rows[i]))
            self._healed += 1

    def _start(self) -> None:
        """Begin a pass."""
        self._finish()
        for place in self.requests.checks:
            self._check(place)

    def _check(self, request: int) -> None:
        """Check the whole host pool, for a request of the batch that asks for it."""
        checked, found = self.token_to_kv_pool.host.sweep()
        what = "Fluxion: of %d tokens, metadata entries and sketches in the host pool, %s"
        logger.info(what, checked, found or "all are sound")
        if found:
            self.failures.lose(request, " ".join(found))

    def _begin_extend(self, forward_batch: ForwardBatch) -> None:
        self._start()
        rows = forward_batch.req_pool_indices
        lengths = forward_batch.seq_lens_cpu.to(torch.int64)
        pages = page_table(self.req_to_token_pool.req_to_token, rows, int(lengths.max()))
        rows, riding = rows.cpu(), set(self.requests.riding)
        generations = self.req_to_token_pool.req_generation[rows]
        # SGLang puts riders at the end.
        steps = len(riding) if self.device.mixes else 0
        first = len(rows) - steps
        assert not steps or riding == set(range(first, len(rows)))
        gone = set(self.token_to_kv_pool.windows.taken_over(rows[:first], generations[:first]))
        if not steps:
            gone |= riding & set(self.token_to_kv_pool.windows.stale(rows, generations, lengths - 1))
        for i in sorted(gone):
            self.engine.forget(int(rows[i]))
        policies = self.requests.current
        self._chunks = []
        offset = 0
        for i, (start, count) in enumerate(
            zip(forward_batch.extend_prefix_lens_cpu[:first], forward_batch.extend_seq_lens_cpu[:first], strict=True)
        ):
            if rows[i] == 0:  # SGLang's padding row: a warm-up
                offset += int(count)
                continue
            wishes = self.requests.recorded[i] if self._records and self.requests.recorded else None
            policy = None if policies is None else policies[i]
            queries = int(count) if wishes is not None else 0 if i in riding else TOLD
            request = ExtendRequest(int(rows[i]), int(start), int(start + count), offset, pages[i], queries)
            self._chunks.append(_Chunk(i, request, policy, i in riding, wishes))
            offset += int(count)
        self._places = [*range(first, len(rows)), *(chunk.place for chunk in self._chunks)]
        if (disk := self.token_to_kv_pool.disk) is not None:
            for chunk in self._chunks:
                if chunk.rides:
                    disk.append(chunk.request.pages.unsqueeze(0), torch.tensor([[chunk.request.start]]))
                    continue
                try:
                    disk.begin(chunk.request.pages, chunk.request.start, chunk.request.stop)
                except CorruptMemory as error:
                    self.failures.lose(chunk.place, str(error))
        requests = [chunk.request for chunk in self._chunks]
        if steps:
            riders = rows[first:], lengths[first:], pages[first:]
            self._ready_rows(*riders, generations[first:], first)
            self._counted = False
            own = None if policies is None else policies[first:]
            self.device.begin_mixed(requests, self._appended, *riders, own)
        else:
            self.device.begin_extend(requests, self._appended)
        self.token_to_kv_pool.windows.mark(rows, generations, lengths)

    def _begin_verify(self, forward_batch: ForwardBatch) -> None:
        """Begin a pass that verifies a draft of every request: full attention to the draft and all tokens before it.

        A draft's KV is written to the host pool, but its metadata only after the draft is accepted. The rows' windows
        become stale; a decode step without a draft heals them.
        """
        self._start()
        rows = forward_batch.req_pool_indices
        trees = tree_bits(forward_batch.spec_info.custom_mask, len(rows))
        starts, size = forward_batch.seq_lens_cpu.tolist(), trees.shape[1]
        pages = page_table(self.req_to_token_pool.req_to_token, rows, max(starts) + size)
        if (disk := self.token_to_kv_pool.disk) is not None:
            disk.append(pages, forward_batch.seq_lens_cpu[:, None].long() + torch.arange(size))
        self._chunks, self._places = [], ()
        self.device.begin_extend(
            [
                ExtendRequest(int(row), start, start + size, i * size, pages[i], tree=trees[i])
                for i, (row, start) in enumerate(zip(rows.tolist(), starts, strict=True))
            ],
            None,
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        assert save_kv_cache, "the fluxion backend writes KV itself"
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        at, variant = self._index(layer), variant_of(layer, kwargs.get("sinks"))
        out = self.failures.run(lambda: self.device.extend(at, q, k, v, layer.scaling, variant))
        return self._flat(out, q)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        assert save_kv_cache, "the fluxion backend writes KV itself"
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        at, variant = self._index(layer), variant_of(layer, kwargs.get("sinks"))

        def attend() -> torch.Tensor:
            out = self.failures.run(lambda: self.device.decode(at, q, k, v, layer.scaling, variant))
            return self._flat(out, q)

        if self.graphs is None or self.graphs.tracer is None:
            return attend()
        return self.graphs.tracer.own(layer, (q, k, v, kwargs.get("sinks")), attend)

    @staticmethod
    def _flat(out: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor:
        """[T, Hq * D]: the result, or zeros for one that failed."""
        return (torch.zeros_like(q) if out is None else out).flatten(1)

    def _index(self, layer: RadixAttention) -> int:
        """The layer's index in this process's pool."""
        return self._places_of[layer.layer_id]

    def _appended(self, layer: int, index: int, queries: torch.Tensor, scale: float) -> None:
        chunk = self._chunks[index]
        if not chunk.rides:
            self.engine.prefilled(layer, chunk.request.row, chunk.request.stop, queries, chunk.policy)
        if chunk.wishes is not None:
            for observer in self.engine.observers:
                observer.prefilled(layer, chunk.request, chunk.wishes, queries, scale)


def _places(layers: Sequence[RadixAttention], held: int) -> dict[int, int]:
    """The place of each attention layer in a host pool with `held` layers, by the model's number of the layer."""
    if len(layers) != held:
        raise RuntimeError(
            f"the model has {len(layers)} attention layers and the host pool {held}; please report this with the "
            "model's config.json."
        )
    return {layer.layer_id: at for at, layer in enumerate(layers)}


def _verifying(policy: Policy) -> Policy:
    """Replace an inexact policy of a server that verifies drafts."""
    logger.warning(
        "Fluxion: every step of a server that decodes speculatively verifies a draft, and reads everything for it; the "
        "policy %s changes nothing",
        policy.spec,
    )
    return parse_spec("full")
