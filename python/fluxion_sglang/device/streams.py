"""The model's stream, and side streams for copies: torch's on CUDA, the library's on the simulated device.

On the simulated device the model and the default stream run in the calling thread; nothing is ever pending there.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from fluxion_sglang.device.library import DeviceLibrary


class Side(ABC):
    """A stream beside the main one. A mark represents all work launched on it so far."""

    handle: int

    @abstractmethod
    def follow_main(self) -> None:
        """Order later work of this stream after all work launched on the main stream so far."""

    @abstractmethod
    def mark(self) -> Any: ...

    @abstractmethod
    def main_waits(self, mark: Any) -> None: ...

    @abstractmethod
    def host_waits(self, mark: Any) -> None:
        """Wait for a mark. Any thread may call it."""

    @abstractmethod
    def run(self, launch: Callable[[int], None], reads: tuple[torch.Tensor, ...]) -> None:
        """Run `launch` on this stream. `reads` are main-stream tensors that it reads; the caller may drop them."""

    @abstractmethod
    def copy_out(self, source: torch.Tensor, pinned: torch.Tensor) -> None:
        """Copy a main-stream tensor to host memory; the caller may drop it at once."""


class Streams(ABC):
    """The streams of one device."""

    @property
    @abstractmethod
    def main(self) -> int:
        """The model's stream, as a number."""

    @abstractmethod
    def side(self) -> Side: ...

    @abstractmethod
    def settle(self) -> None:
        """Wait for everything on the main stream."""

    @abstractmethod
    def pinned(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Pinned host memory, for asynchronous copies from the device."""


class _CudaSide(Side):
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self.handle = int(self._stream.cuda_stream)

    def follow_main(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())

    def mark(self) -> Any:
        return self._stream.record_event()

    def main_waits(self, mark: Any) -> None:
        torch.cuda.current_stream().wait_event(mark)

    def host_waits(self, mark: Any) -> None:
        mark.synchronize()

    def run(self, launch: Callable[[int], None], reads: tuple[torch.Tensor, ...]) -> None:
        launch(self.handle)
        for tensor in reads:
            tensor.record_stream(self._stream)

    def copy_out(self, source: torch.Tensor, pinned: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            pinned.copy_(source, non_blocking=True)
        source.record_stream(self._stream)


class CudaStreams(Streams):
    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def main(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def side(self) -> Side:
        return _CudaSide(self._device)

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def pinned(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=True)


class _SimulatedSide(Side):
    def __init__(self, library: DeviceLibrary) -> None:
        self._library = library
        self.handle = library.stream_create()
        weakref.finalize(self, library.stream_destroy, self.handle).atexit = False  # it has a thread and many stacks

    def follow_main(self) -> None:
        pass

    def mark(self) -> Any:
        return None

    def main_waits(self, mark: Any) -> None:
        self._library.stream_synchronize(self.handle)

    def host_waits(self, mark: Any) -> None:
        pass  # calls for the host complete before they return

    def run(self, launch: Callable[[int], None], reads: tuple[torch.Tensor, ...]) -> None:
        launch(self.handle)
        # Wait, because the main stream's memory may be reused by the calling thread.
        self._library.stream_synchronize(self.handle)

    def copy_out(self, source: torch.Tensor, pinned: torch.Tensor) -> None:
        pinned.copy_(source)


class SimulatedStreams(Streams):
    main = 0

    def __init__(self, library: DeviceLibrary) -> None:
        self._library = library

    def side(self) -> Side:
        return _SimulatedSide(self._library)

    def settle(self) -> None:
        self._library.stream_synchronize(self.main)

    def pinned(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)


def streams(library: DeviceLibrary, device: torch.device) -> Streams:
    return CudaStreams(device) if library.backend == "cuda" else SimulatedStreams(library)
