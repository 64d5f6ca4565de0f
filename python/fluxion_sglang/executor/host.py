"""The CPU as the device: every pass is computed synchronously on the calling thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fluxion_sglang.executor.decode import DecodeEngine, Layer
from fluxion_sglang.executor.device import Appended, Device
from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.executor.variant import PLAIN, Variant
from fluxion_sglang.kv.host_pool import HostPool
from fluxion_sglang.kv.windows import Windows
from fluxion_sglang.native import AttentionLayer, CorruptMemory, NativeEngine, NativePlan, NativeProgram
from fluxion_sglang.policy.base import Policy
from fluxion_sglang.predictor.features import PARTS


class HostLayer(Layer):
    """A layer whose windows are in host memory; the workers compute all of it."""

    def look(self, native: NativeEngine) -> torch.Tensor:
        assert self.window is not None
        parts = torch.empty(*self.q.shape[:2], len(PARTS))
        native.layer_resident(self.of, self.q, self.k, self.v, parts)
        return parts

    def begin(self, native: NativeEngine, plan: NativePlan, parts: torch.Tensor | None) -> None:
        assert self.out is not None
        # After `look`, the token is already appended and the residents are attended to.
        k, v = (self.k, self.v) if parts is None else (None, None)
        native.layer_begin(plan, self.of, self.q, k, v, self.out)


class HostDevice(Device):
    """Windows are in host memory; the engine computes residents and middle together."""

    mixes = True

    def __init__(self, pool: HostPool, windows: Windows, engine: DecodeEngine, prefill_budget: float = 1.0) -> None:
        self._pool, self._windows, self._engine = pool, windows, engine
        self._prefill_budget = prefill_budget
        self._layers: dict[int, tuple[float, Variant, AttentionLayer]] = {}  # the latest of each layer
        self._requests: Sequence[ExtendRequest] = ()
        self._appended: Appended | None = None  # None: drafts
        self._riders = 0

    def heal(self, row: int, n: int, pages: torch.Tensor) -> None:
        self._windows.heal(row, n, pages)

    def begin_decode(
        self, rows: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor, policies: Sequence[Policy] | None = None
    ) -> None:
        self._engine.begin_step(rows, lengths, pages, policies)

    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, variant: Variant = PLAIN
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        self.attend(self.layer(layer, q, k, v, scale, variant, out))
        return out

    def layer(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        variant: Variant,
        out: torch.Tensor,
    ) -> HostLayer:
        """Build a layer for `attend`, reusable in many steps. Arguments and the result `out` as for `decode`."""
        known = self._layers.get(index)
        if known is None or (known[0], known[1]) != (scale, variant):
            window, newest = self._windows.layers[index], variant.window
            residents = window if newest is None else None
            of = AttentionLayer(self._engine.native, index, scale, residents, variant.sinks, variant.cap, newest)
            known = self._layers[index] = scale, variant, of
        return HostLayer(
            index=index,
            of=known[2],
            q=q,
            scale=scale,
            k=k,
            v=v,
            variant=variant,
            window=self._windows.layers[index],
            out=out,
        )

    def attend(self, at: HostLayer) -> None:
        """Compute attention of one layer of the step from the current contents of its tensors."""
        self._engine.attend(at)
        self._engine.attended(at)

    def add(self, program: NativeProgram, at: HostLayer) -> None:
        """Add a layer to a program that computes whole steps."""
        assert at.out is not None
        program.attend(self._engine.native, at.of, at.q, at.k, at.v, at.out)

    def plan_step(self) -> bool:
        """Whether a program may compute the step's layers, followed by `planned`. If not, call `attend` for each."""
        return self._engine.plan_step()

    def planned(self) -> None:
        """The program has computed all layers of the step."""
        self._engine.served(len(self._windows.layers))

    def begin_extend(self, requests: Sequence[ExtendRequest], appended: Appended | None) -> None:
        self._requests, self._appended, self._riders = requests, appended, 0

    def begin_mixed(
        self,
        requests: Sequence[ExtendRequest],
        appended: Appended,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        pages: torch.Tensor,
        policies: Sequence[Policy] | None,
    ) -> None:
        """`DecodeEngine.corrupt` numbers the decode step's requests first, then `requests`."""
        self.begin_decode(rows, lengths, pages, policies)
        self._requests, self._appended, self._riders = requests, appended, len(rows)

    def extend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, variant: Variant = PLAIN
    ) -> torch.Tensor:
        out, appended = torch.empty_like(q), self._appended
        for index, request in enumerate(self._requests):
            tokens = request.tokens
            try:
                if request.stop > request.start:
                    at = (layer, request.pages, request.start)
                    self._pool.append(*at, k[tokens], v[tokens])
                    self._pool.attend_chunk(
                        *at,
                        q[tokens],
                        scale,
                        out[tokens],
                        self._prefill_budget,
                        variant.window,
                        variant.sinks,
                        request.tree,
                        variant.cap,
                    )
                    if appended is not None and variant.window is None:
                        appended(layer, index, q[request.last_queries], scale)
                if appended is not None and variant.window is None:
                    self._windows.fill(layer, request.row, request.stop, request.pages)
            except CorruptMemory as error:
                out[tokens] = 0
                self._engine.corrupt(self._riders + index, str(error))
        if self._riders:
            riders = slice(-self._riders, None)
            self.attend(self.layer(layer, q[riders], k[riders], v[riders], scale, variant, out[riders]))
        return out
