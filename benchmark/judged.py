"""Measure one row of kernels.py: a kernel or a layer step, compared with its ceilings and with float64."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from statistics import median
from typing import Any

import forks
import peers
import probe
import torch
from cells import Cell
from layers import CHUNK, HEAD_DIM, Steps, empty_step_ns, filled_pool, flush, flushed, own_pages
from roofline import (
    DTYPES,
    KV_HEADS,
    Arena,
    Contender,
    beyond_caches,
    ceilings,
    error,
    exact_attention,
    exact_scores,
    interleave,
    isas,
    judge,
    page_lists,
    queries,
    ratio,
    streamed,
    workers,
)
from torch import Tensor

from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.native import NativePool

ALIKE = 0.3
"""Share of independent noise in each head's query where the choices of a group's heads are united. A smaller share
gives a smaller union, and a larger part of the time outside attention."""


NEAR = 256 << 10
"""Bytes that fit in the second-level cache of every core."""


@dataclass(frozen=True)
class Sizes:
    """Memory in total and memory that a run reads (bytes), and tokens in all requests of a step."""

    rounds: int
    memory: int = field(default_factory=lambda: 2 * beyond_caches(1 << 29))
    read: int = field(default_factory=lambda: beyond_caches(200 << 20))
    tokens: int = 1 << 18

    @classmethod
    def quick(cls) -> Sizes:
        return cls(rounds=2, memory=32 << 20, read=8 << 20, tokens=1 << 13)


@cache
def arena_of(memory: int, read: int) -> Arena:
    return Arena.of(memory, read)


def measure(cell: Cell, sizes: Sizes) -> dict[str, Any] | None:
    """The row of a cell; None if this version of the library lacks something that the cell needs."""
    found = MEASURES[cell.kernel](cell, sizes)
    if found is None:
        return None
    row = {
        "key": cell.key,
        **asdict(cell),
        "bytes": 0,
        "gb_per_s": 0,
        "what": "",
        "value": None,
        "error": None,
        **found,
    }
    known = {**row, row["what"]: row["value"]}
    holds = {">=": operator.ge, "<=": operator.le}
    row["isa"] = cell.isa or isas()[-1]
    row["judged"] = {name: known[name] for name, _, _ in cell.bars if name != "microseconds"}
    row["judged"] |= {name: row[name] for name in ("of_scatter",) if name in row}
    row["bars"] = [f"{name} {sign} {bound:g}" for name, sign, bound in cell.bars]
    row["met"] = all(holds[sign](known[name], bound) for name, sign, bound in cell.bars)
    return row


INT8 = "int8"
PACKED_TILES = 4099
"""Different tiles; not a divisor of the number of tiles in a list."""


@cache
def packed_pool(head_dim: int) -> NativePool:
    """A pool of 8-bit tiles with random numbers; page 0 is not used."""
    pages = PACKED_TILES + 1
    pool = NativePool(
        workers(0),
        layers=1,
        kv_heads=1,
        pages=pages,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        int8=True,
        sink_pages=0,
    )
    size, random = (PACKED_TILES * PAGE, 1, head_dim), torch.Generator().manual_seed(0)
    k, v = (torch.randn(size, generator=random).to(torch.bfloat16) for _ in range(2))
    pool.append(0, torch.arange(1, pages, dtype=torch.int32), 0, k, v)
    return pool


@cache
def packed_arena_of(memory: int, read: int, head_dim: int) -> Arena:
    """Like `arena_of`, but filled with repeated 8-bit tiles."""
    room, tiles = probe.host_memory(workers(0), memory), packed_pool(head_dim).tensor("tiles", 0)[0, 1:].flatten()
    for part in room.split(len(tiles)):
        part.copy_(tiles[: len(part)])
    return Arena(room, read)


@dataclass
class Groups:
    """Tasks of groups of heads: the tiles or entries that each reads, and its queries."""

    arena: Arena
    pieces: Tensor
    tasks: probe.TaskList
    q: Tensor

    @classmethod
    def of(cls, cell: Cell, sizes: Sizes, *shape: int, spread: float = 1.0) -> Groups:
        if cell.dtype == INT8:
            arena, dtype = packed_arena_of(sizes.memory, sizes.read, cell.head_dim), torch.bfloat16
            pieces = arena.pieces(packed_pool(cell.head_dim).tensor("tiles", 0).shape[-1], dtype=torch.uint8)
        else:
            arena, dtype = arena_of(sizes.memory, sizes.read), DTYPES[cell.dtype]
            pieces = arena.pieces(*shape, cell.head_dim, dtype=dtype)
        tasks = page_lists(arena, pieces[0].nbytes, cell.context, cell.budget, cell.blk)
        return cls(arena, pieces, tasks, queries(tasks.tasks, cell.group, cell.head_dim, dtype, spread))

    @property
    def nbytes(self) -> int:
        return len(self.tasks.pieces) * self.pieces[0].nbytes

    def of_task(self, i: int, pieces: Tensor) -> Tensor:
        return pieces[self.tasks.pieces[int(self.tasks.first[i]) : int(self.tasks.first[i + 1])].long()]

    def judged(self, cell: Cell, sizes: Sizes, run: Callable[[probe.TaskList], int]) -> dict[str, Any]:
        """Judge the kernel on its tasks against the ceilings; "cached" is its rate on equal tasks whose pieces lie in a
        cache."""
        pool, memory, size = workers(cell.threads), self.arena.memory, self.pieces[0].nbytes
        readers = ceilings(memory, size, self.tasks, pool, probe.PLANS)
        near = probe.TaskList(self.tasks.pieces % (NEAR // size), self.tasks.first)
        # The kernel runs last, so that the outputs are its results.
        kernels: dict[str, Contender] = {"cached": partial(run, near), "kernel": partial(run, self.tasks)}
        times = interleave({**readers, **kernels}, sizes.rounds)
        row = judge(times, "kernel", self.nbytes, streamed(self.arena.memory).numel())
        return row | {"cached": round(self.nbytes / median(times["cached"]), 2)}


def attend(cell: Cell, sizes: Sizes) -> dict[str, Any]:
    groups = Groups.of(cell, sizes, 2, PAGE)
    q, tasks, tiles, isa = groups.q, groups.tasks, groups.pieces, cell.isa or isas()[-1]
    scale, o, lse = cell.head_dim**-0.5, torch.full(q.shape, torch.nan), torch.full(q.shape[:2], torch.nan)
    pool = workers(cell.threads)
    row = groups.judged(cell, sizes, lambda of: probe.attend(pool, isa, q, scale, tiles, of, o, lse)[0])
    errors = []
    for i in (0, tasks.tasks - 1):
        if cell.dtype == INT8:
            listed = tasks.pieces[int(tasks.first[i]) : int(tasks.first[i + 1])] % PACKED_TILES + 1
            k, v = (part[0] for part in packed_pool(cell.head_dim).gather(0, listed))
        else:
            k, v = (part.reshape(-1, cell.head_dim) for part in groups.of_task(i, tiles).unbind(1))
        errors.append(error(o[i], exact_attention(q[i], k, v, scale)))
    return row | {"error": max(errors)}


def scan(cell: Cell, sizes: Sizes) -> dict[str, Any]:
    groups = Groups.of(cell, sizes, 2)
    q, tasks, entries, isa = groups.q, groups.tasks, groups.pieces, cell.isa or isas()[-1]
    out, pool = torch.full((len(tasks.pieces) * cell.group,), torch.nan), workers(cell.threads)
    row = groups.judged(cell, sizes, lambda of: probe.score(pool, isa, q, entries, of, None)[0])
    probe.score(pool, isa, q, entries, tasks, out)
    want = exact_scores(q[0], groups.of_task(0, entries))
    return row | {"error": error(out[: want.numel()].view_as(want), want)}


def select(cell: Cell, sizes: Sizes) -> dict[str, Any]:
    """Run scan, select and attention in sequence over the same tasks; the value is select's share of the time."""
    pool, isa, G = workers(cell.threads), cell.isa or isas()[-1], cell.group
    dense = Groups.of(Cell(**{**asdict(cell), "blk": 0}), sizes, 2, spread=ALIKE)
    tasks, tiles = dense.tasks, dense.arena.pieces(2, PAGE, cell.head_dim, dtype=DTYPES[cell.dtype])
    blocks = cell.context // PAGE
    k = torch.full((tasks.tasks,), -(-blocks * cell.budget // 1), dtype=torch.int32)
    scores, heads = torch.empty(len(tasks.pieces) * G), torch.empty(len(tasks.pieces), dtype=torch.uint16)
    probe.score(pool, isa, dense.q, dense.pieces, tasks, scores)
    probe.select(pool, isa, scores, tasks.first, k, heads)
    # Chosen blocks of each task. A task owns a part of the memory with as many tiles as it has blocks.
    chosen = [part.to(torch.int32).nonzero().flatten() for part in heads.split(blocks)]
    parts = len(tiles) // blocks
    lists = probe.TaskList.of([own + i % parts * blocks for i, own in enumerate(chosen)])
    o, lse = torch.empty(dense.q.shape), torch.empty(dense.q.shape[:2])
    times = interleave(
        {
            "scan": lambda: probe.score(pool, isa, dense.q, dense.pieces, tasks, scores)[0],
            "select": lambda: probe.select(pool, isa, scores, tasks.first, k, heads)[0],
            "attend": lambda: probe.attend(pool, isa, dense.q, 0.1, tiles, lists, o, lse)[0],
        },
        sizes.rounds,
    )
    whole = [sum(ns) for ns in zip(*times.values(), strict=True)]
    wrong = 0
    for g in range(G):
        best = scores[: G * blocks].view(G, blocks)[g].sort(descending=True, stable=True).indices[: int(k[0])]
        marked = (heads[:blocks].to(torch.int32) >> g & 1).nonzero().flatten()
        wrong += len(set(best.tolist()) ^ set(marked.tolist()))
    return {
        "bytes": dense.nbytes + len(lists.pieces) * tiles[0].nbytes,
        "gb_per_s": round((dense.nbytes + len(lists.pieces) * tiles[0].nbytes) / median(whole), 2),
        "what": "share",
        "value": round(ratio(times["select"], whole), 4),
        "error": wrong / (G * int(k[0])),
    }


def append(cell: Cell, sizes: Sizes) -> dict[str, Any]:
    """Write a prefill chunk to the pool: tiles, metadata of every level, moments."""
    chunk = min(CHUNK, cell.context)
    tables, lengths = own_pages([min(sizes.tokens, cell.context)]), [chunk]
    pool = filled_pool(tables, lengths, cell.threads)
    k, v = (torch.randn(chunk, KV_HEADS, HEAD_DIM).to(torch.bfloat16) for _ in range(2))
    places = len(tables[0]) * PAGE // chunk
    turn = 0

    def run() -> int:
        nonlocal turn
        at = turn % places * chunk
        turn += 1
        start = time.perf_counter_ns()
        pool.append(0, tables[0], at, k, v)
        return time.perf_counter_ns() - start

    memory = arena_of(sizes.memory, sizes.read).memory
    none = probe.TaskList.of([torch.zeros(0)])
    readers = ceilings(memory, 8192, none, pool.workers, probe.PLANS)
    readers = {name: read for name, read in readers.items() if name.startswith("stream")}
    times = interleave({**readers, "kernel": run}, sizes.rounds)
    pages = chunk // PAGE
    metadata = sum(-(-pages >> level) for level in range(4)) * 2 * HEAD_DIM * 2 + pages * (2 * HEAD_DIM + 8) * 8
    nbytes = 2 * (k.nbytes + v.nbytes) + KV_HEADS * metadata  # read and written
    last = (turn - 1) % places * pages
    got = pool.tiles(0)[:, tables[0][last : last + pages].long()]
    want = torch.stack([k, v]).view(2, pages, PAGE, KV_HEADS, HEAD_DIM).permute(3, 1, 0, 2, 4)
    return judge(times, "kernel", nbytes, streamed(memory).numel()) | {"error": error(got, want.double())}


def layer(cell: Cell, sizes: Sizes) -> dict[str, Any]:
    """A batch step: its time over the time that its bytes need, with metadata streamed and tiles scattered."""
    # Lengths differ so that only the first request fills a page in this step and builds its metadata. With equal
    # lengths all would, which is true of one step in 16.
    lengths = [cell.context - 1 - 2 * i for i in range(max(sizes.tokens // cell.context, 1))]
    tables = own_pages(lengths, cell.shuffled)
    pool = filled_pool(tables, lengths, cell.threads)
    steps = Steps(pool, tables, lengths, f"fixed:{cell.blk}:{cell.budget:g}", spread=ALIKE)
    before = steps.engine.stats()
    steps.run()
    counted = {name: value - before[name] for name, value in steps.engine.stats().items()}
    tiles = pool.tiles(0)
    memory = tiles.view(torch.uint8).view(-1)
    tile_bytes = tiles[0, 0].nbytes
    arena = arena_of(sizes.memory, sizes.read)
    turns = [0] * len(probe.PLANS)

    def stream(plan: probe.ReadPlan) -> int:
        return probe.stream(pool.workers, isas()[-1], read, plan)[0][0]

    def scatter(plan: int) -> int:
        lists = steps.selections[turns[plan] % len(steps.selections)][1]
        turns[plan] += 1
        flush(arena, pool.workers)  # as before a step: a large cache still holds tiles that a stream has read
        return probe.scatter(pool.workers, isas()[-1], memory, tile_bytes, lists, probe.PLANS[plan])[0][0]

    read = streamed(memory)
    read = read[: read.numel() // probe.STREAM_PIECE * probe.STREAM_PIECE]
    contenders: dict[str, Callable[[], int]] = {}
    for i, plan in enumerate(probe.PLANS):
        contenders[f"stream {i}"] = partial(stream, plan)
        contenders[f"scatter {i}"] = partial(scatter, i)
    fault = steps.error()
    times = interleave({**contenders, "kernel": lambda: flushed(arena, steps)}, sizes.rounds)
    streams, scatters = ([times[f"{kind} {i}"] for i in range(len(probe.PLANS))] for kind in ("stream", "scatter"))
    best_stream, best_scatter = min(streams, key=median), min(scatters, key=median)
    # Sinks and windows are scattered tiles too, in memory of their own.
    scan_bytes, selected = counted["metadata_bytes"], len(steps.selections[0][1].pieces)
    attended = 1 + steps.resident_tiles / selected
    ideal = [a * scan_bytes / read.numel() + b * attended for a, b in zip(best_stream, best_scatter, strict=True)]
    nbytes = scan_bytes + counted["tile_bytes"] + steps.resident_tiles * tile_bytes
    return {
        "bytes": nbytes,
        "gb_per_s": round(nbytes / median(times["kernel"]), 2),
        "stream": round(read.numel() / median(best_stream), 2),
        "scatter": round(selected * tile_bytes / median(best_scatter), 2),
        "what": "over_ceiling",
        "value": round(ratio(times["kernel"], ideal), 3),
        "error": fault,
    }


def empty(cell: Cell, sizes: Sizes) -> dict[str, Any]:
    native, whole = empty_step_ns(400 if sizes.rounds > 3 else 20)
    return {
        "what": "microseconds",
        "value": round(median(native) / 1e3, 2),
        "with_python_us": round(median(whole) / 1e3, 2),
    }


def imbalance(cell: Cell, sizes: Sizes) -> dict[str, Any] | None:
    """Lengths from 1K to the context: time of the busiest worker over the mean, median over steps."""
    lengths = [n - 1 for n in (1024, 2048, 4096, 8192, 16384, 32768, 65536) if n <= cell.context]
    tables = own_pages(lengths)
    steps = Steps(filled_pool(tables, lengths, cell.threads), tables, lengths, "fixed:16:0.05", spread=ALIKE)
    arena = arena_of(sizes.memory, sizes.read)
    found = []
    for _ in range(sizes.rounds * 3):
        before = steps.engine.native.worker_ns()
        flushed(arena, steps)
        spent = [a - b for a, b in zip(steps.engine.native.worker_ns(), before, strict=True)]
        found.append(max(spent) / (sum(spent) / len(spent)))
    return {"what": "busiest_over_mean", "value": round(median(found), 3), "error": steps.error()}


def forked(cell: Cell, sizes: Sizes) -> dict[str, Any]:
    arena = arena_of(sizes.memory, sizes.read)
    rows = forks.measure(cell.context, [f"fixed:{cell.blk}:{cell.budget:g}"], sizes.rounds, arena)
    row = next(row for row in rows if row["queries"] == "alike" and row["sharing"] != "off")
    return {"what": "over_one", "value": row["over_one"], "error": row["error"]}


def sdpa(cell: Cell, sizes: Sizes) -> dict[str, Any]:
    """torch's attention on selected KV that was gathered before the clock starts, torch's best case."""
    arena = arena_of(sizes.memory, sizes.read)
    gathered = "sdpa bf16, with gather"
    rows = peers.measure(cell.context, cell.budget, sizes.rounds, arena, names=("sdpa bf16", "sdpa f32", gathered))
    over = {row["peer"]: row["over_ours"] for row in rows}
    with_gather = over.pop(gathered)
    best = min(over.values())
    return {"what": "sdpa_over_ours", "value": best, "with_gather": with_gather, "error": rows[0]["error_ours"]}


MEASURES: dict[str, Callable[[Cell, Sizes], dict[str, Any] | None]] = {
    "attend": attend,
    "scan": scan,
    "select": select,
    "append": append,
    "layer": layer,
    "empty": empty,
    "imbalance": imbalance,
    "forks": forked,
    "sdpa": sdpa,
}
