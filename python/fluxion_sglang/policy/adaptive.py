"""adaptive: begins exact, and reads less once it has seen what the model's heads need. Nothing is trained.

The policy measures, by reading everything, how far heads have to reach into the middle (`policy/reach.py`) to keep
their error within tau (Fluxion, Eq. 2). What it lets a head reach is the larger of two numbers:

- a high quantile of what the head needed when decode steps were measured, whoever asked: split conformal prediction
  (Vovk et al., 2005) over a window that moves, so that it follows the requests of the day. Of so few measurements that
  there is no such quantile it is everything: a server begins exact.
- what the head needed for some tokens of the request's own prompt, so that a document of another kind than those before
  it is not read as if it were one of them. It costs no decode step.

A reach is no budget. It is in units of logits and relative to what the head already has, so a query that finds nothing
among sinks and window reads far, and one that has found its token stops.
"""

from __future__ import annotations

import math
from typing import ClassVar, Final

import torch

from fluxion_sglang.policy import arguments
from fluxion_sglang.policy.base import (
    UNSEEN,
    Context,
    DecodeStep,
    LayerPlan,
    Needs,
    Observed,
    Policy,
    World,
    task_value,
)
from fluxion_sglang.policy.reach import BLK, Reach
from fluxion_sglang.predictor.criterion import Criterion, Deviation
from fluxion_sglang.predictor.measure import Reaches, measure_reach

MISSED: Final = (0.03, 0.01)
"""How many queries of a head may need a larger reach, a larger gate, than it has, of those that decode steps ask."""

MISSED_OF_PROMPT: Final = 1 / 8
"""How many of a prompt's measured queries may need more than it says."""

KEPT: Final = 1024
"""Measurements of a layer that are kept, the latest."""

EVERY: Final = ((512, 8), (math.inf, 64))
"""Up to so many measurements of a layer, one of so many decode steps of a request is measured in it; before there are
`ENOUGH` every one is."""

NEWEST: Final = 16
SPREAD: Final = 16
"""Tokens of a prompt that are measured: the last ones, and as many spread over its last long chunk."""

ENOUGH: Final = math.ceil(1 / min(MISSED)) - 1
"""The fewest measurements that have both quantiles."""


def quantile(values: torch.Tensor, missed: float) -> torch.Tensor:
    """The least number that one more value exceeds with a probability of at most `missed`, if all come alike.

    Args:
        values: [n, ...], any of them infinite.

    Returns:
        [...]: the ceil((1 - missed) (n + 1))-th smallest; inf where n is too small for that.
    """
    rank = math.ceil((1 - missed) * (len(values) + 1) - 1e-9)
    if rank > len(values):
        return torch.full(values.shape[1:], torch.inf)
    return values.kthvalue(rank, dim=0).values


