"""A small real tokenizer (byte-level BPE, trained in the test) for tests of text suites."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fluxion_quality.base import Codec
from fluxion_quality.prose import generated_essay
from fluxion_quality.ruler_words import all_words

BOS = 0


@functools.cache
def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    rng = np.random.default_rng(0)
    text = [*generated_essay(rng, 20_000).sentences(20_000), *all_words()]
    text += [f" {number}" for number in rng.integers(0, 10_000, 3000)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=6000, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


class TextCodec(Codec):
    """A chat model's codec: `<user>`, the user's turn, `<assistant>`, the beginning of the answer."""

    def __init__(self) -> None:
        self.encoded = 0  # tokens so far: the cost of making samples

    def encode(self, text: str) -> list[int]:
        ids: list[int] = _tokenizer().encode(text).ids
        self.encoded += len(ids)
        return [1 + i for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return str(_tokenizer().decode([i - 1 for i in ids if i != BOS]))

    def chat(self, user: str, answer_prefix: str = "") -> list[int]:
        return [BOS, *self.encode(f"<user>{user}<assistant>{answer_prefix}")]

    @property
    def symbolic(self) -> bool:
        return False
