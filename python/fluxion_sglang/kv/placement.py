"""Which tokens of a request are resident on the device, as pure functions of its length.

Windows, executors, policies and tests all use these functions. The native engine has the same formulas
(`csrc/runtime/pool.h`); a test compares the two over every length.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE = 16
"""Tokens in a page: the physical unit of the host pool and SGLang's page size."""

BLOCKS = (16, 32, 64, 128)
"""Legal block sizes in tokens; level j of the metadata is `BLOCKS[j]`."""


@dataclass(frozen=True)
class Placement:
    """Sinks and window of every request.

    For a request of n tokens: resident = [0, min(sinks, n)) and [window_start(n), n). The middle is everything between,
    in whole pages, and is read from the host only.

    Attributes:
        sinks: tokens kept from the start, a multiple of 16.
        window: most recent tokens kept, a multiple of 16; 0..15 more stay so that the middle ends on a page.
    """

    sinks: int = 64
    window: int = 256

    @property
    def sink_pages(self) -> int:
        return self.sinks // PAGE

    @property
    def ring(self) -> int:
        """Slots of the window's ring: one page more than `window`, so that n - window_start(n) <= ring - 1."""
        return self.window + PAGE

    @property
    def slots(self) -> int:
        """Device slots of one request row."""
        return self.sinks + self.ring

    @property
    def slot_pages(self) -> int:
        return self.slots // PAGE

    def window_start(self, n: int) -> int:
        """First position of the window of a request of `n` tokens; a multiple of 16."""
        return max(self.sinks, max(n - self.window, 0) // PAGE * PAGE)

    def middle(self, n: int) -> int:
        """Tokens of the middle of a request of `n` tokens; a multiple of 16."""
        return self.window_start(n) - self.sinks

    def resident(self, n: int) -> int:
        """Tokens of a request of `n` tokens that are on the device."""
        return min(self.sinks, n) + max(n - self.window_start(n), 0)

    def slot(self, position: int) -> int:
        """Slot of a resident position within its row."""
        return position if position < self.sinks else self.sinks + (position - self.sinks) % self.ring
