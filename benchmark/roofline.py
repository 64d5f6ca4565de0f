"""How a kernel is judged: interleaved with what the memory gives for the very same list of pieces, in one process.

A round times every contender once, in turns; a ratio is the median over rounds of ratios within a round, so that a
machine that drifts drifts out. Of several ways to read memory (`probe.PLANS`) the best one is the ceiling.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any

import probe
import torch
from torch import Tensor

from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.native import Workers, topology

KV_HEADS = 8
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


@cache
def isas() -> list[str]:
    return [str(isa) for isa in topology()["isas"]]


@cache
def beyond_caches(nbytes: int) -> int:
    """Bytes, at least so many, after the reading of which no cache has anything from before: twice the last caches of
    the whole machine, whichever of its hardware threads are this process's."""
    return max(nbytes, 2 * int(topology()["last_cache_bytes_per_thread"]) * (os.cpu_count() or 1))


def streamed(memory: Tensor) -> Tensor:
    """What one run of a stream reads."""
    return memory[: beyond_caches(1 << 28)]


@cache
def workers(threads: int) -> Workers:
    """Threads on cores of their own; 0: one a core."""
    cores = [int(core) for core in topology()["cores"]]
    count = threads or len(cores)
    return Workers(count, torch.tensor(cores, dtype=torch.int32))


@dataclass
class Arena:
    """Memory far larger than any cache, full of normal bfloat16 numbers, seen as whatever a kernel reads."""

    memory: Tensor
    read: int
    """Bytes that one run reads, at least, so that nothing is left of it in a cache when the next one begins."""

    @classmethod
    def of(cls, nbytes: int, read: int) -> Arena:
        memory = probe.host_memory(workers(0), nbytes)
        # Rows of an odd length, so that no two tiles are alike.
        random = torch.randn((1 << 21) + 77, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        for part in memory.view(torch.bfloat16).split(len(random)):
            part.copy_(random[: len(part)])
        return cls(memory, read)

    def pieces(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """As many pieces of `shape` as there is room for."""
        flat = self.memory.view(dtype)
        size = torch.Size(shape).numel()
        return flat[: len(flat) // size * size].view(-1, *shape)


Contender = Callable[[], int]
"""Runs once, and says in how many nanoseconds."""


def interleave(contenders: Mapping[str, Contender], rounds: int) -> dict[str, list[int]]:
    """Nanoseconds of every contender in every round, after one round that warms up."""
    times: dict[str, list[int]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            ns = run()
            if turn > 0:
                times[name].append(ns)
    return times


def ratio(top: Sequence[float], bottom: Sequence[float]) -> float:
    """The median over rounds of top over bottom."""
    return median(a / b for a, b in zip(top, bottom, strict=True))


def ceilings(
    memory: Tensor, piece_bytes: int, tasks: probe.TaskList, pool: Workers, plans: tuple[probe.ReadPlan, ...]
) -> dict[str, Contender]:
    """Every plan as a reader of memory from end to end, and of the list."""
    isa = isas()[-1]

    def once(read: Callable[..., tuple[list[int], int]], *args: Any) -> int:
        return read(pool, isa, *args)[0][0]

    found: dict[str, Contender] = {}
    for plan in plans:
        found[f"stream {plan.streams}:{plan.ahead}"] = partial(once, probe.stream, streamed(memory), plan)
        found[f"scatter {plan.streams}:{plan.ahead}"] = partial(once, probe.scatter, memory, piece_bytes, tasks, plan)
    return found


def judge(times: dict[str, list[int]], name: str, nbytes: int, streamed: int) -> dict[str, Any]:
    """A contender that reads `nbytes`, beside the best plans; rates in 10^9 bytes a second.

    of_stream and of_scatter are shares of what the best plan reads in the same time; stream reads `streamed` bytes a
    run, scatter `nbytes`.
    """
    row: dict[str, Any] = {"bytes": nbytes, "gb_per_s": round(nbytes / median(times[name]), 2)}
    for kind, size in (("stream", streamed), ("scatter", nbytes)):
        plans = {plan: ns for plan, ns in times.items() if plan.startswith(f"{kind} ")}
        if not plans:
            continue
        best = min(plans, key=lambda plan: ratio(plans[plan], times[name]))
        row[kind] = round(size / median(plans[best]), 2)
        row[f"{kind}_plan"] = best.split()[1]
        row[f"of_{kind}"] = round(ratio(plans[best], times[name]) * nbytes / size, 4)
    return row


def page_lists(arena: Arena, tile_bytes: int, context: int, budget: float, blk: int, seed: int = 0) -> probe.TaskList:
    """What the groups of requests of `context` tokens read: `budget` of each one's blocks of `blk` tokens, or the whole
    context where blk is 0 (dense). Blocks lie anywhere, the pages of a block follow one another."""
    random = torch.Generator().manual_seed(seed)
    pages, held = context // PAGE, arena.memory.numel() // tile_bytes
    run = blk // PAGE if blk else pages
    blocks = max(round(pages // run * budget), 1) if blk else 1
    count = max(-(-arena.read // (blocks * run * tile_bytes)), 2 * workers(0).count)
    # Drawn without repetition, and anew when all is drawn: a block is not read again while a cache may hold it.
    places = held // run
    drawn = [torch.randperm(places, generator=random) for _ in range(-(-count * blocks // places))]
    starts = torch.cat(drawn)[: count * blocks].view(count, blocks) * run
    return probe.TaskList.of(list((starts[:, :, None] + torch.arange(run)).view(count, -1)))


def queries(tasks: int, group: int, head_dim: int, dtype: torch.dtype, spread: float = 1.0) -> Tensor:
    """[tasks, G, D]: heads that share a direction, and have `spread` of their own."""
    random = torch.Generator().manual_seed(1)
    shared = torch.randn(tasks, 1, head_dim, generator=random)
    own = torch.randn(tasks, group, head_dim, generator=random)
    return (((1 - spread**2) ** 0.5) * shared + spread * own).to(dtype)


def error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||."""
    return float((got.double() - want).norm() / want.norm())


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[G, D] of q [G, D] over k, v [n, D], in float64."""
    weights = torch.softmax(q.double() @ k.double().T * scale, -1)
    return weights @ v.double()


def exact_scores(q: Tensor, entries: Tensor) -> Tensor:
    """[G, n]: sum_d max(q_d min_d, q_d max_d), in float64."""
    low, high = entries.double().unbind(1)
    q = q.double()
    return q.clamp(min=0) @ high.T + q.clamp(max=0) @ low.T