class AdaptivePolicy(Policy):
    """See the module. What it has learned is one object's, of all requests that name it.

    Args:
        criterion: what a head's reach has to achieve.
    """

    forms: ClassVar[tuple[str, ...]] = ("adaptive[:TAU]",)
    needs = Needs.RESIDENTS
    prefill_rows = 1 << 30
    learns = True

    def __init__(self, criterion: Criterion) -> None:
        self.criterion = criterion
        self._step: DecodeStep | None = None
        self._steps = 0
        self._seen: list[int] = []  # measured decode steps of each layer
        self._needed = torch.empty(0)  # [layers, 2, KEPT, Hq]: reach and gate of the latest
        self._quantiles = torch.empty(0)  # [layers, 2, Hq]
        self._own = torch.empty(0)  # [layers, 2, rows, Hq]: what prompts needed
        self._prompts: dict[tuple[int, int], _Prompt] = {}  # by layer and row: not measured yet

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        arguments.at_most(words, 1)
        return cls(Criterion(Deviation.LAYER, arguments.fraction(words[0]) if words else context.tau))

    def bind(self, world: World) -> None:
        super().bind(world)
        layers, heads = world.pool.shape.layers, world.q_heads
        self._seen = [0] * layers
        self._needed = torch.empty(layers, 2, KEPT, heads)
        self._quantiles = torch.full((layers, 2, heads), torch.inf)
        self._own = torch.full((layers, 2, world.rows, heads), -torch.inf)
        self._prompts = {}

    def prefilled(self, layer: int, row: int, length: int, queries: torch.Tensor) -> None:
        prompt = self._prompts.setdefault((layer, row), _Prompt())
        prompt.take(length, queries)
        self._own[layer, :, row] = -torch.inf

    def released(self, row: int) -> None:
        self._own[:, :, row] = -torch.inf
        for layer in range(len(self._seen)):
            self._prompts.pop((layer, row), None)

    def holds(self, world: World) -> int:
        return world.pool.shape.layers * 2 * world.q_heads * 4 * (KEPT + world.rows)

    def remembers(self, world: World, tokens: int) -> int:
        shape = world.pool.shape
        query = world.q_heads * shape.head_dim * shape.dtype.itemsize
        return shape.layers * (NEWEST + SPREAD) * (query + 4)

    @property
    def state_bytes(self) -> int:
        prompts = sum(prompt.nbytes for prompt in self._prompts.values())
        return self._needed.nbytes + self._own.nbytes + prompts

    def begin_step(self, step: DecodeStep) -> None:
        self._step = step
        self._steps += 1
        self._rows = step.rows.long()
        self._blk = torch.full((step.batch, step.kv_heads), BLK, dtype=torch.int32)
        self._budget = torch.ones(step.batch, step.q_heads)
        self._value = task_value(step.middle, self._blk, self._budget)
        self._whole = LayerPlan(self._blk, self._budget, self._value)

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        step = self._step
        assert step is not None, "plan() before begin_step()"
        assert observed.scale is not None
        seen = self._seen[layer]
        cold = seen < ENOUGH
        every = 1 if cold else next(steps for most, steps in EVERY if seen < most)
        for b, row in enumerate(step.rows.tolist()):
            if step.middle[b] == 0:
                continue
            if (prompt := self._prompts.pop((layer, row), None)) is not None:
                found = self._measure(layer, b, prompt.lengths, prompt.queries, observed.scale)
                rank = len(prompt.lengths) - int(len(prompt.lengths) * MISSED_OF_PROMPT)
                self._own[layer, :, row] = torch.stack([of.kthvalue(rank, dim=0).values for of in found])
            # Layers and requests take turns, so that no step measures many of them.
            if (self._steps + 17 * layer + 29 * b) % every == 0:
                found = self._measure(layer, b, step.seq_lens[b : b + 1], q[b : b + 1], observed.scale)
                self._learn(layer, found)
        if cold:
            return self._whole
        reach, gate = torch.maximum(self._own[layer][:, self._rows], self._quantiles[layer].unsqueeze(1))
        return LayerPlan(self._blk, self._budget, self._value, kinds=(Reach(reach, gate),))

    def _measure(self, layer: int, b: int, lengths: torch.Tensor, queries: torch.Tensor, scale: float) -> Reaches:
        """Of queries of the step's request b."""
        step, world = self._step, self.world
        assert step is not None and step.page_table is not None and world is not None
        window = world.pool.placement.window
        return measure_reach(world.pool, layer, step.page_table[b], lengths, queries, scale, window, self.criterion)

    def _learn(self, layer: int, found: Reaches) -> None:
        if found.reach.isposinf().any() or found.gate.isposinf().any():
            return  # a query that is no number says nothing of others
        needed, at = self._needed[layer], self._seen[layer] % KEPT
        needed[0, at], needed[1, at] = found.reach[0], found.gate[0]
        self._seen[layer] += 1
        kept = min(self._seen[layer], KEPT)
        for i, missed in enumerate(MISSED):
            self._quantiles[layer, i] = quantile(needed[i, :kept], missed)


class _Prompt:
    """Queries of a request's prompt that are worth a measurement, each of another token.

    Attributes:
        lengths: [n] int32, tokens of the request when each was the last. queries: [n, Hq, D].
    """

    def __init__(self) -> None:
        self._spread: tuple[torch.Tensor, torch.Tensor] | None = None
        self._newest: tuple[torch.Tensor, torch.Tensor] | None = None

    def take(self, length: int, queries: torch.Tensor) -> None:
        """Of the chunk's last tokens, of which the last is number `length`."""
        tokens = len(queries)
        numbers = torch.arange(length - tokens + 1, length + 1, dtype=torch.int32)
        others = tokens - NEWEST
        if tokens >= 4 * (NEWEST + SPREAD) or (self._spread is None and others > 0):
            at = torch.linspace(0, others - 1, min(SPREAD, others)).long()
            self._spread = numbers[at], queries[at].clone()
        newest = numbers[-NEWEST:], queries[-NEWEST:]
        if self._newest is not None:  # a last chunk may be short
            newest = torch.cat([self._newest[0], newest[0]]), torch.cat([self._newest[1], newest[1]])
        self._newest = newest[0][-NEWEST:].clone(), newest[1][-NEWEST:].clone()

    @property
    def lengths(self) -> torch.Tensor:
        return torch.cat([part[0] for part in (self._spread, self._newest) if part])

    @property
    def queries(self) -> torch.Tensor:
        return torch.cat([part[1] for part in (self._spread, self._newest) if part])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for pair in (self._spread, self._newest) if pair for part in pair)
