"""Properties of a model folder that the harness checks before it starts an engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fluxion_sglang.commands.codec import Codec, codec_of
from fluxion_sglang.commands.provenance import CHECKOUT, ROOT
from fluxion_sglang.scoring.model_files import fingerprint

SPARE: Final = 2
"""Positions that SGLang never uses; a request that needs them gets a shorter answer without a warning. Its workers
subtract one position per request (`TpModelWorker.get_worker_info`), and its scheduler another one for prompt and answer
(`Scheduler.init_req_max_new_tokens`)."""


@dataclass(frozen=True)
class Model:
    """A model in a folder.

    Attributes:
        id: the folder's path in the checkout; outside of it, its name.
        vocabulary: entries of the next-token distribution.
        positions: of the model.
    """

    folder: Path
    id: str
    vocabulary: int
    positions: int

    @classmethod
    def read(cls, folder: Path) -> Model:
        """Read the folder's config.json.

        Raises:
            ValueError: there is no model, or its configuration lacks a required field; one sentence.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise ValueError(
                f"There is no model in {folder} (no config.json); give the folder of one by --model: a name on the Hub "
                "has to be downloaded first (hf download NAME --local-dir FOLDER)."
            )
        try:
            config = json.loads(path.read_text())
            config = {**config, **config.get("text_config", {})}
            vocabulary, positions = int(config["vocab_size"]), int(config["max_position_embeddings"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} lacks vocab_size or max_position_embeddings; give a language model.") from None
        whole = folder.resolve()
        inside = CHECKOUT and whole.is_relative_to(ROOT)
        return cls(folder, str(whole.relative_to(ROOT)) if inside else whole.name, vocabulary, positions)

    @property
    def room(self) -> int:
        """Maximum tokens of a prompt and its answer together."""
        return self.positions - SPARE

    def codec(self) -> Codec:
        """The tokenizer and template. Raises ValueError: the folder has no readable tokenizer; one sentence."""
        return codec_of(self.folder, self.room)

    def sha256(self) -> str:
        """Digest of the weights and of all files that turn text into an answer. Raises ValueError: there are no
        weights."""
        return fingerprint(self.folder)
