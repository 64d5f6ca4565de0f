"""Runs work that begins on a device and ends on the host, concurrent with the model. A side stream runs a kernel and
copies to pinned memory; a thread waits for them and calls a function. Call `drain` before a read of its results.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fluxion_sglang.device.streams import Streams

STAGES = 4
"""Most pieces of work in flight; `put` waits for a free stage."""


@dataclass
class _Stage:
    """Pinned memory of one piece of work; grows on demand."""

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
    """Work on its way to the host, completed in order.

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

    def put(
        self,
        launch: Callable[[int], None],
        reads: tuple[torch.Tensor, ...],
        tensors: tuple[torch.Tensor, ...],
        write: Callable[..., None],
    ) -> None:
        """Run `launch` on a side stream, and call `write` when its kernels and copies are done.

        After a failure nothing is written until `drain` raises it.

        Args:
            launch: gets the stream, ordered after all earlier work of the main stream; called before this returns.
            reads: main-stream tensors that its kernels read. The caller may drop them and `tensors` at once.
            tensors: `write` gets copies of them on the host, which live until it returns.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            stage = self._free.popleft()
        try:
            copies = stage.take(self._streams, tensors)
            self._side.follow_main()
            self._side.run(launch, reads)
            for source, copy in zip(tensors, copies, strict=True):
                self._side.copy_out(source, copy)
            mark = self._side.mark()
        except BaseException:
            try:
                with contextlib.suppress(Exception):  # launched work may still use the stage
                    self._side.host_waits(self._side.mark())
            finally:  # also after an interrupt: later work follows the copies on their stream
                with self._changed:
                    self._free.append(stage)
            raise
        with self._changed:
            self._waiting.append((stage, mark, copies, write))
            self._pending += 1
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until everything is written. Raises the first failure of a write."""
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
                self._failure = self._failure or error
            finally:
                del copies, write
                with self._changed:
                    self._free.append(stage)
                    self._pending -= 1
                    self._changed.notify_all()
