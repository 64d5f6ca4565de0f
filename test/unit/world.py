"""A small world of requests over one host pool, kept twice: in the pool, and as plain tensors for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from definitions.torch_executor import TorchReferenceExecutor
from int8 import INT8, stored

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.executor.base import Executor
from fluxion_sglang.executor.decode import DecodeEngine, Scheduler
from fluxion_sglang.executor.host import HostDevice
from fluxion_sglang.executor.variant import PLAIN, Variant
from fluxion_sglang.kv.host_pool import HostPool, KVShape
from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.kv.windows import Windows
from fluxion_sglang.native import Workers
from fluxion_sglang.policy import Policy, parse_spec
from fluxion_sglang.scoring.audit import Audit
from fluxion_sglang.scoring.audit_file import AuditLog

RECENT = 20
"""Number of last tokens of a chunk that have queries; enough for every policy."""


@dataclass
class World:
    """Requests live in rows 1..; pages are assigned in shuffled order, as by a busy allocator.

    `keys[row]`, `values[row]`: per layer a list of [H, D] tokens, the expected contents. `queries`: [B, Hq, D] of every
    layer of the last step.
    """

    layers: int = 2
    heads: int = 2
    group: int = 4
    dim: int = 64
    dtype: torch.dtype = torch.float32  # INT8: bfloat16, stored in 8 bits
    tokens: int = 8192
    rows: int = 5
    workers: int = 2
    policy: str = "full"
    executors: str = "cpu"
    scheduler: Scheduler | None = None
    attend_union: bool = True
    share_prefixes: bool = True
    seed: int = 0
    audit: Path | None = None
    spread: float = 1.0
    first: tuple[int, int] = (0, 0)  # layer 0 and query head 0 have these numbers in the model
    whole: bool = False  # small integers: scores are exact, and often equal
    placement: Placement = field(default_factory=Placement)
    variants: Sequence[Variant] = ()  # by layer; (): PLAIN
    place: str = "cpu"  # torch device of the windows

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.int8 = self.dtype == INT8
        if self.int8:
            self.dtype = torch.bfloat16
        sketched = parse_spec(self.policy).sketches
        shape = KVShape(self.layers, self.heads, self.dim, self.dtype, self.int8, sketched)
        self.pool = HostPool(shape, self.tokens, self.placement, Workers(self.workers), self.spread)
        self.windows = Windows(self.pool, self.rows, self.place)
        foreign: list[Executor] = []
        if self.executors == "cpu+torch":
            foreign.append(TorchReferenceExecutor(self.pool, self.attend_union))
        options = FluxionConfig(share_prefixes=self.share_prefixes)
        self.engine = DecodeEngine(
            self.pool, self.windows, parse_spec(self.policy), foreign, options,
            q_heads=self.heads * self.group, max_requests=self.rows, max_tokens=self.tokens,
            first_layer=self.first[0], first_head=self.first[1], scheduler=self.scheduler,
            attend_union=self.attend_union,
        )  # fmt: skip
        if self.audit is not None:
            self.engine.observers.append(Audit(self.engine, AuditLog(self.audit)))
        self.device = HostDevice(self.pool, self.windows, self.engine)
        self.scale = self.dim**-0.5
        self.free = (torch.randperm(self.pool.pages - 1, generator=self.random) + 1).tolist()
        self.pages: dict[int, list[int]] = {}
        self.keys: dict[int, list[torch.Tensor]] = {}
        self.values: dict[int, list[torch.Tensor]] = {}
        self.queries: list[torch.Tensor] = []
        # Queries of a chunk's last token by layer. They are drawn separately, so that other numbers do not depend on
        # their readers.
        self.anchors: dict[int, list[torch.Tensor]] = {}
        self.recent: dict[int, list[torch.Tensor]] = {}  # of its last tokens, [m, Hq, D]
        self._anchor_random = torch.Generator().manual_seed(self.seed + 1)

    def randn(self, *size: int) -> torch.Tensor:
        if self.whole:
            return torch.randint(-2, 3, size, generator=self.random).to(self.dtype)
        x = torch.randn(*size, generator=self.random).to(self.dtype)
        return stored(x) if self.int8 else x

    def page_list(self, row: int, tokens: int) -> torch.Tensor:
        """The row's pages, extended to hold `tokens`."""
        pages = self.pages.setdefault(row, [])
        while len(pages) * PAGE < tokens:
            pages.append(self.free.pop())
        return torch.tensor(pages, dtype=torch.int32)

    def table(self, rows: list[int], lengths: Sequence[int]) -> torch.Tensor:
        """[B, M] int32: pages of each row, extended to hold `lengths` tokens."""
        tables = [self.page_list(row, length) for row, length in zip(rows, lengths, strict=True)]
        table = torch.zeros(len(rows), max(map(len, tables), default=0), dtype=torch.int32)
        for b, pages in enumerate(tables):
            table[b, : len(pages)] = pages
        return table

    def variant(self, layer: int) -> Variant:
        return self.variants[layer] if self.variants else PLAIN

    def length(self, row: int) -> int:
        return self.keys[row][0].shape[0] if row in self.keys else 0

    def share(self, row: int, other: int, pages: int) -> None:
        """A new request in `row` whose first pages belong to `other`, as after a radix hit."""
        self.pages[row] = self.pages[other][:pages]
        self.keys[row] = [keys[: pages * PAGE] for keys in self.keys[other]]
        self.values[row] = [values[: pages * PAGE] for values in self.values[other]]

    def extend(self, row: int, count: int) -> None:
        """Append `count` random tokens as a prefill chunk would, and refill the row's window."""
        start = self.length(row)
        pages = self.page_list(row, start + count)
        empty = [torch.empty(0, self.heads, self.dim, dtype=self.dtype) for _ in range(self.layers)]
        keys, values = self.keys.setdefault(row, list(empty)), self.values.setdefault(row, list(empty))
        for layer in range(self.layers):
            k, v = self.randn(count, self.heads, self.dim), self.randn(count, self.heads, self.dim)
            self.pool.append(layer, pages, start, k, v)
            size = (min(count, RECENT), self.heads * self.group, self.dim)
            q = torch.randn(*size, generator=self._anchor_random).to(self.dtype)
            if self.variant(layer).window is None:
                self.windows.fill(layer, row, start + count, pages)
                self.engine.prefilled(layer, row, start + count, q)
            self.anchors.setdefault(row, [q[-1]] * self.layers)[layer] = q[-1]
            self.recent.setdefault(row, [q] * self.layers)[layer] = q
            keys[layer], values[layer] = torch.cat([keys[layer], k]), torch.cat([values[layer], v])

    def decode(
        self, rows: list[int], policies: Sequence[Policy] | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """One decode step; per layer (the engine's output, exact attention), [B, Hq, D] each."""
        lengths = [self.length(row) + 1 for row in rows]
        self.engine.begin_step(torch.tensor(rows), torch.tensor(lengths), self.table(rows, lengths), policies)
        results = []
        self.queries = []
        for layer in range(self.layers):
            q = self.randn(len(rows), self.heads * self.group, self.dim)
            self.queries.append(q)
            k, v = self.randn(len(rows), self.heads, self.dim), self.randn(len(rows), self.heads, self.dim)
            got = self.device.decode(layer, q, k, v, self.scale, self.variant(layer))
            results.append((got, self.take(rows, layer, q, k, v)))
        return results

    def take(self, rows: list[int], layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Append a token to each row's expected contents; return `exact` of all rows, [B, Hq, D]."""
        for b, row in enumerate(rows):
            for kept, new in ((self.keys, k), (self.values, v)):
                kept[row][layer] = torch.cat([kept[row][layer], new[b : b + 1]])
        want = [self.exact(row, layer, of_row) for row, of_row in zip(rows, q, strict=False)]
        return torch.stack(want) if want else q.double()

    def exact(self, row: int, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Full attention of q [Hq, D] over the row's tokens, or those in the layer's window, float64: [Hq, D]."""
        seen = slice(-(self.variant(layer).window or 0), None)
        k = self.keys[row][layer][seen].double().repeat_interleave(self.group, 1)
        v = self.values[row][layer][seen].double().repeat_interleave(self.group, 1)
        logits, cap = torch.einsum("hd,shd->hs", q.double(), k) * self.scale, self.variant(layer).cap
        logits = cap * torch.tanh(logits / cap) if cap else logits
        return torch.einsum("hs,shd->hd", logits.softmax(-1), v)


def on_both(
    lengths: Sequence[int], steps: int, policies: Sequence[Policy] | None = None, **options: Any
) -> tuple[list[list[torch.Tensor]], list[dict[str, int]]]:
    """Outputs and statistics of the same steps by native workers, and by the torch executor, which gets all tasks."""
    outs, stats = [], []
    for executors, workers in (("cpu", 2), ("cpu+torch", 1)):
        world = World(executors=executors, workers=workers, **options)
        rows = list(range(1, len(lengths) + 1))
        for row, length in zip(rows, lengths, strict=True):
            world.extend(row, length)
        outs.append([got for _ in range(steps) for got, _ in world.decode(rows, policies)])
        stats.append(world.engine.native.stats())
    assert stats[0]["tasks_torch"] == stats[1]["tasks_cpu"] == 0
    return outs, stats


def same_reads(stats: list[dict[str, int]]) -> None:
    for name in ("middle_tokens", "tokens_read", "tile_bytes", "metadata_bytes"):
        assert stats[0][name] == stats[1][name], name


def counts(world: World) -> dict[str, int]:
    """The engine's counters without the workers' time, which varies."""
    found = world.engine.stats()
    assert 0 <= found.pop("worker_ns") <= world.engine.done()["worker_ns"]
    return found
