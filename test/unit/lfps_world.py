"""Requests with score tables, without an engine: the test dictates the tasks' choices, and a reference follows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from lfps_reference import ReferenceHead

from fluxion_lab.kinds import Listed, listed
from fluxion_lab.lfps_tables import LfpsOptions, LfpsTables
from fluxion_sglang.kv.host_pool import HostPool, KVShape
from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.native import Workers
from fluxion_sglang.policy.base import LayerPlan

ROOM = 2048


def lists_of(plan: LayerPlan) -> Listed:
    """The lists of a plan, with its record and given results."""
    lists = listed(plan)
    assert lists is not None and lists.record is not None and lists.given is not None
    return lists


def listed_positions(plan: LayerPlan, group_index: int, g: int, masks: torch.Tensor | None = None) -> list[int]:
    """Positions that head g of group b * H + h lists (or those of `masks`, in the same order)."""
    lists = lists_of(plan)
    offsets, pages = lists.offsets, lists.pages
    at = slice(*offsets[group_index : group_index + 2].tolist())
    rows = (lists.masks if masks is None else masks)[at, g].tolist()
    return [
        page * PAGE + t
        for page, mask in zip(pages[at].tolist(), rows, strict=True)
        for t in range(PAGE)
        if mask >> t & 1
    ]


@dataclass
class TablesWorld:
    """`keys`, `values`: by row, [n, H, D]. `heads` KV heads of `group` query heads, one layer, float32."""

    heads: int = 2
    group: int = 2
    dim: int = 32
    rows: int = 4
    workers: int = 2
    pages: int = 512
    seed: int = 0
    sharp: float = 2.0  # of scores
    alpha: tuple[float, float] = (0.2, 0.2)
    bypass: float = 1.0
    expand: bool = True
    renormalise: int = 40
    placement: Placement = field(default_factory=lambda: Placement(sinks=32, window=48))

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.pool = HostPool(
            KVShape(1, self.heads, self.dim, torch.float32), self.pages * PAGE, self.placement, Workers(self.workers)
        )
        options = LfpsOptions(*self.alpha, bypass=self.bypass, expand=self.expand, renormalise=self.renormalise)
        self.tables = LfpsTables(self.pool, self.rows, self.q_heads, options)
        self.scale = self.dim**-0.5
        self.free = (torch.randperm(self.pages, generator=self.random) + 1).tolist()
        self.page_lists: dict[int, list[int]] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.reference: dict[tuple[int, int], ReferenceHead] = {}

    @property
    def q_heads(self) -> int:
        return self.heads * self.group

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.random)

    def pages_of(self, row: int) -> torch.Tensor:
        return torch.tensor(self.page_lists[row], dtype=torch.int32)

    def append(self, row: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v: [T, H, D]."""
        empty = torch.empty(0, self.heads, self.dim)
        start = len(self.keys.setdefault(row, empty))
        pages = self.page_lists.setdefault(row, [])
        while len(pages) * PAGE < start + len(k):
            pages.append(self.free.pop())
        self.pool.append(0, self.pages_of(row), start, k, v)
        self.keys[row] = torch.cat([self.keys[row], k])
        self.values[row] = torch.cat([self.values.get(row, empty), v])

    def start(self, row: int, length: int, queries: int = 5, q: torch.Tensor | None = None) -> None:
        """Start a request of `length` random tokens, with tables from `queries` random queries or from q [m, Hq, D]."""
        self.append(row, self.randn(length, self.heads, self.dim), self.randn(length, self.heads, self.dim))
        self.begin(row, self.sharp * self.randn(queries, self.q_heads, self.dim) if q is None else q)

    def begin(self, row: int, q: torch.Tensor) -> None:
        self.tables.begin(0, row, len(self.keys[row]), self.pages_of(row), q, self.scale)
        for head in range(self.q_heads):
            reference = ReferenceHead(self.placement, ROOM, self.alpha, self.expand)
            keys = self.keys[row][:, head // self.group].double().numpy()
            reference.begin(keys, q[:, head].double().numpy(), self.scale)
            self.reference[row, head] = reference

    def lengths(self, rows: list[int]) -> torch.Tensor:
        return torch.tensor([len(self.keys[row]) for row in rows], dtype=torch.int32)

    def plan(self, rows: list[int], q: torch.Tensor, budget: float = 0.1) -> LayerPlan:
        """A step of `rows`: append a random token each, and return the plan for q [B, Hq, D]."""
        for row in rows:
            self.append(row, self.randn(1, self.heads, self.dim), self.randn(1, self.heads, self.dim))
        width = max(len(self.page_lists[row]) for row in rows)
        table = torch.full((len(rows), width), -7, dtype=torch.int32)
        for b, row in enumerate(rows):
            table[b, : len(self.page_lists[row])] = self.pages_of(row)
        at = torch.tensor(rows, dtype=torch.int32)
        return self.tables.plan(0, at, self.lengths(rows), table, q, self.scale, budget)

    def choose(self, rows: list[int], plan: LayerPlan, q: torch.Tensor, keep: float) -> None:
        """Fill in the record of a step: the share `keep` of each head's candidates with the best exact scores."""
        lists = lists_of(plan)
        chosen, scores = lists.record
        scores.fill_(torch.nan)
        for b, row in enumerate(rows):
            for head in range(self.q_heads):
                h, g = divmod(head, self.group)
                positions = listed_positions(plan, b * self.heads + h, g)
                found = self.keys[row][positions, h] @ q[b, head]
                best = found.argsort(descending=True)[: int(keep * len(positions)) + 1].tolist()
                first, end = lists.offsets[b * self.heads + h :][:2].tolist()
                at = {page: i for i, page in enumerate(lists.pages[first:end].tolist(), start=first)}
                for i in best:
                    page, t = divmod(positions[i], PAGE)
                    chosen[at[page], g] = int(chosen[at[page], g]) | 1 << t
                    scores[at[page], g, t] = found[i]

    def learn(self, rows: list[int], plan: LayerPlan, local_lse: torch.Tensor) -> None:
        """Update the native tables and the reference's from the record. local_lse: [B, Hq]."""
        lists = lists_of(plan)
        at = torch.tensor(rows, dtype=torch.int32)
        self.tables.update(0, at, self.lengths(rows), plan, local_lse, self.scale)
        for b, row in enumerate(rows):
            for head in range(self.q_heads):
                if lists.given.lse[b, head] > -torch.inf:
                    continue
                h, g = divmod(head, self.group)
                index = b * self.heads + h
                pages = lists.pages.tolist()
                first = int(lists.offsets[index])
                found = {}
                for p in listed_positions(plan, index, g, lists.record.chosen):
                    found[p] = self.scale * float(lists.record.scores[pages.index(p // PAGE, first), g, p % PAGE])
                self.reference[row, head].update(len(self.keys[row]), found, float(local_lse[b, head]))

    def check_tables(self, row: int) -> None:
        n = len(self.keys[row])
        for head in range(self.q_heads):
            for got, want in zip(self.tables.tables(0, row, head, n), self._truth(row, head, n), strict=True):
                torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-8)

    def _truth(self, row: int, head: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        reference = self.reference[row, head]
        return torch.from_numpy(reference.vertical[:n]), torch.from_numpy(reference.slash[:n])

    def check_candidates(self, rows: list[int], plan: LayerPlan) -> int:
        """Every head's list equals the reference's, except for entries at a limit; returns the number of these."""
        open_ = 0
        given = lists_of(plan).given
        for b, row in enumerate(rows):
            for head in range(self.q_heads):
                h, g = divmod(head, self.group)
                got = listed_positions(plan, b * self.heads + h, g)
                assert got == sorted(set(got))
                if given.lse[b, head] > -torch.inf:
                    assert not got
                    continue
                least, most = (self.reference[row, head].candidates(len(self.keys[row]), s) for s in (1e-4, -1e-4))
                assert least <= set(got) <= most
                open_ += len(most - least)
        return open_
