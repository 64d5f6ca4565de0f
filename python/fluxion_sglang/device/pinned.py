"""Host memory that a device reads in place."""

from __future__ import annotations

import atexit

import torch

from fluxion_sglang.device.library import DeviceLibrary


class Pinned:
    """Host memory that a device may read in place, until `release` or the interpreter's end.

    Exit handlers run in reverse order, so objects that use the memory must be created later; they are closed earlier.

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
