"""The device of the dispatcher's tests, which misbehaves when it is told to: test/native/rogue_device.cc."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

CALLS = ("attend", "signal", "copy", "allocate", "stream")


@cache
def native() -> ctypes.CDLL:
    """The library, which `make native-tests` builds."""
    return ctypes.CDLL(str(Path(os.environ["FLUXION_DEVICE_LIBRARIES"]) / "libfluxion_rogue.so"))


def call(name: str, *arguments: int) -> int:
    function = getattr(native(), name)
    function.restype = ctypes.c_int64
    return int(function(*map(ctypes.c_int64, arguments)))


class Rogue:
    """The one device there is, well behaved but for random delays until it is told otherwise."""

    def __init__(self, seed: int = 1, delay_us: int = 0) -> None:
        call("rogue_reset", seed + 1, delay_us)

    def api(self) -> int:
        return call("rogue_api")

    def fail(self, what: str, n: int = 1) -> None:
        """The n-th call of a kind from now fails."""
        call("rogue_fail", CALLS.index(what), n)

    def hang(self, n: int = 1) -> None:
        """The n-th batch from now ends only after `release`."""
        call("rogue_hang", n)

    def release(self) -> None:
        call("rogue_release")

    def lose(self, n: int = 1) -> None:
        """The n-th batch from now, and all that follows, is refused; what was launched never ends."""
        call("rogue_lose", n)

    def drop(self) -> None:
        """As `lose`, at once."""
        call("rogue_drop")

    def calls(self, what: str) -> int:
        return call("rogue_calls", CALLS.index(what))

    @property
    def tasks(self) -> int:
        return call("rogue_tasks")

    @property
    def hot_reads(self) -> int:
        """Tiles that batches read in device memory."""
        return call("rogue_hot_reads")

    @property
    def changed(self) -> int:
        """Batches whose lists or queries somebody changed while they were on their way."""
        return call("rogue_changed")

    @property
    def held(self) -> int:
        """Streams and pieces of memory that were not given back, of all tests so far."""
        return call("rogue_held")
