"""The attention backend: SGLang's forward passes become extends and decode steps over the host pool."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.runtime_context import get_parallel

from fluxion_sglang.audit import AuditLog
from fluxion_sglang.executor.audit import AuditedEngine
from fluxion_sglang.executor.engine import DecodeEngine, foreign_executors
from fluxion_sglang.executor.extend import ExtendRequest, extend_attention
from fluxion_sglang.executor.schedule import SCHEDULERS
from fluxion_sglang.kv.page_table import page_table
from fluxion_sglang.metrics import EngineMetrics
from fluxion_sglang.policy import Policy
from fluxion_sglang.predictor.recorder import IDENTITY, Recorder
from fluxion_sglang.sglang import compat, predictors, validation
from fluxion_sglang.sglang.failures import FailureGuard
from fluxion_sglang.sglang.pools import FluxionKVPool
from fluxion_sglang.sglang.requests import RequestPolicies

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class FluxionAttnBackend(AttentionBackend):
    """Exact extend over a host-resident prefix; decode by policy.

    Page tables are built in `init_forward_metadata`, once per forward pass, and live no longer than it: between
    passes SGLang may rebind a request's row to other pages that hold the same tokens.
    """

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        compat.assert_hooks_applied()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, FluxionKVPool):
            raise RuntimeError(
                f"the fluxion attention backend got a {type(pool).__name__} instead of the host pool, so the pool hook "
                "did not apply; run `fluxion doctor` and check that fluxion-sglang matches this SGLang version."
            )
        layers = validation.check_attention_layers(runner.model)
        self.pool = pool
        self.table = runner.req_to_token_pool
        context, audit = predictors.context(pool.config, runner), pool.config.audit
        policy = predictors.server_policy(pool.config, context)
        self.engine = (DecodeEngine if audit is None else partial(AuditedEngine, AuditLog(audit)))(
            pool.host,
            pool.windows,
            policy,
            foreign_executors(pool.config, pool.host),
            q_heads=layers[0].tp_q_head_num,
            # To start with: the engine grows with what it is given.
            max_requests=min(self.table.size, 64),
            max_tokens=min(self.table.max_context_len, pool.size, 1 << 16),
            attend_union=pool.config.attend_union,
            guard=pool.config.guard,
            scheduler=SCHEDULERS[pool.config.scheduler],
            share_prefixes=pool.config.share_prefixes,
            first_layer=pool.start_layer,
            first_head=get_parallel().attn_tp_rank * layers[0].tp_q_head_num,
        )
        self.metrics: EngineMetrics | None = None
        if runner.server_args.enable_metrics:
            self.metrics = EngineMetrics(
                host_pool_tokens=pool.size,
                host_pool_bytes=pool.host.nbytes,
                resident_tokens_per_request=pool.host.placement.slots,
            )
        self.failures = FailureGuard()
        self.requests = RequestPolicies(policy, pool.config.request_policies, context, audit is not None)
        self.recorder: Recorder | None = None
        if pool.config.record is not None:
            folder = Path(os.path.expanduser(pool.config.record))
            self.recorder = Recorder(folder, pool.host)
            (folder / IDENTITY).write_text(
                json.dumps(dataclasses.asdict(predictors.identity(pool.config, runner))) + "\n"
            )
        self._extends: list[tuple[ExtendRequest, Mapping[str, Any] | None, Policy | None]] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode = forward_batch.forward_mode
        if mode.is_decode():
            self.failures.run(lambda: self._begin_decode(forward_batch))
        elif mode.is_extend():
            self.failures.run(lambda: self._begin_extend(forward_batch))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _begin_decode(self, forward_batch: ForwardBatch) -> None:
        rows = forward_batch.req_pool_indices
        lengths = forward_batch.seq_lens_cpu.to(torch.int64)
        pages = page_table(self.table.req_to_token, rows, int(lengths.max()))
        rows = rows.cpu()
        generations = self.table.req_generation[rows]
        for i in self.pool.windows.stale(rows, generations, lengths - 1):
            self.pool.windows.heal(int(rows[i]), int(lengths[i]) - 1, pages[i])
            self.engine.forget(int(rows[i]))
        self.engine.begin_step(rows, lengths, pages, self.requests.current)
        # Marked before the layers run: if they fail, the row's request ends, and the next one is of another generation.
        self.pool.windows.mark(rows, generations, lengths)

    def _begin_extend(self, forward_batch: ForwardBatch) -> None:
        rows = forward_batch.req_pool_indices
        lengths = forward_batch.seq_lens_cpu.to(torch.int64)
        pages = page_table(self.table.req_to_token, rows, int(lengths.max()))
        rows, riding = rows.cpu(), set(self.requests.riding)
        generations = self.table.req_generation[rows]
        gone = set(self.pool.windows.taken_over(rows, generations))
        gone |= riding & set(self.pool.windows.stale(rows, generations, lengths - 1))
        for i in sorted(gone):
            self.engine.forget(int(rows[i]))
        policies = self.requests.current
        self._extends = []
        offset = 0
        for i, (start, count) in enumerate(
            zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True)
        ):
            extend = ExtendRequest(int(rows[i]), int(start), int(start + count), offset, pages[i], i in riding)
            wishes = self.requests.recorded[i] if self.recorder is not None else None
            self._extends.append((extend, wishes, None if policies is None else policies[i]))
            offset += int(count)
        self.pool.windows.mark(rows, generations, lengths)

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
        out = self.failures.run(lambda: self._extend(self._index(layer), q, k, v, layer.scaling))
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
        index = self._index(layer)
        out = self.failures.run(lambda: self.engine.decode(index, q, k, v, layer.scaling))
        if self.metrics is not None and index == self.pool.layer_num - 1:
            self.metrics.update(self.engine.stats(), self.engine.state_bytes)
        return self._flat(out, q)

    @staticmethod
    def _flat(out: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor:
        """[T, Hq * D]: the result, or zeros in place of one that failed."""
        return (torch.zeros_like(q) if out is None else out).flatten(1)

    def _index(self, layer: RadixAttention) -> int:
        """The layer's place in this process's pool (its pipeline stage may start later than layer 0)."""
        return int(layer.layer_id) - self.pool.start_layer

    def _extend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        out = torch.empty_like(q)
        for request, wishes, policy in self._extends:
            tokens = request.tokens
            if request.stop > request.start:
                out[tokens] = extend_attention(self.pool.host, layer, request, q[tokens], k[tokens], v[tokens], scale)
                self.pool.host.append(layer, request.pages, request.start, k[tokens], v[tokens])
                if not request.decodes:
                    self.engine.prefilled(layer, request.row, request.stop, q[tokens], policy)
                if self.recorder is not None and wishes is not None:
                    self.recorder.observe(layer, wishes, request, q[tokens], scale)
            self.pool.windows.fill(layer, request.row, request.stop, request.pages)
        return out
