"""Write-through of prefilled chunks to the host pool, behind the device's back.

A layer's k and v, and the queries that somebody wants, are copied to pinned memory on a stream of their own; a thread
waits for the copy and writes the pool. Nothing else may read what is being written: `drain` comes before it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fluxion_sglang.device.streams import Streams

STAGES = 4
"""Layers of chunks on their way at a time; whoever brings one more waits."""


@dataclass
class _Stage:
    """Pinned memory of one layer of a chunk; grows with what is put in."""

    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def take(self, streams: Streams, like: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        sizes = [-(-tensor.nbytes // 256) * 256 for tensor in like]
        if sum(sizes) > self.memory.nbytes:
            self.memory = streams.pinned((sum(sizes),), torch.uint8)
        parts = self.memory[: sum(sizes)].split(sizes)
        return [
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(parts, like, strict=True)
        ]


class Offload:
    """Chunks on their way to the host, in the order in which they came.

    `put`, `drain` and `close` belong to one thread, the one that launches passes.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._side = streams.side()
        self._changed = threading.Condition()
        self._free = deque(_Stage() for _ in range(STAGES))
        self._waiting: deque[tuple[_Stage, Any, list[torch.Tensor], Callable[..., None]]] = deque()
        self._pending = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="fluxion-offload", daemon=True)
        self._thread.start()

    def put(self, tensors: tuple[torch.Tensor, ...], write: Callable[..., None]) -> None:
        """Have `write` called with copies of `tensors` on the host, which live until it returns.

        After a failure nothing more is written until the drain that raises it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            stage = self._free.popleft()
        copies = stage.take(self._streams, tensors)
        self._side.follow_main()
        for source, copy in zip(tensors, copies, strict=True):
            self._side.copy_out(source, copy)
        with self._changed:
            self._waiting.append((stage, self._side.mark(), copies, write))
            self._pending += 1
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until everything is written. Raises what a write raised first."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending == 0)
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                stage, mark, copies, write = self._waiting.popleft()
            try:
                self._side.host_waits(mark)
                if self._failure is None:
                    write(*copies)
            except BaseException as error:
                self._failure = error
            finally:
                del copies, write
                with self._changed:
                    self._free.append(stage)
                    self._pending -= 1
                    self._changed.notify_all()
