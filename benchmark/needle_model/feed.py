"""Make batches in advance in other processes: a GPU consumes them faster than one process makes them."""

from __future__ import annotations

import multiprocessing
import multiprocessing.pool
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from .data import Batch, Generator, Mix
from .recipe import Stage

AHEAD = 6
"""Batches made in advance per process."""

_own: list[Generator] = []  # of a process


class Feed(Iterator[Batch]):
    """The batches of the given steps. Each depends on seed and step only, not on the number of processes.

    Args:
        places: by step, its index in the run, its stage, and its index in the stage. They are read only as far ahead as
            batches are made.
    """

    def __init__(self, seed: int, places: Iterable[tuple[int, Stage, int]], workers: int) -> None:
        self._seed = seed
        self._places = iter(places)
        self._pool = multiprocessing.get_context("spawn").Pool(workers, _begin, (seed,))
        self._made: deque[multiprocessing.pool.AsyncResult[Batch]] = deque()
        for _ in range(workers * AHEAD):
            self._ask()

    def __next__(self) -> Batch:
        if not self._made:
            raise StopIteration
        self._ask()
        return self._made.popleft().get()

    def close(self) -> None:
        self._pool.terminate()
        self._pool.join()

    def _ask(self) -> None:
        for step, stage, number in self._places:
            self._made.append(self._pool.apply_async(_batch, (self._seed, step, *stage.at(number))))
            return


def _begin(seed: int) -> None:
    _own[:] = [Generator(seed)]


def _batch(seed: int, step: int, size: int, length: int, mix: Mix) -> Batch:
    _own[0].rng = np.random.default_rng((seed, step))
    return _own[0].batch(size, length, mix)
