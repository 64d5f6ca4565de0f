"""Error criteria: the condition under which a head has read enough. Budgets are measured and predicted for one."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Deviation(IntEnum):
    """How the error of a head that reads part of the middle is measured; values as in the native library."""

    LAYER = 0
    """||o_h(part) - o_h||_2 / max_h' ||o_h'||_2 (Fluxion, Eq. 2)."""
    HEAD = 1
    """||o_h(part) - o_h||_2 / ||o_h||_2: relative to the head's own output."""
    COVERAGE = 2
    """Share of the attention mass that is read; the limit is a minimum."""


class Criterion(NamedTuple):
    """The condition of a budget: deviation at most `limit` (for COVERAGE: share at least `limit`)."""

    deviation: Deviation = Deviation.LAYER
    limit: float = 0.10
