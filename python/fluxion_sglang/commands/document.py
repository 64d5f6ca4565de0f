"""The file of `fluxion ask`: its text, its tokens, and the prompt made of file and question.

Every prompt begins with the file and ends with the question. So all questions share the file as their prefix, and its
KV is a cache hit for every question but the first.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fluxion_sglang.commands.named_model import folder_of
from fluxion_sglang.commands.needle import END, MODEL, needle_prompt, to_text

Tokenize = Callable[[str], list[int]]
"""Tokens of a text, without special tokens at its ends."""

STDIN = "-"
QUESTION_ROOM = 256
"""Tokens that are reserved for the question and the chat template."""

_DEMO_TOKENS, _DEMO_KEYS, _DEMO_SEED = 16384, 6, 5
_DEMO_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. " * 20
_DEMO_FACTS = (
    ("The ship weighs 306 tons.", "How many tons does the ship weigh?", "306"),
    ("The red box holds 4711 coins.", "How many coins does the red box hold?", "4711"),
    ("The train leaves at nine.", "When does the train leave?", "nine"),
)
"""For models that read text: a sentence of the document, the question, and a part of the right answer."""

_FRAME = "\n\nQuestion: {question}\nAnswer:"
_MOSTLY = 0.5
"""If the model does not know more than this share of a file, the file is not in its language."""


class AskError(Exception):
    """The file is unsuitable for questions. The message is one sentence."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The request: a user's chat message, or a text to complete.

    Attributes:
        stop: texts that end the answer.
        keep_stop: whether the answer includes the stop text.
    """

    text: str
    chat: bool
    stop: tuple[str, ...] = ()
    keep_stop: bool = False


@dataclasses.dataclass(frozen=True)
class Document:
    """A text and its size.

    Attributes:
        name: the file as the user named it.
        tokens: None if they cannot be counted.
        own_language: the model has a small vocabulary of its own, like the bundled needle model; it knows no English.
        questions: the demo's questions, each with a part of its right answer.
    """

    name: str
    text: str
    tokens: int | None = None
    own_language: bool = False
    questions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @staticmethod
    def demo(model: str) -> Document:
        """Needles in the bundled model's language; facts in English for other models."""
        if Path(model).resolve() == MODEL:
            prompt = needle_prompt(_DEMO_TOKENS, _DEMO_KEYS, _DEMO_SEED)
            answers = {question.text: question.answer for question in prompt.questions}
            return Document(f"A document with {_DEMO_KEYS} needles", to_text(prompt.document), questions=answers)
        text = "".join(f"{_DEMO_NOISE}{sentence} " for sentence, *_ in _DEMO_FACTS) + _DEMO_NOISE
        answers = {question: answer for _, question, answer in _DEMO_FACTS}
        return Document(f"A document with {len(answers)} facts", text, questions=answers)

    @staticmethod
    def read(name: str) -> Document:
        """Read a file. Raises AskError."""
        shown = "The standard input" if name == STDIN else name
        try:
            data = sys.stdin.buffer.read() if name == STDIN else Path(name).expanduser().read_bytes()
        except OSError as error:
            raise AskError(f"{name} cannot be read: {error.strerror or error}.") from None
        if data.startswith(b"%PDF"):
            raise AskError(f"{shown} is a PDF; make it a text first: pdftotext {name}.")
        if b"\0" in data:
            raise AskError(f"{shown} is a binary file; give a text in UTF-8.")
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise AskError(
                f"{shown} is not text in UTF-8 (byte {error.start:,}); convert it: iconv -f LATIN1 -t UTF-8 {name}."
            ) from None
        if not text.strip():
            raise AskError(f"{shown} is empty; there is nothing to ask about.")
        return Document(shown if name == STDIN else name, text.rstrip())

    def counted(self, tokenize: Tokenize, model: str) -> Document:
        """The document with its token count. Raises AskError if the model knows hardly a word of it."""
        tokens = tokenize(self.text)
        # A vocabulary that maps all these words to one token does not know them.
        frame = set(tokenize("Question Answer document"))
        own_language = len(frame) <= 1
        if own_language and tokens and sum(token in frame for token in tokens) > _MOSTLY * len(tokens):
            raise AskError(
                f"{model} does not know the words of {self.name}; it has a language of its own "
                "(the bundled model: models/needle/README.md). Take a model that was trained on text."
            )
        return dataclasses.replace(self, tokens=len(tokens), own_language=own_language)

    def prompt(self, question: str, chat: bool, stop: Sequence[str] | None = None) -> Prompt:
        """The prompt: the file first, the question last.

        Args:
            chat: the model has a chat template.
            stop: texts that end the answer; None: the default for this form of prompt.
        """
        if chat:
            return Prompt(f"{self.text}\n\n{question}", True, tuple(stop or ()))
        if self.own_language:
            # The bundled model was not trained to stop; the end of a phrase ends its answer.
            return Prompt(f"{self.text} {question}", False, tuple([to_text([END])] if stop is None else stop), True)
        framed = self.text + _FRAME.format(question=question)
        # A base model continues with questions of its own.
        return Prompt(framed, False, tuple(["\n\nQuestion:"] if stop is None else stop))

    def check_fits(self, limit: int, max_tokens: int, what: str, instead: str) -> None:
        """Raise AskError if file, question and answer have more than `limit` tokens.

        Args:
            what: the subject of "takes LIMIT tokens".
            instead: advice, as the end of a sentence.
        """
        room = limit - max_tokens - QUESTION_ROOM
        if self.tokens is None or self.tokens <= room:
            return
        fit = f"{room:,} tokens of the file fit" if room > 0 else "nothing of the file fits"
        raise AskError(
            f"{self.name} has {self.tokens:,} tokens, and {what} takes {limit:,}: {fit} beside {max_tokens:,} for the "
            f"answer (--max-tokens) and {QUESTION_ROOM} for the question; {instead}."
        )


def local_tokenizer(model: str) -> tuple[Tokenize, int | None]:
    """The model's tokenizer, and the most tokens of the model if its configuration gives them directly.

    Raises:
        AskError: there is no such model, or its tokenizer needs code of its own.
    """
    try:
        model = str(folder_of(model) or model)
    except ValueError as error:
        raise AskError(str(error)) from None
    from transformers import AutoConfig, AutoTokenizer, logging

    logging.set_verbosity_error()
    try:
        # An explicit False, because the default prompts the user.
        tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        config: Any = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
    except Exception as error:  # transformers raises many types for bad files
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise AskError(
            f"The tokenizer of {model} cannot be loaded ({first}); start the server yourself and use --url."
        ) from None
    positions = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None) or {}
    # Scaled positions reach further than the number; the server knows how far.
    plain = not isinstance(rope, dict) or not rope.get("factor")
    return (
        lambda text: list(tokenizer.encode(text, add_special_tokens=False, verbose=False)),
        int(positions) if positions and plain else None,
    )
