"""Judge a kernel: interleave it with plain reads of the same list of pieces, in one process.

A round times every contender once, in turns. A ratio is the median over rounds of the ratios within a round, so drift
of the machine cancels out. The best of several ways to read memory (`probe.PLANS`) is the ceiling.
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
    """Number of bytes, at least `nbytes`, whose reading evicts all earlier data from all caches: twice the last-level
    caches of the whole machine, including those of hardware threads outside this process."""
    return max(nbytes, 2 * int(topology()["last_cache_bytes_per_thread"]) * (os.cpu_count() or 1))


def streamed(memory: Tensor) -> Tensor:
    """The memory that one run of a stream reads."""
    return memory[: beyond_caches(1 << 28)]


@cache
def workers(threads: int) -> Workers:
    """Worker threads on separate cores; 0: one per core."""
    cores = [int(core) for core in topology()["cores"]]
    count = threads or len(cores)
    return Workers(count, torch.tensor(cores, dtype=torch.int32))


@dataclass
class Arena:
    """Memory far larger than all caches, with normal bfloat16 numbers, viewed as the pieces of a kernel."""

    memory: Tensor
    read: int
    """Minimum bytes of a run; enough that the next run finds nothing in a cache."""

    @classmethod
    def of(cls, nbytes: int, read: int) -> Arena:
        memory = probe.host_memory(workers(0), nbytes)
        # Rows of an odd length, so that all tiles differ.
        random = torch.randn((1 << 21) + 77, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        for part in memory.view(torch.bfloat16).split(len(random)):
            part.copy_(random[: len(part)])
        return cls(memory, read)

    def pieces(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """All pieces of `shape` that fit."""
        flat = self.memory.view(dtype)
        size = torch.Size(shape).numel()
        return flat[: len(flat) // size * size].view(-1, *shape)


Contender = Callable[[], int]
"""Runs once and returns nanoseconds."""


def interleave(contenders: Mapping[str, Contender], rounds: int) -> dict[str, list[int]]:
    """Nanoseconds of every contender in every round, after one warm-up round."""
    times: dict[str, list[int]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            ns = run()
            if turn > 0:
                times[name].append(ns)
    return times


def ratio(top: Sequence[float], bottom: Sequence[float]) -> float:
    """Median over rounds of top / bottom."""
    return median(a / b for a, b in zip(top, bottom, strict=True))


def ceilings(
    memory: Tensor, piece_bytes: int, tasks: probe.TaskList, pool: Workers, plans: tuple[probe.ReadPlan, ...]
) -> dict[str, Contender]:
    """Every plan as a reader of the memory from end to end, and of the list."""
    isa = isas()[-1]

    def once(read: Callable[..., tuple[list[int], int]], *args: Any) -> int:
        return read(pool, isa, *args)[0][0]

    found: dict[str, Contender] = {}
    for plan in plans:
        found[f"stream {plan.streams}:{plan.ahead}"] = partial(once, probe.stream, streamed(memory), plan)
        found[f"scatter {plan.streams}:{plan.ahead}"] = partial(once, probe.scatter, memory, piece_bytes, tasks, plan)
    return found


def judge(times: dict[str, list[int]], name: str, nbytes: int, streamed: int) -> dict[str, Any]:
    """Row of a contender that reads `nbytes`, beside the best plans; rates in 10^9 bytes a second.

    of_stream and of_scatter are shares of the bytes that the best plan reads in the same time. Stream reads `streamed`
    bytes per run, scatter `nbytes`.
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
    """Pieces that groups of requests with `context` tokens read: a share `budget` of each one's blocks of `blk` tokens,
    or the whole context if blk is 0 (dense). Blocks are scattered; the pages of a block are consecutive."""
    random = torch.Generator().manual_seed(seed)
    pages, held = context // PAGE, arena.memory.numel() // tile_bytes
    run = blk // PAGE if blk else pages
    blocks = max(round(pages // run * budget), 1) if blk else 1
    count = max(-(-arena.read // (blocks * run * tile_bytes)), 2 * workers(0).count)
    # Draw without repetition until all blocks are drawn, so that no block is read again while a cache may hold it.
    places = held // run
    drawn = [torch.randperm(places, generator=random) for _ in range(-(-count * blocks // places))]
    starts = torch.cat(drawn)[: count * blocks].view(count, blocks) * run
    return probe.TaskList.of(list((starts[:, :, None] + torch.arange(run)).view(count, -1)))


def queries(tasks: int, group: int, head_dim: int, dtype: torch.dtype, spread: float = 1.0) -> Tensor:
    """[tasks, G, D]: the heads share a direction; `spread` is the share of their own."""
    random = torch.Generator().manual_seed(1)
    shared = torch.randn(tasks, 1, head_dim, generator=random)
    own = torch.randn(tasks, group, head_dim, generator=random)
    return (((1 - spread**2) ** 0.5) * shared + spread * own).to(dtype)


def error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||."""
    return float((got.double() - want).norm() / want.norm())


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention [G, D] of q [G, D] over k, v [n, D], in float64."""
    weights = torch.softmax(q.double() @ k.double().T * scale, -1)
    return weights @ v.double()


def exact_scores(q: Tensor, entries: Tensor) -> Tensor:
    """[G, n]: sum_d max(q_d min_d, q_d max_d), in float64."""
    low, high = entries.double().unbind(1)
    q = q.double()
    return q.clamp(min=0) @ high.T + q.clamp(max=0) @ low.T
