"""A prompt of RULER in text, and how it reaches the given length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .base import Codec
from .prose import fit
from .ruler_definitions import Asked, Draw

Text = tuple[str, str]
"""The user's turn, and the beginning of the answer."""


@dataclass(frozen=True)
class Page:
    """Target of a prompt: a length in tokens of a codec."""

    codec: Codec
    draw: Draw
    tokens_to_generate: int

    @property
    def limit(self) -> int:
        return self.draw.length - self.tokens_to_generate

    @property
    def enough(self) -> int:
        return self.limit - self.draw.length // 100

    def fill(self, text: Callable[[int], Text], least: int = 0, most: int | None = None) -> tuple[int, list[int]]:
        """Size and tokens of the text that fills the length. A token holds at most one unit, which bounds the size."""
        try:
            return fit(
                lambda size: self.codec.chat(*text(size)),
                least,
                self.draw.length if most is None else most,
                self.enough,
                self.limit,
            )
        except ValueError as error:
            raise ValueError(
                f"Task {self.draw.task} does not fit into {self.draw.length} tokens, "
                f"{self.tokens_to_generate} of them for the answer: {error}."
            ) from None

    def asked(self, prompt: list[int], references: list[str], meta: dict[str, Any]) -> Asked:
        return Asked(tuple(prompt), tuple(references), self.tokens_to_generate, meta)
