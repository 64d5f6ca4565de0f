"""How much of the KV single requests read in single steps, by policy: histograms on SGLang's own `/metrics`."""

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
"""One step in so many is looked at."""
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 0.999, 1.0)
"""Ends of the buckets of shares; the last but one tells what reads everything from what reads nearly everything."""
BYTES = tuple(float(4**i) for i in range(5, 17))
"""Those of bytes: from 1 KiB to 4 GiB."""

DESCRIBED = {
    "read_bytes": "Bytes of K and V of the middle that a request read for one decoded token in all layers, by the name "
    f"of its policy; what requests read together counts for each. Of one step in {SAMPLED}, and of each rank.",
    "read_share": "Share of its middle that a request read for one decoded token: the budgets of its heads as they "
    f"came out. Requests without a middle are left out. By the name of its policy, of one step in {SAMPLED}.",
}
"""Name of a histogram -> its text."""


class ReadHistograms(Observer):
    """Observes one step in `sampled`. The label is the first word of a spec: arguments may be any client's.

    Args:
        native: whose reads they are.
    """

    def __init__(self, native: NativeEngine, shape: KVShape, sampled: int = SAMPLED) -> None:
        from prometheus_client import Histogram

        labels = ["policy"]
        self._bytes = Histogram("fluxion_read_bytes", DESCRIBED["read_bytes"], labels, buckets=BYTES)
        self._share = Histogram("fluxion_read_share", DESCRIBED["read_share"], labels, buckets=SHARES)
        self._native, self._layers, self._every = native, shape.layers, sampled
        self._token_bytes = shape.token_bytes
        self._steps = 0
        self._names: list[str] = []  # of the policies of the step at hand; empty where it is not looked at
        self._middle: list[int] = []
        self._done = self._counted = 0  # of its layers; of those, the ones that have a middle
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
            return  # a layer before it failed
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
