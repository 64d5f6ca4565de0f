"""Requests over one native pool and engine, kept twice: there, and as plain tensors for comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import reference
import torch
from definitions.torch_executor import block_scores
from int8 import INT8, stored

from fluxion_lab.kinds import EarlyStop, Listed, SingleTokens
from fluxion_sglang.executor.decode import native_plan
from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.native import AttentionLayer, NativeEngine, NativePool, Workers
from fluxion_sglang.policy.base import LayerPlan, TaskKind

CLAIM_INDEX_MASK = (1 << 18) - 1
"""`claim & CLAIM_INDEX_MASK` is the index of the claimed task within its layer (`csrc/engine/task_queue.h`, kBits)."""


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, cap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [D], k and v [n, D] -> o [D], LSE, in float64; without tokens 0, -inf. cap: of logits, if not 0."""
    scores = reference.capped((k.double() @ q.double()) * scale, cap)
    lse = scores.logsumexp(0) if len(scores) else torch.tensor(-math.inf, dtype=torch.float64)
    return (scores - lse).exp() @ v.double(), lse


def block_bounds(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Upper bound of q [D] . k over the keys [n, D] of one block, from their min and max, float64."""
    lo, hi = keys.double().amin(0), keys.double().amax(0)
    return torch.maximum(q.double() * lo, q.double() * hi).sum()


def rank_blocks(
    q: torch.Tensor, keys: torch.Tensor, blocks: list[list[int]], spread: float
) -> tuple[torch.Tensor, bool]:
    """Scores [G, n] of blocks of keys [., D], float64, and whether float32 must rank them equally. q: [G, D]."""
    sides = [keys[tokens].aminmax(dim=0) for tokens in blocks]
    lo, hi = (torch.stack(list(side)) for side in zip(*sides, strict=True))
    scores = block_scores(q.double(), lo, hi, spread)
    rounding = q.double().abs() @ torch.maximum(lo.abs(), hi.abs()).double().T * 2e-6
    row, order = scores.sort(dim=1)
    gaps, rounding = row.diff(), rounding.gather(1, order)
    return scores, bool(((gaps == 0) | (gaps > rounding[:, 1:] + rounding[:, :-1])).all())


@dataclass
class Request:
    """`keys`, `values`: per layer [n, H, D]. `pages`: physical page of every logical page."""

    row: int
    pages: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def length(self) -> int:
        return self.keys[0].shape[0]


def take(requests: list[Request], layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """Append each request's row of k and v, [B, H, D] or more rows, to its expected contents."""
    for request, key, value in zip(requests, k, v, strict=False):
        request.keys[layer] = torch.cat([request.keys[layer], key[None]])
        request.values[layer] = torch.cat([request.values[layer], value[None]])


@dataclass
class Plan:
    """Plan of a layer: blk [B, H] int32, budget [B, Hq] and value [B, H] float32, owner [B, H] int32 or None, and
    more."""

    blk: torch.Tensor
    budget: torch.Tensor
    value: torch.Tensor
    owner: torch.Tensor | None = None
    listed: Listed | None = None


def layer_begin(
    engine: NativeEngine, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None,
    windows: torch.Tensor | None, plan: Plan, scale: float, out: torch.Tensor | None, stop: torch.Tensor | None = None,
    spread: torch.Tensor | None = None, middle: tuple[torch.Tensor, torch.Tensor] | None = None,
    parts: torch.Tensor | None = None,
) -> int:  # fmt: skip
    """Begin a layer with a plan, which may hold single tokens; `middle`: residents are on a device."""
    kinds: tuple[TaskKind, ...] = (SingleTokens(),)
    if stop is not None:
        kinds = (EarlyStop(stop, torch.ones_like(stop) if spread is None else spread), *kinds)
    if plan.listed is not None:
        kinds = (plan.listed, *kinds)
    native = native_plan(LayerPlan(plan.blk, plan.budget, plan.value, kinds), owner=plan.owner)
    at = AttentionLayer(engine, layer, scale, windows)
    if middle is not None:
        assert out is None
        return engine.middle_begin(native, at, q, k, v, *middle, parts)
    assert out is not None
    return engine.layer_begin(native, at, q, k, v, out)


@dataclass
class NativeWorld:
    """A pool, an engine and windows without the layers above them.

    Pages are assigned in shuffled order; windows and outputs start as NaN. Chunks are small, so that the tests' small
    tasks are divided and worth waking workers.
    """

    layers: int = 1
    heads: int = 2
    group: int = 2
    dim: int = 32
    spread: float = 1.0
    dtype: torch.dtype = torch.float32  # INT8: bfloat16, stored in 8 bits
    pages: int = 256
    rows: int = 6
    workers: int = 2
    cores: tuple[int, ...] = ()
    placement: Placement = field(default_factory=lambda: Placement(sinks=32, window=48))
    attend_union: bool = True
    chunk_bytes: int | None = 1 << 14
    share_prefixes: bool = False
    cached_bytes: int | None = 0
    isa: str | None = None
    seed: int = 0
    canary: float = 0.0
    sketched: bool = False

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.scale = self.dim**-0.5
        self.int8 = self.dtype == INT8
        if self.int8:
            self.dtype = torch.bfloat16
        pool_workers = Workers(self.workers, torch.tensor(self.cores, dtype=torch.int32))
        self.pool = NativePool(
            pool_workers, layers=self.layers, kv_heads=self.heads, pages=self.pages, head_dim=self.dim,
            dtype=self.dtype, int8=self.int8, sketched=self.sketched, sink_pages=self.placement.sink_pages,
            spread=self.spread, isa=self.isa, canary=self.canary,
        )  # fmt: skip
        self.engine = NativeEngine(
            pool_workers, self.pool, q_heads=self.q_heads, sinks=self.placement.sinks, window=self.placement.window,
            max_requests=1, max_pages=1, attend_union=self.attend_union, chunk_bytes=self.chunk_bytes,
            share_prefixes=self.share_prefixes, cached_bytes=self.cached_bytes,
        )  # fmt: skip
        size = (self.heads, self.rows * self.placement.slot_pages, 2, PAGE, self.dim)
        self.windows = [torch.full(size, torch.nan, dtype=self.dtype) for _ in range(self.layers)]
        self.free = (torch.randperm(self.pages - 1, generator=self.random) + 1).tolist()
        self.free_rows = torch.randperm(self.rows, generator=self.random).tolist()

    @property
    def q_heads(self) -> int:
        return self.heads * self.group

    def at(self, layer: int = 0) -> AttentionLayer:
        return AttentionLayer(self.engine, layer, self.scale, self.windows[layer])

    def randn(self, *size: int) -> torch.Tensor:
        return self.kept(torch.randn(*size, generator=self.random))

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        """x as the pool stores it."""
        x = x.to(self.dtype)
        return stored(x) if self.int8 else x

    def add(
        self, length: int, parent: Request | None = None, shared: int = 0, keys: list[torch.Tensor] | None = None
    ) -> Request:
        """A request of `length` tokens in the pool, with a filled window; `keys`: per layer [length, H, D].

        The first `shared` tokens, in whole pages, belong to `parent`, which no longer writes to them.
        """
        request = Request(self.free_rows.pop(), [], [], [])
        request.pages = parent.pages[: shared // PAGE] if parent else []
        request.pages += [self.free.pop() for _ in range(-(-(length - shared) // PAGE))]
        pages = torch.tensor(request.pages, dtype=torch.int32)
        for layer in range(self.layers):
            k, v = (self.randn(length - shared, self.heads, self.dim) for _ in range(2))
            k = self.kept(keys[layer]) if keys else k
            if length > shared:
                self.pool.append(layer, pages, shared, k, v)
            if parent:
                k, v = torch.cat([parent.keys[layer][:shared], k]), torch.cat([parent.values[layer][:shared], v])
            if length:
                self.pool.fill_window(
                    layer, self.windows[layer], request.row, length, pages, self.placement.sinks, self.placement.window
                )
            request.keys.append(k)
            request.values.append(v)
        return request

    def table(self, requests: list[Request]) -> torch.Tensor:
        """[B, M] int32, padded with an illegal id that must not be read."""
        width = max(len(r.pages) for r in requests) + 1
        table = torch.full((len(requests), width), -7, dtype=torch.int32)
        for b, request in enumerate(requests):
            table[b, : len(request.pages)] = torch.tensor(request.pages)
        return table

    def begin_step(self, requests: list[Request]) -> None:
        """Begin a decode step: every request gets room for one more token."""
        for request in requests:
            if request.length % PAGE == 0:
                request.pages.append(self.free.pop())
        rows = torch.tensor([r.row for r in requests], dtype=torch.int32)
        lengths = torch.tensor([r.length + 1 for r in requests], dtype=torch.int32)
        self.engine.step(rows, lengths, self.table(requests))

    def plan(self, requests: list[Request], blk: int = 16, budget: float = 1.0) -> Plan:
        batch = len(requests)
        return Plan(
            torch.full((batch, self.heads), blk, dtype=torch.int32),
            torch.full((batch, self.q_heads), budget),
            torch.zeros(batch, self.heads),
        )

    def begin_layer(
        self, requests: list[Request], layer: int, plan: Plan, resident_first: bool = False
    ) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Draw q, k, v, append the token to the expected contents and start the layer: (tasks, q, out).

        resident_first: use `layer_resident`, as for a policy that observes the heads.
        """
        batch = len(requests)
        # Rows of one fused projection, as in a model: not contiguous over the batch.
        fused = self.randn(batch, self.q_heads + 2 * self.heads, self.dim)
        q, k, v = fused.split([self.q_heads, self.heads, self.heads], dim=1)
        out = torch.full((batch, self.q_heads, self.dim), torch.nan, dtype=self.dtype)
        new: tuple[torch.Tensor | None, ...] = (k, v, self.windows[layer])
        if resident_first:
            parts = torch.empty(batch, self.q_heads, 5)
            self.engine.layer_resident(self.at(layer), q, k, v, parts)
            new = (None, None, None)
        tasks = layer_begin(self.engine, layer, q, *new, plan, self.scale, out)
        take(requests, layer, k, v)
        return tasks, q, out

    def selections(self, requests: list[Request], tasks: int) -> dict[tuple[int, int], list[set[int]]]:
        """The engine's selections in the open layer: per (b, h), the positions of each head."""
        result = {}
        for i in range(tasks):
            b, h = divmod(self.engine.task(i), self.heads)
            request = requests[b]
            pages = torch.empty(len(request.pages), dtype=torch.int32)
            masks = torch.empty(len(request.pages), self.group, dtype=torch.uint16)
            count = self.engine.selection(i, pages, masks)
            positions: list[set[int]] = [set() for _ in range(self.group)]
            for page, row in zip(pages[:count].tolist(), masks[:count].tolist(), strict=True):
                logical = request.pages.index(page)
                for g, mask in enumerate(row):
                    positions[g] |= {logical * PAGE + t for t in range(PAGE) if mask >> t & 1}
            result[b, h] = positions
        return result

    def expected(
        self, requests: list[Request], layer: int, q: torch.Tensor, chosen: dict[tuple[int, int], list[set[int]]]
    ) -> torch.Tensor:
        """Attention over residents and the chosen positions, float64 [B, Hq, D].

        The requests hold the new token.
        """
        out = torch.empty(len(requests), self.q_heads, self.dim, dtype=torch.float64)
        for b, request in enumerate(requests):
            n = request.keys[layer].shape[0]
            start = self.placement.window_start(n)
            resident = [*range(min(self.placement.sinks, n)), *range(start, n)]
            for head in range(self.q_heads):
                h, g = divmod(head, self.group)
                read = sorted(chosen[b, h][g]) if (b, h) in chosen else []
                at = torch.tensor(resident + read)
                keys, values = request.keys[layer][at, h], request.values[layer][at, h]
                out[b, head], _ = attention(q[b, head], keys, values, self.scale)
        return out

    def middle(self, request: Request, layer: int = 0) -> list[int]:
        """Positions of the middle; the request holds the new token."""
        n = request.keys[layer].shape[0]
        return list(range(self.placement.sinks, self.placement.window_start(n)))

    def everything(self, requests: list[Request], layer: int = 0) -> dict[tuple[int, int], list[set[int]]]:
        """Selections under a budget of 1: per (b, h), a set for each head."""
        middles = [set(self.middle(request, layer)) for request in requests]
        return {(b, h): [middle] * self.group for b, middle in enumerate(middles) for h in range(self.heads)}

    def tolerance(self) -> dict[str, float]:
        return {"atol": 2e-5, "rtol": 1e-4} if self.dtype == torch.float32 else {"atol": 1.2e-2, "rtol": 1.2e-2}

    def check(self, out: torch.Tensor, want: torch.Tensor) -> None:
        torch.testing.assert_close(out.double(), want, **self.tolerance())

    def drain_foreign(
        self, requests: list[Request], layer: int, q: torch.Tensor, executor: int = 1, limit: int = -1
    ) -> list[int]:
        """Pop and compute tasks like a foreign executor; return the indices of the delivered ones."""
        done: list[int] = []
        while len(done) != limit and (claim := self.engine.queue_pop(executor)) >= 0:
            assert self.engine.task_done(claim, *self.compute(requests, layer, q, claim))
            done.append(claim & CLAIM_INDEX_MASK)
        return done

    def compute(
        self, requests: list[Request], layer: int, q: torch.Tensor, claim: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """o [G, D], lse [G] of a claimed task with budget 1, float32, and the tokens read."""
        b, h = divmod(self.engine.task(claim), self.heads)
        n = len(requests[b].keys[layer])
        at = slice(self.placement.sinks, self.placement.window_start(n))
        keys, values = requests[b].keys[layer][at, h], requests[b].values[layer][at, h]
        parts = [attention(q[b, h * self.group + g], keys, values, self.scale) for g in range(self.group)]
        o, lse = (torch.stack(part).float() for part in zip(*parts, strict=True))
        return o, lse, self.group * len(keys)
