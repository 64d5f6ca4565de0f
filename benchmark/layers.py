"""Layer steps of the engine without a server, on random KV in the shape of a layer of Llama-3.1-8B."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property
from itertools import count

import probe
import torch
from roofline import KV_HEADS, Arena, beyond_caches, error, exact_attention, isas, workers
from torch import Tensor

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.executor.decode import DecodeEngine, native_plan
from fluxion_sglang.executor.host import HostDevice
from fluxion_sglang.kv.host_pool import HostPool, KVShape
from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.kv.windows import Windows
from fluxion_sglang.native import AttentionLayer, Workers
from fluxion_sglang.policy import parse_spec

GROUP, HEAD_DIM = 4, 128
Q_HEADS = KV_HEADS * GROUP
SCALE = HEAD_DIM**-0.5
CHUNK = 4096
VARIANTS = 4
"""Steps that take turns, each with its own queries."""


def filled_pool(
    tables: list[Tensor], lengths: list[int], threads: int = 0, canary: float = 0.0, sketched: bool = False
) -> HostPool:
    """A pool of one layer with requests of `lengths` tokens. tables: page ids of each request; shared pages are written
    once."""
    pages = int(max(int(row.max()) for row in tables))
    shape = KVShape(1, KV_HEADS, HEAD_DIM, torch.bfloat16, sketched=sketched)
    pool = HostPool(shape, pages * PAGE, Placement(), workers(threads), canary=canary)
    random = torch.Generator().manual_seed(0)
    k, v = (torch.randn(CHUNK, KV_HEADS, HEAD_DIM, generator=random).to(torch.bfloat16) for _ in range(2))
    written: set[tuple[int, int]] = set()
    for row, length in zip(tables, lengths, strict=True):
        for start in range(0, length, CHUNK):
            place = (start, int(row[start // PAGE]))
            if place in written:
                continue
            written.add(place)
            n = min(CHUNK, length - start)
            # The same numbers with random signs, so that no two chunks get equal scores.
            signs = torch.randint(0, 2, (1, KV_HEADS, HEAD_DIM), generator=random).mul(2).sub(1).to(torch.bfloat16)
            pool.append(0, row, start, k[:n] * signs, v[:n] * signs)
    return pool


def own_pages(lengths: list[int], shuffled: bool = True) -> list[Tensor]:
    """Page ids of each request: random, as from a long-used allocator, or in order."""
    sizes = [-(-(n + 1) // PAGE) for n in lengths]
    ids = (
        torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(0)) if shuffled else torch.arange(sum(sizes))
    )
    return list((ids + 1).to(torch.int32).split(sizes))


class Steps:
    """A repeated decode step after `lengths` tokens; the variants of the queries take turns.

    Args:
        spread: among the heads of a group (`roofline.queries`). apart: the same among requests; 1: independent.
        sharing: whether requests read a common prefix together; None: the engine's default.
    """

    def __init__(
        self,
        pool: HostPool,
        tables: list[Tensor],
        lengths: list[int],
        policy: str,
        *,
        spread: float = 0.3,
        apart: float = 1.0,
        sharing: bool | None = None,
        seed: int = 0,
    ) -> None:
        batch = len(lengths)
        self.pool, self.lengths, self.tables = pool, lengths, tables
        self.windows = Windows(pool, batch, "cpu")
        options = FluxionConfig() if sharing is None else FluxionConfig(share_prefixes=sharing)
        self.engine = DecodeEngine(
            pool,
            self.windows,
            parse_spec(policy),
            [],
            options,
            q_heads=Q_HEADS,
            max_requests=batch,
            max_tokens=max(lengths) + 1,
        )
        self.device = HostDevice(pool, self.windows, self.engine)
        table = torch.zeros(batch, max(map(len, tables)), dtype=torch.int32)
        for row, (pages, length) in enumerate(zip(tables, lengths, strict=True)):
            table[row, : len(pages)] = pages
            self.windows.heal(row, length, pages)
        self.engine.begin_step(torch.arange(batch), torch.tensor(lengths) + 1, table)
        random = torch.Generator().manual_seed(seed)

        def mixed(shared: Tensor, own: float) -> Tensor:
            return (1 - own**2) ** 0.5 * shared + own * torch.randn(batch, KV_HEADS, GROUP, HEAD_DIM, generator=random)

        self.q = []
        for _ in range(VARIANTS):
            group = torch.randn(1, KV_HEADS, 1, HEAD_DIM, generator=random)
            request = (1 - apart**2) ** 0.5 * group
            request = request + apart * torch.randn(batch, KV_HEADS, 1, HEAD_DIM, generator=random)
            self.q.append(mixed(request, spread).view(batch, Q_HEADS, HEAD_DIM).to(torch.bfloat16))
        size = (batch, KV_HEADS, HEAD_DIM)
        self.k, self.v = (torch.randn(size, generator=random).to(torch.bfloat16) for _ in range(2))
        self._turn: Iterator[int] = count()

    def run(self) -> int:
        """Nanoseconds of the next variant's step."""
        q = self.q[next(self._turn) % VARIANTS]
        start = time.perf_counter_ns()
        self.device.decode(0, q, self.k, self.v, SCALE)
        return time.perf_counter_ns() - start

    @cached_property
    def of(self) -> AttentionLayer:
        return AttentionLayer(self.engine.native, 0, SCALE, self.windows.layers[0])

    @property
    def resident_tiles(self) -> int:
        """Tiles of all sinks and windows."""
        placement = self.pool.placement
        return sum(KV_HEADS * -(-placement.resident(n + 1) // PAGE) for n in self.lengths)

    @cached_property
    def selections(self) -> list[tuple[dict[int, Tensor], probe.TaskList]]:
        """What the tasks of every variant read: pages by b * H + h, and the same as pieces of the pool's tiles."""
        native, found = self.engine.native, []
        batch = len(self.lengths)
        pages = torch.empty(max(map(len, self.tables)), dtype=torch.int32)
        masks = torch.empty(len(pages), GROUP, dtype=torch.uint16)
        for q in self.q:
            plan = native_plan(self.engine._policy.plan(0, q))
            tasks = native.layer_begin(plan, self.of, q, self.k, self.v, torch.empty_like(q))
            read = {native.task(i): pages[: native.selection(i, pages, masks)].clone() for i in range(tasks)}
            native.layer_finish()
            assert all(0 <= key < batch * KV_HEADS for key in read)
            pieces = [key % KV_HEADS * self.pool.pages + own for key, own in read.items()]
            found.append((read, probe.TaskList.of(pieces)))
        return found

    def error(self) -> float:
        """Error of the first request's groups against float64 over the pages that were read."""
        before = next(self._turn)
        self._turn = count(0)
        self.run()
        self._turn = count(before)
        got = torch.empty(len(self.lengths), Q_HEADS, HEAD_DIM)
        self.engine.native.result(got)
        read, _ = self.selections[0]
        n, tiles, placement = self.lengths[0] + 1, self.pool.tiles(0), self.pool.placement
        end = -(-n // PAGE)
        ends = [*range(min(placement.sink_pages, end)), *range(placement.window_start(n) // PAGE, end)]
        residents = self.tables[0][ends]
        worst = 0.0
        for h in range(KV_HEADS):
            pages = torch.cat([read.get(h, residents[:0]), residents]).long()
            k, v = (tiles[h, pages, part].reshape(-1, HEAD_DIM) for part in range(2))
            valid = len(k) - (-n) % PAGE
            heads = slice(h * GROUP, (h + 1) * GROUP)
            want = exact_attention(self.q[0][0, heads], k[:valid], v[:valid], SCALE)
            worst = max(worst, error(got[0, heads], want))
        return worst


def empty_step_ns(calls: int = 400) -> tuple[list[int], list[int]]:
    """Nanoseconds of a step with one token and no tasks: native begin and finish, and the same with policy and
    Python."""
    tables, lengths = own_pages([1]), [1]
    steps = Steps(filled_pool(tables, lengths), tables, lengths, "full")
    engine, q = steps.engine, steps.q[0]
    plan = native_plan(engine._policy.plan(0, q))
    out = torch.empty_like(q)
    native: list[int] = []
    whole: list[int] = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        engine.native.layer_begin(plan, steps.of, q, steps.k, steps.v, out)
        engine.native.layer_finish()
        native.append(time.perf_counter_ns() - start)
        whole.append(steps.run())
    return native, whole


def flush(arena: Arena, workers: Workers) -> None:
    """Fill the caches with other memory."""
    probe.stream(workers, isas()[-1], arena.memory[: beyond_caches(1 << 27)], probe.PLANS[0])


def flushed(arena: Arena, steps: Steps) -> int:
    """Nanoseconds of a step that starts with flushed caches."""
    flush(arena, steps.pool.workers)
    return steps.run()
