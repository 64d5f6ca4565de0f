"""When a head has read enough: what budgets are measured and predicted for."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Deviation(IntEnum):
    """How the error of a head that reads part of the middle is measured; the values are the native library's."""

    LAYER = 0
    """||o_h(part) - o_h||_2 / max_h' ||o_h'||_2 (Fluxion, Eq. 2)."""
    HEAD = 1
    """||o_h(part) - o_h||_2 / ||o_h||_2: as the former, blind to what a head contributes."""
    COVERAGE = 2
    """Share of the attention mass that is read: at least the limit, not at most."""


class Criterion(NamedTuple):
    """What a budget has to achieve: the deviation within `limit` (for COVERAGE: the share at least `limit`)."""

    deviation: Deviation = Deviation.LAYER
    limit: float = 0.10
