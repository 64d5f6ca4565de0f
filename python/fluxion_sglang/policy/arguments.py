"""Parses the arguments of a policy spec: numbers, fractions, block sizes."""

from __future__ import annotations

import re
from typing import Final

import torch

from fluxion_sglang.kv.placement import BLOCKS

_NUMBER: Final = re.compile(r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
"""A decimal number. `float` alone also accepts underscores, blanks, and digits of other scripts."""
_LARGEST: Final = torch.finfo(torch.float32).max


class NotLegal(ValueError):
    """Illegal arguments of a policy. The caller's error message lists the legal specs."""


def number(text: str, most: float = _LARGEST) -> float:
    """The number in [0, most] that `text` spells; raises NotLegal."""
    value = float(text) if _NUMBER.fullmatch(text) else _LARGEST * 2
    if value > most:
        raise NotLegal
    return value


def fraction(text: str) -> float:
    """The fraction in (0, 1] that `text` spells; raises NotLegal."""
    value = number(text, 1.0)
    # A plan holds float32. Reject a value that rounds to 0 there, because it would read nothing.
    if not torch.tensor(value, dtype=torch.float32) > 0:
        raise NotLegal
    return value


def block(text: str) -> int:
    """The block size that `text` spells; raises NotLegal."""
    if text not in map(str, BLOCKS):
        raise NotLegal
    return int(text)


def at_most(words: tuple[str, ...], count: int) -> None:
    """Raise NotLegal for more than `count` words."""
    if len(words) > count:
        raise NotLegal
