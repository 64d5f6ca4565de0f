"""Histograms of the KV bytes that a request reads in a step, by policy, on SGLang's `/metrics`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fluxion_sglang.executor.observer import Observer
from fluxion_sglang.kv.host_pool import KVShape
from fluxion_sglang.policy.base import DecodeStep, Policy, policy_name

if TYPE_CHECKING:
    from fluxion_sglang.executor.decode import Layer
    from fluxion_sglang.native import NativeEngine

SAMPLED = 16
"""Sampling interval in steps."""
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 0.999, 1.0)
"""Upper bounds of the buckets of shares; 0.999 separates nearly everything from everything."""
BYTES = tuple(float(4**i) for i in range(5, 17))
"""Upper bounds of the buckets of bytes: 1 KiB to 4 GiB."""

DESCRIBED = {
    "read_bytes": "Bytes of K and V of the middle that a request read for one decoded token in all layers, by the name "
    f"of its policy; what requests read together counts for each. Of one step in {SAMPLED}, and of each rank.",
    "read_share": "Share of its middle that a request read for one decoded token: the budgets of its heads as they "
    f"came out. Requests without a middle are left out. By the name of its policy, of one step in {SAMPLED}.",
}
"""Help text of each histogram."""


class ReadHistograms(Observer):
    """Observes one step in `sampled`. The label is the first word of a spec, because clients choose the arguments.

    Args:
        native: the engine whose reads are counted.
    """

    def __init__(self, native: NativeEngine, shape: KVShape, sampled: int = SAMPLED) -> None:
        from prometheus_client import Histogram

        labels = ["policy"]
        self._bytes = Histogram("fluxion_read_bytes", DESCRIBED["read_bytes"], labels, buckets=BYTES)
        self._share = Histogram("fluxion_read_share", DESCRIBED["read_share"], labels, buckets=SHARES)
        self._native, self._layers, self._every = native, shape.layers, sampled
        self._token_bytes = shape.token_bytes
        self._steps = 0
        self._names: list[str] = []  # policies of the current step; empty if it is not sampled
        self._middle: list[int] = []
        self._done = self._counted = 0  # finished layers; finished layers with a middle
        self._reads = self._sum = torch.zeros(0, shape.kv_heads, 2, dtype=torch.int64)

    def began(self, step: DecodeStep, policies: Sequence[Policy]) -> None:
        looked = self._steps % self._every == 0
        self._steps += 1
        self._done = self._counted = 0
        self._names = [policy_name(policy) for policy in policies] if looked else []
        if looked:
            self._middle = step.middle.tolist()
            self._reads = torch.zeros(step.batch, self._reads.shape[1], 2, dtype=torch.int64)
            self._sum = torch.zeros_like(self._reads)

    @property
    def watches(self) -> bool:
        return bool(self._names)

    def decoded(self, layer: Layer) -> None:
        if not self._names or layer.index != self._done:
            return  # an earlier layer failed
        self._done += 1
        if layer.variant.window is None:
            self._counted += 1
            self._native.reads(self._reads)
            self._sum += self._reads
        if self._done < self._layers:
            return
        for name, middle, read in zip(self._names, self._middle, self._sum[..., 0].sum(1).tolist(), strict=True):
            self._bytes.labels(name).observe(read)
            if middle and self._counted:
                self._share.labels(name).observe(read / (middle * self._counted * self._token_bytes))
        self._names = []
