"""The prototype of multi-head latent attention, beside what memory gives and what a matrix product gives.

    python benchmark/mla.py            # about two minutes; needs nothing beyond what SGLang brings
    python benchmark/mla.py --quick

Latents are bfloat16, in tiles of 16 tokens in huge pages. Requests of 32K tokens attend to all of them, or to 5% of
them in blocks of 16 that lie anywhere. Kernel, streams, scatters, a product of matrices and the scan of the metadata
take turns. Memory limits a kernel that nears the stream, and arithmetic one that nears the product. docs/mla.md has the
design. Results go to mla.json in benchmark/results/<machine>.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import Any

import common

from fluxion_sglang import openmp

if __name__ == "__main__":
    openmp.wait_passively()  # before torch is loaded

import torch
from roofline import Arena, Contender, beyond_caches, ceilings, interleave, isas, judge, page_lists, ratio, workers
from roofline import error as distance
from roofline import exact_attention as exact
from torch import Tensor

from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.native import probe

LATENT, VALUES = 576, 512
SCALE = 192**-0.5  # of DeepSeek: of a head's query before it is absorbed
HEADS = (16, 32, 64, 128)
"""Of DeepSeek-V2-Lite and DeepSeek-V3; those between are DeepSeek-V3's on two, four and eight ranks."""
FEW_AND_MANY = (HEADS[0], HEADS[-1])
CONTEXT, BUDGET = 32768, 0.05
SCAN_HEADS, SCAN_ENTRIES = 16, 128
"""Heads that a call scores for, and entries: these stay in a core's cache until all heads have been scored."""
MATRIX, QUICK_MATRIX = 4096, 512
TILE_BYTES, ENTRY_BYTES = PAGE * LATENT * 2, 2 * LATENT * 2
CORRELATIONS = (0.0, 0.5, 0.9, 0.99)

Row = dict[str, Any]


@dataclass
class Work:
    """Heads of every task over the latents that it lists."""

    tiles: Tensor
    tasks: probe.TaskList
    heads: int
    isa: str

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.heads)
        # Of logits between which a softmax tells.
        self.q = torch.randn(self.tasks.tasks, self.heads, LATENT, generator=random).mul(2).to(torch.bfloat16)
        self.o = torch.empty(self.tasks.tasks, self.heads, VALUES)
        self.lse = torch.empty(self.tasks.tasks, self.heads)

    @property
    def tokens(self) -> int:
        return PAGE * len(self.tasks.pieces)

    @property
    def operations(self) -> float:
        return 2.0 * self.tokens * self.heads * (LATENT + VALUES)

    def run(self) -> int:
        args = self.q, SCALE, self.tiles, self.tasks, self.o, self.lse
        return probe.attend_latents(workers(0), self.isa, *args)[0]

    def latents(self, task: int) -> Tensor:
        first, end = self.tasks.first[task : task + 2].tolist()
        return self.tiles[self.tasks.pieces[first:end].long()].flatten(0, 1)

    def error(self) -> float:
        """Of the first task's outputs; run before."""
        latents = self.latents(0)
        return distance(self.o[0], exact(self.q[0], latents, latents[:, :VALUES], SCALE))

    def peer(self) -> int:
        """As many tokens by torch, in its fastest form: two products a request, over latents that lie side by side."""
        requests = self.tiles.flatten(0, 1)[: self.tokens].chunk(self.tasks.tasks)
        start = perf_counter_ns()
        for q, latents in zip(self.q, requests, strict=True):
            weights = torch.softmax((q @ latents.T).float() * SCALE, -1)
            torch.mm(weights.to(torch.bfloat16), latents[:, :VALUES])
        return perf_counter_ns() - start


def scan(arena: Arena, tasks: probe.TaskList, heads: int) -> Contender:
    """Bounds of all listed pages for all heads: some entries for SCAN_HEADS heads after another, then the next ones."""
    entries, parts = arena.pieces(2, LATENT, dtype=torch.bfloat16), heads // SCAN_HEADS
    lists = probe.TaskList.of([part for part in tasks.pieces.split(SCAN_ENTRIES) for _ in range(parts)])
    q = torch.randn(lists.tasks, SCAN_HEADS, LATENT).to(torch.bfloat16)
    return lambda: probe.score(workers(0), isas()[-1], q, entries, lists, None)[0]


def product(size: int) -> Contender:
    square = torch.randn(size, size).to(torch.bfloat16)

    def run() -> int:
        start = perf_counter_ns()
        torch.mm(square, square)
        return perf_counter_ns() - start

    return run


