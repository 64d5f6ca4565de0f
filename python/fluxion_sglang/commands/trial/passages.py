"""Passages: prompts of any length in a model's own tokens, and the tokens that follow in the text.

The default text is the reference of the Python language, which every Python contains. Passages of one length begin at
different places, so none is a prefix of another.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from fluxion_sglang.commands import needle
from fluxion_sglang.commands.codec import Codec, SymbolicCodec, codec_of
from fluxion_sglang.commands.trial.results import ModelFacts, TrialError
from fluxion_sglang.scoring.model_files import public

_KEYS: Final = 8
_LEAST: Final = 1000
"""Fewest tokens of a text; passages of shorter texts would repeat it many times."""


@dataclass(frozen=True)
class Passage:
    """A prompt, and the tokens that follow it in the text; () if the model's own answer follows."""

    prompt: tuple[int, ...]
    following: tuple[int, ...] = ()


class Passages(ABC):
    """Attributes:
    what: one sentence for the report: which text it is, and what is forced.
    """

    what: str

    @abstractmethod
    def passage(self, length: int, forced: int, seed: int) -> Passage:
        """A prompt of `length` - `forced` tokens, and the tokens that follow it.

        Raises:
            ValueError: one sentence: the length is too short.
        """


class Symbolic(Passages):
    """For the bundled model: documents with facts, and a question about one of them."""

    what = (
        "A document has 8 keys with a value each, in the language of the bundled model, and a question for one. The "
        "tokens that full answers are forced."
    )

    def passage(self, length: int, forced: int, seed: int) -> Passage:
        return Passage(tuple(needle.needle_prompt(length - forced, _KEYS, seed).token_ids(0)))


class Text(Passages):
    """For models that read text. The text is repeated for longer passages.

    Args:
        name: the text's name in the report.
    """

    def __init__(self, codec: Codec, text: str, name: str) -> None:
        self._start = codec.plain("")
        self._tokens = np.asarray(codec.encode(text))
        if len(self._tokens) < _LEAST:
            raise TrialError(
                f"{name} has {len(self._tokens)} tokens, too few for prompts; give a text of {_LEAST:,} or more."
            )
        self.what = f"Passages of {name}. The tokens of the text are forced."

    def passage(self, length: int, forced: int, seed: int) -> Passage:
        count = length - len(self._start)
        first = int(np.random.default_rng(seed).integers(len(self._tokens)))
        tokens = self._tokens[(first + np.arange(count)) % len(self._tokens)].tolist()
        return Passage((*self._start, *tokens[: count - forced]), tuple(tokens[count - forced :]))


def open_passages(facts: ModelFacts, file: str | None = None, trust: bool = False) -> Passages:
    """Passages of a text, in a model's own tokens.

    Args:
        file: a text in UTF-8, or the name of one of `make checkpoints`; None: the reference of Python.

    Raises:
        TrialError: the tokenizer or the text cannot be read.
    """
    try:
        codec = codec_of(facts.folder or facts.name, trust=trust)
    except ValueError as error:
        raise TrialError(f"{str(error).rstrip('.')}; a trial needs the model's tokenizer for its prompts.") from None
    if isinstance(codec, SymbolicCodec):
        if file is not None:
            raise TrialError("The bundled model reads its own language alone; leave --text out.")
        return Symbolic()
    if file is None:
        return Text(codec, _reference(), "the reference of the Python language")
    try:
        text = Path(public(file, "texts")).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not in UTF-8"
        raise TrialError(f"--text {file} cannot be read ({reason}); give a text file in UTF-8.") from None
    return Text(codec, text, Path(file).name)


def _reference() -> str:
    try:
        topics: Any = importlib.import_module("pydoc_data.topics")
    except ModuleNotFoundError:
        raise TrialError("This Python comes without its documentation (pydoc_data); name a text by --text.") from None
    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
