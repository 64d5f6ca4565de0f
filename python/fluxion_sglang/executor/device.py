"""Where the windows live and forward passes run: what the attention backend asks of a device.

One pass at a time: `begin_decode` or `begin_extend`, then its layers in order, then `finish`. Two devices answer:
`host.py` computes where it is called; `step.py` puts work on a stream and lets a thread serve the CPU's half.
"""

from __future__ import annotations

import atexit
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.policy.base import Policy

if TYPE_CHECKING:
    from fluxion_sglang.device.library import DeviceLibrary


def library_of(device: str) -> DeviceLibrary | None:
    """What serves tensors on `device` ("cuda", "cuda:1", "cpu"); None: the CPU is the device.

    FLUXION_DEVICE=sim, for tests, has the CPU's tensors served as a device's by the simulated one.

    Raises:
        DeviceError: the library is missing or does not fit.
    """
    simulated = os.environ.get("FLUXION_DEVICE") == "sim"
    if not device.startswith("cuda") and not simulated:
        return None
    from fluxion_sglang.device.library import load

    return load("sim" if simulated else "cuda")


class Pinned:
    """Host memory that a device may read where it is, until `release` or the interpreter's end.

    Whoever has the device read it comes later, and is done earlier.

    Args:
        memory: uint8, touched, its address and size multiples of 4096.

    Raises:
        DeviceError: it cannot be pinned.
    """

    def __init__(self, library: DeviceLibrary, memory: torch.Tensor) -> None:
        library.host_register(memory)
        self._library, self._memory = library, memory
        self._held = True
        atexit.register(self.release)

    def release(self) -> None:
        if not self._held:
            return
        self._held = False
        atexit.unregister(self.release)
        self._library.host_unregister(self._memory)


class Appended(Protocol):
    """Told when the host pool has a chunk: `queries` [m, Hq, D] on the CPU are the m = `request.queries` last ones."""

    def __call__(self, layer: int, index: int, queries: torch.Tensor, scale: float) -> None: ...


class Device(ABC):
    """Runs passes over the host pool and the windows. Errors are RuntimeError, a sentence each."""

    @abstractmethod
    def heal(self, row: int, n: int, pages: torch.Tensor) -> None:
        """Refill a row's windows from the host: the residents of a request of n tokens with page list `pages`."""

    @abstractmethod
    def begin_decode(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        pages: torch.Tensor,
        policies: Sequence[Policy] | None,
    ) -> None:
        """A decode step; arguments as of `DecodeEngine.begin_step`, all on the CPU."""

    @abstractmethod
    def decode(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of one layer of the step; as `DecodeEngine.decode`, with tensors where the model runs."""

    @abstractmethod
    def begin_extend(self, requests: Sequence[ExtendRequest], appended: Appended) -> None:
        """An extend pass.

        Args:
            appended: called once for every layer and request with new tokens, by whatever thread, before `finish`
                returns.
        """

    @abstractmethod
    def extend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of one layer of the extend pass.

        Args:
            q: [T, Hq, D]. k, v: [T, H, D]; tokens of all requests, each at its `tokens`.

        Returns:
            [T, Hq, D] in q's dtype.
        """

    @abstractmethod
    def begin_dummy(self) -> None:
        """Decode layers until the next pass are nobody's: a warm-up, or the recording of a graph."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the host has all that the pass had for it, and raise the first failure of it."""

    def stats(self) -> dict[str, int]:
        """Cumulative counts of what decode steps were on the device (`device/timeline.py`)."""
        return {}

    @abstractmethod
    def abort(self) -> None:
        """Drop a pass that failed where it was launched; the next one starts clean."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the device's driver knows of host memory."""
