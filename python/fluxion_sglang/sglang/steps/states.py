"""Layers with a state per request in place of keys and values (gated delta rule), if the CPU is the device.

SGLang manages the states: its pool has a slot for each running request and for each prefix with a state in the radix
tree. SGLang computes them with Triton kernels, which need a GPU; here the native workers do. Prompts and decode steps
use the same kernels, so a request's state does not depend on how its tokens are divided among passes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase

from fluxion_sglang.sglang.steps.layers import Contained
from fluxion_sglang.sglang.steps.stand_ins import pin_nothing

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

CHUNK = 64
"""Tokens of SGLang's chunks. States of prefixes are kept at ends of chunks."""


def install(native: Contained, paused: Callable[[], AbstractContextManager[None]]) -> None:
    """Replace SGLang's kernels; call it before SGLang makes its backend of these layers.

    Args:
        paused: a context that is excluded from a trace of the step (`Tracer.paused`).
    """
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid
    from sglang.srt.layers.attention.linear import gdn_backend

    gdn_backend.TritonGDNKernel = partial(DeltaRuleKernel, native)
    gdn_backend.causal_conv1d_fn = partial(convolve_prompts, native)
    gdn_backend.causal_conv1d_update = partial(convolve_step, native)
    gdn_backend.fused_gdn_gating = gates

    def remember_all_layers(*arguments: Any, **named: Any) -> None:
        with paused():
            remember(*arguments, **named)

    def remember_one(conv_states: torch.Tensor, ssm_states: torch.Tensor, *others: Any, **named: Any) -> None:
        remember_all_layers(conv_states[None], ssm_states[None], *others, **named)

    hybrid.track_mamba_states_all_layers = remember_all_layers
    hybrid.track_mamba_states_if_needed = remember_one
    pin_nothing()


class DecodeStates:
    """States in step graphs (`graphs.States`).

    Args:
        runner: SGLang's. It makes the backend of these layers later than ours, so it is read on use.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (self._step().mamba_cache_indices,)

    def memory(self) -> list[torch.Tensor]:
        cache = self._runner.req_to_token_pool.mamba_pool.mamba_cache
        return [*cache.conv, cache.temporal]

    def finish(self, forward_batch: ForwardBatch) -> None:
        """Copy states for the radix tree; the model's Python, which normally does this, does not run in a replay."""
        if (mask := forward_batch.mamba_track_mask) is not None:
            step, (conv, states) = self._step(), self.memory()
            remember(conv, states, step.mamba_cache_indices, mask, step.mamba_track_indices, forward_batch.batch_size)

    def _step(self) -> Any:
        return self._runner.attn_backend.linear_attn_backend.forward_metadata


class DeltaRuleKernel(LinearAttnKernelBase):
    """SGLang's interface to the gated delta rule; see `NativeLayers.delta_rule` for the formula.

    Queries, keys and values are [1, rows, heads, size], the result as values. If the native layer fails, the result is
    zeros, and the pass is given up.
    """

    supports_track_state_snapshot = True

    def __init__(self, native: Contained) -> None:
        self._native = native

    def decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        gates = A_log.float(), dt_bias.float()
        out = self._native(
            lambda layers: layers.delta_rule(
                q[0].flatten(1), k[0].flatten(1), v[0].flatten(1), a.float().contiguous(), b.float().contiguous(),
                ssm_states, cache_indices.int(), gates=gates,
            )
        )  # fmt: skip
        return torch.zeros_like(v) if out is None else out.view(v.shape)

    def extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        track_state: torch.Tensor | None = None,
        track_chunk_idx: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None, None]:
        snapshots = None
        if track_state is not None:
            assert track_chunk_idx is not None
            snapshots = torch.where(track_chunk_idx >= 0, track_chunk_idx * CHUNK, -1).int(), track_state
        out = self._native(
            lambda layers: layers.delta_rule(
                q[0].flatten(1), k[0].flatten(1), v[0].flatten(1), g[0], beta[0], ssm_states, cache_indices.int(),
                query_start_loc, snapshots=snapshots,
            )
        )  # fmt: skip
        return torch.zeros_like(v) if out is None else out.view(v.shape), None, None


def convolve_prompts(
    native: Contained,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """SGLang's `causal_conv1d_fn`, [channels, rows]; see `NativeLayers.convolve`."""
    rows = x.T
    out = native(
        lambda layers: layers.convolve(
            rows, weight, bias, conv_states, cache_indices.int(), query_start_loc, has_initial_state
        )
    )
    return torch.zeros_like(x) if out is None else out.T


def convolve_step(
    native: Contained,
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """SGLang's `causal_conv1d_update`, [rows, channels]."""
    out = native(lambda layers: layers.convolve(x, weight, bias, conv_state, conv_state_indices.int()))
    return torch.zeros_like(x) if out is None else out


def gates(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithms of decays, and strengths; [1, rows, heads] float32."""
    decays = -A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
    return decays[None], torch.sigmoid(b.float())[None].contiguous()


def remember(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy the states of requests whose mask is set to other slots; [layers, slots, ...]."""
    chosen = mamba_track_mask[:batch_size].nonzero()[:, 0]
    if len(chosen):
        sources, targets = cache_indices[:batch_size][chosen].long(), mamba_track_indices[:batch_size][chosen].long()
        for pool in (conv_states_pool, ssm_states_pool):
            pool[:, targets] = pool[:, sources]
