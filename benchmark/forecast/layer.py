"""Simulate the attention of one layer on many workers, event by event.

The simulation follows the engine (`csrc/engine/work.cc`): a worker pops a task and executes its stages. When the queue
is empty it helps with open stages of other workers, chunk by chunk. The simulation leaves out the merge of results and
time that the operating system takes.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forecast.hardware import Domain

CHUNK_BYTES = 512 << 10
MAX_CHUNKS = 64
"""Same as `kChunkBytes` in csrc/engine/layer.h and `kMaxChunks` in csrc/engine/scratch.h."""
TIME = "time"
"""Kernel of a stage that reads nothing; its bytes count nanoseconds."""


@dataclass(frozen=True)
class Kernel:
    """Reading speed of one worker with a kernel.

    Attributes:
        near: GB/s from the worker's own cache, which is its speed of computing.
        overlap: how far computing hides behind reading. A byte takes (near^-p + memory^-p)^(1/p), p = overlap. With p =
            1 nothing is hidden; with p towards infinity everything is.
        scattered: share of a stream's memory rate that a list of scattered pieces reaches.
    """

    near: float
    overlap: float = 8.0
    scattered: float = 1.0

    def rate(self, offered: float) -> float:
        """GB/s if memory offers `offered` GB/s to a stream."""
        p, memory = self.overlap, offered * self.scattered
        # Divide by the smaller one, so that no power overflows a float.
        least, most = min(self.near, memory), max(self.near, memory)
        return least * (1 + (least / most) ** p) ** (-1 / p)


@dataclass(frozen=True)
class Stage:
    kernel: str
    nbytes: float

    @property
    def chunks(self) -> int:
        if self.kernel == TIME:
            return 1
        return min(max(math.ceil(self.nbytes / CHUNK_BYTES), 1), MAX_CHUNKS)


Task = Sequence[Stage]


@dataclass
class _Open:
    """A stage in progress: its owner, and the workers at it."""

    stage: Stage
    owner: int
    at: set[int]


class Outcome(NamedTuple):
    """Attention of a layer: nanoseconds until the last worker is done, and bytes read by all workers."""

    ns: float
    nbytes: float


class Layer:
    """The workers of `domain` execute `items`, then take `tasks` in order."""

    def __init__(
        self, items: Sequence[Task], tasks: Sequence[Task], domain: Domain, kernels: Mapping[str, Kernel]
    ) -> None:
        self._domain, self._kernels = domain, kernels
        # The engine takes items from a counter and tasks from a queue; each costs one pop.
        self._queue = deque([*items, *tasks])
        self._nbytes = sum(s.nbytes for task in self._queue for s in task if s.kernel != TIME)
        self._now = 0.0
        self._free = 0.0  # time at which the word of the queue is free for the next pop
        self._idle = list(range(domain.workers))
        self._left: list[deque[Stage]] = [deque() for _ in self._idle]  # stages of a worker's own task
        self._open: dict[int, _Open] = {}  # by owner
        self._of: list[int] = [-1] * domain.workers  # owner of the stage that a worker executes
        # All workers of a kernel progress at the same rate. The kernel's clock counts the bytes that each has read
        # since the start.
        self._clock = dict.fromkeys([*kernels, TIME], 0.0)
        self._active = dict.fromkeys(self._clock, 0)
        self._ends: dict[str, list[tuple[float, int, int]]] = {name: [] for name in self._clock}
        self._end = [0.0] * domain.workers
        self._version = [0] * domain.workers

    def run(self) -> Outcome:
        workers, self._idle = self._idle, []
        for worker in workers:
            self._next(worker)
        self._share()
        while any(self._active.values()):
            self._advance()
        return Outcome(self._now, self._nbytes)

    def _next(self, worker: int) -> None:
        """Start the next stage of the worker's task or of its next task; if there is none, the worker is idle."""
        if not self._left[worker]:
            if not self._queue:
                self._idle.append(worker)
                return
            taken = max(self._now, self._free)
            self._free = taken + self._domain.hop_ns
            self._left[worker].extend([Stage(TIME, self._free - self._now), *self._queue.popleft()])
        stage = self._left[worker].popleft()
        self._open[worker] = _Open(stage, worker, {worker})
        self._begin(worker, worker, stage.nbytes)

    def _begin(self, worker: int, owner: int, nbytes: float) -> None:
        kernel = self._open[owner].stage.kernel
        self._of[worker] = owner
        self._active[kernel] += 1
        self._until(worker, kernel, nbytes)

    def _until(self, worker: int, kernel: str, nbytes: float) -> None:
        self._version[worker] += 1
        self._end[worker] = self._clock[kernel] + nbytes
        heapq.heappush(self._ends[kernel], (self._end[worker], worker, self._version[worker]))

    def _rates(self) -> dict[str, float]:
        reading = sum(n for name, n in self._active.items() if name != TIME)
        offered = self._domain.offered(reading)
        return {
            name: 1.0 if name == TIME else self._kernels[name].rate(offered)
            for name, count in self._active.items()
            if count
        }

    def _advance(self) -> None:
        """Advance to the next moment at which a worker finishes its bytes."""
        rates = self._rates()
        first, step = "", math.inf
        for name, rate in rates.items():
            ends = self._ends[name]
            while ends[0][2] != self._version[ends[0][1]]:
                heapq.heappop(ends)
            if (left := max(ends[0][0] - self._clock[name], 0.0) / rate) < step:
                first, step = name, left
        self._now += step
        for name, rate in rates.items():
            self._clock[name] += step * rate
        _, worker, _ = heapq.heappop(self._ends[first])
        self._clock[first] = max(self._clock[first], self._end[worker])
        self._active[first] -= 1
        self._done(worker)
        self._share()

    def _done(self, worker: int) -> None:
        owner = self._of[worker]
        self._of[worker] = -1
        stage = self._open[owner]
        stage.at.discard(worker)
        if not stage.at:
            del self._open[owner]
            self._next(owner)
        if worker != owner:
            self._idle.append(worker)

    def _share(self) -> None:
        """Idle workers take chunks of open stages once the queue is empty."""
        if not self._idle or self._queue:
            return
        changed = set()
        while self._idle:
            spare = {owner: self._chunks_left(it) / (len(it.at) + 1) for owner, it in self._open.items()}
            best = max(spare, key=spare.__getitem__, default=None)
            if best is None or spare[best] < 1:
                break
            stage, worker = self._open[best], self._idle.pop()
            stage.at.add(worker)
            self._begin(worker, best, 0.0)
            changed.add(best)
        for owner in changed:
            self._split(self._open[owner])

    def _bytes_left(self, it: _Open) -> float:
        clock = self._clock[it.stage.kernel]
        return sum(max(self._end[worker] - clock, 0.0) for worker in it.at)

    def _chunks_left(self, it: _Open) -> int:
        if it.stage.chunks == 1:
            return 1
        # Each worker is inside one chunk.
        return math.ceil(self._bytes_left(it) / it.stage.nbytes * it.stage.chunks - 1e-6)

    def _split(self, it: _Open) -> None:
        """Give each worker whole chunks; their numbers differ by at most one."""
        left, chunks = self._bytes_left(it), self._chunks_left(it)
        for i, worker in enumerate(sorted(it.at)):
            own = chunks // len(it.at) + (i < chunks % len(it.at))
            self._until(worker, it.stage.kernel, left * own / chunks)
