"""Bounds the memory of policies that keep state of requests."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

import torch

from fluxion_sglang.kv.host_pool import GIB
from fluxion_sglang.policy.base import UNSEEN, DecodeStep, LayerPlan, Observed, Policy, World
from fluxion_sglang.policy.full import FullPolicy
from fluxion_sglang.policy.mixed import compose

SHARE: Final = 1 / 8
"""Largest share of the host pool's bytes for a policy's state, or 1 GiB if that is more."""


class Remembering(Policy):
    """A policy with state that is kept by row."""

    @abstractmethod
    def remembers(self, world: World, tokens: int) -> int:
        """Upper bound of the state's bytes for a request of `tokens` tokens, in the engine of `world`."""

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Current memory of the state."""


class Bounded(Policy):
    """Serves requests with a policy while its state has room for them; the others read everything.

    Args:
        limit: bytes; None: see `SHARE`.
    """

    def __init__(self, inner: Remembering, limit: int | None = None) -> None:
        self.inner, self.needs = inner, inner.needs
        self._wanted = limit
        self._limit = 0
        self._rows: dict[int, int] = {}  # bytes reserved for each row
        self._full = FullPolicy()
        self._current: Policy = inner

    def bind(self, world: World) -> None:
        super().bind(world)
        self.inner.bind(world)
        self._rows = {}
        self._limit = max(int(world.pool.nbytes * SHARE), GIB) if self._wanted is None else self._wanted

    def prefilled(self, layer: int, row: int, length: int, queries: torch.Tensor) -> None:
        if self._fits(row, length):
            self.inner.prefilled(layer, row, length, queries)

    def decoded(self, layer: int, q: torch.Tensor, out: torch.Tensor | None) -> None:
        self._current.decoded(layer, q, out)

    def released(self, row: int) -> None:
        self._rows.pop(row, None)
        self.inner.released(row)

    def begin_step(self, step: DecodeStep) -> None:
        rows = zip(step.rows.tolist(), step.seq_lens.tolist(), strict=True)
        self._current = compose([self.inner if self._fits(*row) else self._full for row in rows])
        self._current.begin_step(step)

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        return self._current.plan(layer, q, observed)

    def _fits(self, row: int, tokens: int) -> bool:
        """Reserve state for a request of `tokens` tokens. If it does not fit, drop the row's state and return False."""
        assert self.world is not None
        size = max(self.inner.remembers(self.world, tokens), self._rows.get(row, 0))
        if sum(self._rows.values()) - self._rows.get(row, 0) + size > self._limit:
            if row in self._rows:
                self.released(row)
            return False
        self._rows[row] = size
        return True
