"""Two colour scales for terminals and figures: matplotlib's viridis and inferno, by five points."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.color import blend_rgb, parse_rgb_hex

SHARE = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
ERROR = ("#000004", "#57106e", "#bc3754", "#f98e09", "#fcffa4")
PARTS = {
    "resident": "#5ec962",
    "features": "#aadc32",
    "plan": "#fde725",
    "tasks": "#21918c",
    "model": "#3b528b",
    "between": "#8a8f98",
}
"""The colour of each part of a decode step."""


def colour(scale: Sequence[str], value: float, end: float) -> str:
    """The colour of a value between 0 and `end`; grey for NaN."""
    if math.isnan(value):
        return "#808080"
    place = min(max(value / end, 0.0), 1.0) * (len(scale) - 1) if end > 0 else 0.0
    at = min(int(place), len(scale) - 2)
    return blend_rgb(parse_rgb_hex(scale[at][1:]), parse_rgb_hex(scale[at + 1][1:]), place - at).hex


def ink(background: str) -> str:
    """The readable text colour on a background: black or white."""
    red, green, blue = parse_rgb_hex(background[1:])
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 128 else "#ffffff"
