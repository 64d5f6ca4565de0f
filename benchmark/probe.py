"""Measure the memory of this machine and how well kernels use it: timed runs on the native workers.

A run executes a list of tasks once over all workers; the library measures its time. A *stream* reads memory from one
end to the other. A *scatter* only reads the pieces (tiles, metadata entries) that a kernel's tasks list, which is the
ceiling of that kernel. The best way to read memory depends on the machine, so each has several plans, and the best one
counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tvm_ffi

from fluxion_sglang.native import Workers, companion

_BUILT = Path(__file__).resolve().parents[1] / "build" / "native" / "tests"
_BLOCKING = {"host_memory", "probe_read", "probe_attend", "probe_score", "probe_select"}
_NONE = torch.empty(0, dtype=torch.int32)


@cache
def library() -> tvm_ffi.Module:
    """The library of `csrc/probe`, built by `make native-tests`: timed runs, and every kernel as k_NAME(isa, ...).

    Raises:
        NativeLibraryError: the library is missing or cannot be loaded.
    """
    return companion(
        Path(os.environ.get("FLUXION_DEVICE_LIBRARIES") or _BUILT) / "libfluxion_probe.so",
        "build it with `make native-tests`",
    )


@cache
def function(name: str) -> Callable[..., Any]:
    """A function of the library; long-running ones release the GIL."""
    bound = library().get_function(name)
    bound.release_gil = name in _BLOCKING
    return bound


class ReadPlan(NamedTuple):
    """How a list of pieces is read: `streams` (1, 2 or 4) pieces in parallel, one cache line of each in turn. Every
    line is prefetched `ahead` lines of its stream before its use; 0 leaves prefetching to the hardware."""

    streams: int
    ahead: int


PLANS = (ReadPlan(1, 0), ReadPlan(1, 128), ReadPlan(2, 64), ReadPlan(4, 0), ReadPlan(4, 32))


@dataclass(frozen=True)
class TaskList:
    """Task i reads pieces[first[i]:first[i + 1]].

    Attributes:
        pieces: [n] int32, ids of pieces.
        first: [tasks + 1] int64, from 0 to n.
    """

    pieces: torch.Tensor
    first: torch.Tensor

    @classmethod
    def of(cls, lists: list[torch.Tensor]) -> TaskList:
        sizes = torch.tensor([0, *(len(pieces) for pieces in lists)])
        return cls(torch.cat(lists).to(torch.int32), sizes.cumsum(0))

    @property
    def tasks(self) -> int:
        return len(self.first) - 1


def host_memory(workers: Workers, nbytes: int) -> torch.Tensor:
    """[nbytes] uint8, zero, in huge pages if the machine has them; the workers have touched all pages.

    Raises:
        RuntimeError: there is not enough memory; the message says how much is available.
    """
    return torch.from_dlpack(function("host_memory")(workers.handle, nbytes))


def scatter(
    workers: Workers, isa: str, memory: torch.Tensor, piece_bytes: int, tasks: TaskList, plan: ReadPlan, runs: int = 1
) -> tuple[list[int], int]:
    """Read the pieces that the tasks list.

    Args:
        memory: uint8, for instance a host pool's tiles or metadata. Piece i starts at i * piece_bytes, a multiple of
            64.

    Returns:
        Nanoseconds of each run; the sum of all 32-bit words that one run reads, modulo 2^32.
    """
    ns = torch.empty(runs, dtype=torch.int64)
    total = function("probe_read")(
        workers.handle, isa, memory, piece_bytes, tasks.pieces, tasks.first, plan.streams, plan.ahead, ns
    )
    return ns.tolist(), int(total)


STREAM_PIECE = 8192
STREAM_TASK = 512
"""Pieces of a stream per task: 4 MiB, enough that the cost of a pop is negligible."""


def stream(workers: Workers, isa: str, memory: torch.Tensor, plan: ReadPlan, runs: int = 1) -> tuple[list[int], int]:
    """Read `memory` (uint8, a multiple of 8 KiB) from one end to the other; returns as `scatter` does."""
    count = memory.numel() // STREAM_PIECE
    first = torch.tensor([*range(0, count, STREAM_TASK), count])
    return scatter(workers, isa, memory, STREAM_PIECE, TaskList(_NONE, first), plan, runs)


def attend(
    workers: Workers,
    isa: str,
    q: torch.Tensor,
    scale: float,
    tiles: torch.Tensor,
    tasks: TaskList,
    o: torch.Tensor,
    lse: torch.Tensor,
    masks: torch.Tensor | None = None,
    runs: int = 1,
) -> list[int]:
    """Attend to the tiles that each task lists.

    Args:
        q: [tasks, G, D], KV dtype. tiles: [P, 2, 16, D], KV dtype. o: [tasks, G, D] and lse: [tasks, G], float32,
            written. masks: [n, G] uint16, bit t of [i, g]: head g attends to token t of the list's tile i; None: all.

    Returns:
        Nanoseconds of each run.
    """
    ns = torch.empty(runs, dtype=torch.int64)
    masks = torch.empty(0, dtype=torch.uint16) if masks is None else masks
    function("probe_attend")(workers.handle, isa, q, scale, tiles, tasks.pieces, tasks.first, masks, o, lse, ns)
    return ns.tolist()


def score(
    workers: Workers,
    isa: str,
    q: torch.Tensor,
    entries: torch.Tensor,
    tasks: TaskList,
    out: torch.Tensor | None,
    spread: float = 1.0,
    runs: int = 1,
) -> list[int]:
    """Score the blocks whose metadata entries each task lists.

    Args:
        q: [tasks, G, D], KV dtype. entries: [E, 2, D], KV dtype. out: [G n] float32, written: task i writes
            [G, its size] from G * first[i]. None: every worker overwrites its own buffer, as in the engine, where
            scores stay in a cache.

    Returns:
        Nanoseconds of each run.
    """
    ns = torch.empty(runs, dtype=torch.int64)
    function("probe_score")(workers.handle, isa, q, entries, tasks.pieces, tasks.first, spread, out, ns)
    return ns.tolist()


def select(
    workers: Workers,
    isa: str,
    scores: torch.Tensor,
    first: torch.Tensor,
    k: torch.Tensor,
    heads: torch.Tensor,
    runs: int = 1,
) -> list[int]:
    """Mark the k[i] best blocks of every head of task i.

    Args:
        scores: [G n] float32 as `score` writes them. first: [tasks + 1] int64. k: [tasks] int32. heads: [n] uint16,
            written: bit g is set in blocks that head g selects.

    Returns:
        Nanoseconds of each run.
    """
    ns = torch.empty(runs, dtype=torch.int64)
    function("probe_select")(workers.handle, isa, scores, first, k, heads, ns)
    return ns.tolist()
