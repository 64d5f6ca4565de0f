"""One decode step of one layer: the policy plans, the executors pull from one queue, the results merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fluxion_sglang.executor.base import Executor, LayerWork
from fluxion_sglang.executor.torch_reference import TorchReferenceExecutor
from fluxion_sglang.kv.host_pool import HostPool
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.kv.windows import Windows
from fluxion_sglang.native import NativeEngine
from fluxion_sglang.policy.base import DecodeStep, Policy

if TYPE_CHECKING:
    from fluxion_sglang.config import FluxionConfig


def foreign_executors(config: FluxionConfig, pool: HostPool) -> list[Executor]:
    """The executors that pull beside the native workers."""
    if config.executors == "cpu+torch":
        return [TorchReferenceExecutor(pool, config.attend_union)]
    return []


class DecodeEngine:
    """Runs decode steps over the host pool and the device windows.

    Every layer: the new token goes to its window slot and to the host, then resident attention and the queue's tasks
    run side by side, then `merge_state` joins the two. A failing worker fails the layer with a RuntimeError; the
    engine stays usable.

    Args:
        q_heads: query heads of this process.
        max_requests, max_tokens: requests of a batch and tokens of a request to make room for now; more is made when
            a step needs it.
    """

    def __init__(
        self,
        pool: HostPool,
        windows: Windows,
        policy: Policy,
        executors: list[Executor],
        *,
        q_heads: int,
        max_requests: int,
        max_tokens: int,
        attend_union: bool,
    ) -> None:
        self.pool = pool
        self.windows = windows
        self.policy = policy
        self.executors = executors
        self.q_heads = q_heads
        placement = pool.placement
        self.native = NativeEngine(
            pool.workers,
            pool.native,
            q_heads=q_heads,
            sinks=placement.sinks,
            window=placement.window,
            max_requests=max_requests,
            max_pages=-(-max_tokens // PAGE),
            attend_union=attend_union,
        )
        self._step: DecodeStep | None = None

    def begin_step(self, rows: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor) -> DecodeStep:
        """A new decode step: rows [B], seq_lens [B] (this token included), page_table [B, M] int32, on the CPU."""
        step = DecodeStep.build(rows, seq_lens, page_table, self.pool.placement, self.pool.shape.kv_heads, self.q_heads)
        self.native.step(step.rows, step.seq_lens, step.page_table)
        self.policy.begin_step(step)
        self._step = step
        return step

    def decode(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of one layer of the current step.

        Args:
            q: [B, Hq, D]. k, v: [B, H, D], this step's token of each request. scale: multiplies q.k.

        Returns:
            [B, Hq, D] in q's dtype.

        Raises:
            RuntimeError: a task failed; the message names the first failure.
        """
        assert self._step is not None, "decode() before begin_step()"
        plan = self.policy.plan(layer, q)
        out = torch.empty_like(q)
        self.native.layer_begin(
            layer, q, k, v, self.windows.layers[layer], plan.blk, plan.budget, plan.value, scale, out
        )
        work = LayerWork(self.native, self._step, plan, layer, q, scale)
        try:
            for executor in self.executors:
                executor.drain(work)
        except BaseException:
            # The pages and rows of this layer may be another request's soon: nothing more may be written to them.
            self.native.abandon()
            raise
        self.native.layer_finish()
        return out