def measure(arena: Arena, what: str, tasks: probe.TaskList, others: bool, size: int, rounds: int) -> list[Row]:
    """others: also other instruction sets, torch, and the scan of the metadata."""
    tiles, best = arena.pieces(PAGE, LATENT, dtype=torch.bfloat16), isas()[-1]
    works = {f"{best} {heads}": Work(tiles, tasks, heads, best) for heads in HEADS}
    if others:
        # The scalar kernels are what others are compared with, not what anybody would run.
        slower = [(isa, heads) for isa in isas()[1:-1] for heads in FEW_AND_MANY]
        works |= {f"{isa} {heads}": Work(tiles, tasks, heads, isa) for isa, heads in slower}
    contenders: dict[str, Contender] = {name: work.run for name, work in works.items()}
    if others:
        contenders |= {f"torch {heads}": works[f"{best} {heads}"].peer for heads in FEW_AND_MANY}
        contenders |= {f"scan {heads}": scan(arena, tasks, heads) for heads in FEW_AND_MANY}
    contenders |= ceilings(arena.memory, TILE_BYTES, tasks, workers(0), probe.PLANS) | {"matrix": product(size)}
    times = interleave(contenders, rounds)
    matrix = 2.0 * size**3
    found = []
    for name, work in works.items():
        judged = judge(times, name, TILE_BYTES * len(tasks.pieces), beyond_caches(1 << 28))
        row = {
            "list": what,
            "isa": work.isa,
            "heads": work.heads,
            "ms": round(median(times[name]) / 1e6, 2),
            **{key: judged[key] for key in ("gb_per_s", "stream", "of_stream", "of_scatter")},
            "gflop_per_s": round(work.operations / median(times[name]), 1),
            "matrix": round(matrix / median(times["matrix"]), 1),
            "of_matrix": round(ratio(times["matrix"], times[name]) * work.operations / matrix, 3),
            "error": float(f"{work.error():.2g}"),
        }
        if f"torch {work.heads}" in times and work.isa == best:
            row["torch_over_ours"] = round(ratio(times[f"torch {work.heads}"], times[name]), 2)
            row["scan_over_ours"] = round(ratio(times[f"scan {work.heads}"], times[name]), 3)
            row["scan_gb_per_s"] = round(ENTRY_BYTES * len(tasks.pieces) / median(times[f"scan {work.heads}"]), 2)
        found.append(row)
    return found


def unions(heads: int, blocks: int, rounds: int = 20) -> list[Row]:
    """What heads of one latent read that each choose BUDGET of the blocks, by how alike their scores are: normal
    numbers, of which any two heads' have this correlation.

    union: the share of blocks that some head chose. shared: the share of its own choice that a head finds among BUDGET
    of the blocks, chosen for all heads by the mean of their scores.
    """
    random, count, found = torch.Generator().manual_seed(heads), round(blocks * BUDGET), []
    for alike in CORRELATIONS:
        union, shared = [], []
        for _ in range(rounds):
            alike_part, own = (torch.randn(n, blocks, generator=random) for n in (1, heads))
            scores = alike**0.5 * alike_part + (1 - alike) ** 0.5 * own
            chosen = torch.zeros_like(scores).scatter_(1, scores.topk(count).indices, 1.0)
            union.append(float(chosen.amax(0).mean()))
            shared.append(float(chosen[:, scores.mean(0).topk(count).indices].sum(1).mean()) / count)
        found.append(
            {"heads": heads, "alike": alike, "union": round(median(union), 3), "shared": round(median(shared), 3)}
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="short contexts; the result file is not a published one")
    parser.add_argument("--machine", default=common.machine_name(), help="folder under benchmark/results")
    args = parser.parse_args()
    torch.set_num_threads(workers(0).count)
    context, size, rounds = (1024, QUICK_MATRIX, 2) if args.quick else (CONTEXT, MATRIX, args.rounds)
    read = 1 << 22 if args.quick else 1 << 28
    arena = Arena.of(beyond_caches(1 << 28) + 2 * read, read)
    rows = []
    lists: dict[str, Callable[[], probe.TaskList]] = {
        "all of 32K": partial(page_lists, arena, TILE_BYTES, context, 1.0, 0),
        "5% of 32K": partial(page_lists, arena, TILE_BYTES, context, BUDGET, PAGE),
    }
    for what, tasks in lists.items():
        for row in measure(arena, what, tasks(), what.startswith("all"), size, rounds):
            rows.append(row)
            rates = f"{row['gb_per_s']:.2f} GB/s, {row['gflop_per_s']:.1f} GFLOP/s"
            shares = f"{row['of_stream']:.0%} of the stream, {row['of_matrix']:.0%} of the product"
            print(f"{what}, {row['isa']}, {row['heads']} heads: {rates}; {shares}; error {row['error']}", flush=True)
    rows += [row for heads in FEW_AND_MANY for row in unions(heads, context // PAGE)]
    path = common.RESULTS / args.machine / f"mla{'_quick' if args.quick else ''}.json"
    common.save(path, {**common.header("mla"), "rounds": rounds, "budget": BUDGET, "rows": rows})
    print(f"{path.relative_to(common.ROOT)}: {len(rows)} rows.")


if __name__ == "__main__":
    main()
