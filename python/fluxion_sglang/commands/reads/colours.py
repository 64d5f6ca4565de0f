"""Two scales of colours, for terminals and for figures alike: matplotlib's viridis and inferno, by five points."""

from __future__ import annotations

import math
from collections.abc import Sequence

SHARE = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
ERROR = ("#000004", "#57106e", "#bc3754", "#f98e09", "#fcffa4")
PARTS = {"resident": "#5ec962", "plan": "#fde725", "tasks": "#21918c", "model": "#3b528b", "between": "#8a8f98"}
"""Of each part of a decode step."""


def colour(scale: Sequence[str], value: float, end: float) -> str:
    """The colour of a value between 0 and `end`; grey where there is none."""
    if math.isnan(value):
        return "#808080"
    place = min(max(value / end, 0.0), 1.0) * (len(scale) - 1) if end > 0 else 0.0
    at = min(int(place), len(scale) - 2)
    mixed = (round(a + (b - a) * (place - at)) for a, b in zip(_rgb(scale[at]), _rgb(scale[at + 1]), strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def ink(background: str) -> str:
    """What can be read on it: black or white."""
    red, green, blue = _rgb(background)
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 128 else "#ffffff"


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
