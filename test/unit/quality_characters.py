"""A codec for tests of the quality suites: one character is one token."""

from __future__ import annotations

from collections.abc import Sequence

from fluxion_quality import Codec

BOS = 0


class CharacterCodec(Codec):
    """Token ids are code points; the chat template is `<user>text</user>`."""

    def __init__(self, positions: int | None = None) -> None:
        self._positions = positions

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i != BOS)

    def chat(self, user: str, answer_prefix: str = "") -> list[int]:
        return self.plain(f"<user>{user}</user>{answer_prefix}")

    def plain(self, text: str) -> list[int]:
        return [BOS, *self.encode(text)]

    @property
    def positions(self) -> int | None:
        return self._positions

    @property
    def symbolic(self) -> bool:
        return False
