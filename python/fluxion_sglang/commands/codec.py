"""Converts text to tokens, for models with a tokenizer and for the bundled model."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fluxion_sglang.commands import needle

_SPECIAL: Final = frozenset(i for i, symbol in enumerate(needle.VOCABULARY) if symbol in ("<pad>", "<bos>", "<eos>"))


class Codec(ABC):
    """Converts text to tokens and back, for one model."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""

    @abstractmethod
    def chat(self, user: str, answer_prefix: str = "") -> list[int]:
        """A whole prompt: the model's chat template (without one: bos and the text), then the answer's beginning."""

    def plain(self, text: str) -> list[int]:
        """A whole prompt without the chat template: bos, if the model has one, and the text. Default: no bos."""
        return self.encode(text)

    @property
    def positions(self) -> int | None:
        """Most tokens of a prompt and its answer together; None (the default): unknown."""
        return None

    @property
    @abstractmethod
    def symbolic(self) -> bool:
        """Whether texts are in the symbolic language of the bundled model (`needle.py`)."""


class SymbolicCodec(Codec):
    """The bundled model's language: one symbol is one token; a text is symbols joined by spaces."""

    ids: Final = {symbol: i for i, symbol in enumerate(needle.VOCABULARY)}

    def __init__(self, positions: int | None = None) -> None:
        self._positions = positions

    def encode(self, text: str) -> list[int]:
        """See `Codec`; raises ValueError for a symbol that the language does not have."""
        try:
            return [self.ids[symbol] for symbol in text.split()]
        except KeyError as error:
            raise ValueError(f"The symbolic language has no symbol {error.args[0]!r}.") from None

    def decode(self, ids: Sequence[int]) -> str:
        return needle.to_text([i for i in ids if i not in _SPECIAL])

    def chat(self, user: str, answer_prefix: str = "") -> list[int]:
        return self.plain(f"{user} {answer_prefix}")

    def plain(self, text: str) -> list[int]:
        ids = self.encode(text)
        return ids if ids[:1] == [needle.BOS] else [needle.BOS, *ids]

    @property
    def positions(self) -> int | None:
        return self._positions

    @property
    def symbolic(self) -> bool:
        return True


class TokenizerCodec(Codec):
    """A Hugging Face tokenizer, with its chat template if there is one."""

    def __init__(self, tokenizer: Any, positions: int | None = None) -> None:
        self._tokenizer, self._positions = tokenizer, positions

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, user: str, answer_prefix: str = "") -> list[int]:
        if getattr(self._tokenizer, "chat_template", None):
            turns = [{"role": "user", "content": user}]
            # Without thinking: a reasoning model would not reach its answer within a task's tokens.
            how = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
            text = self._tokenizer.apply_chat_template(turns, **how)
            # The template adds bos itself if the model needs it.
            return self.encode(text + answer_prefix)
        return self.plain(user + answer_prefix)

    def plain(self, text: str) -> list[int]:
        bos = self._tokenizer.bos_token_id
        return ([] if bos is None else [bos]) + self.encode(text)

    @property
    def positions(self) -> int | None:
        return self._positions

    @property
    def symbolic(self) -> bool:
        return False


def codec_of(model: str | Path, room: int | None = None, trust: bool = False) -> Codec:
    """The codec of a model: symbolic if its vocabulary is the bundled model's.

    Args:
        model: its folder, or its name on the Hub.
        room: most tokens of a prompt and its answer together.
        trust: whether code of the model may run.

    Raises:
        ValueError: one sentence: the folder has no readable tokenizer.
    """
    try:
        vocabulary = json.loads((Path(model) / "tokenizer.json").read_text())["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        vocabulary = None  # a tokenizer in another format
    if vocabulary == SymbolicCodec.ids:
        return SymbolicCodec(room)
    # Imported late: transformers takes seconds, and the bundled model does not need it.
    from transformers import AutoTokenizer

    try:
        return TokenizerCodec(AutoTokenizer.from_pretrained(str(model), trust_remote_code=trust), room)
    except Exception as error:  # transformers raises many types for bad files
        reason = [type(error).__name__, *str(error).strip().splitlines()[:1]]
        raise ValueError(f"The tokenizer in {model} cannot be read: {': '.join(reason)}") from error
