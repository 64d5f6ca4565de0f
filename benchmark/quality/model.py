"""What the harness has to know of a model folder before anything is started."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .record import CHECKOUT, ROOT

BUNDLED: Final = ROOT / "models" / "needle"

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt")
# What the configuration, the tokenizer and the chat template are read from.
_OTHERS: Final = (
    *("*config.json", "*token*.json", "vocab*.json", "chat_template*.json", "*.index.json"),
    *("*.jinja", "*.model", "merges.txt", "*.tiktoken"),
)
_PIECE: Final = 1 << 24

SPARE: Final = 2
"""Positions that SGLang never uses: a request that wants them gets a shorter answer, without a word. Its workers take
one less than the model has for a request (`TpModelWorker.get_worker_info`), and its scheduler one less than that for
prompt and answer (`Scheduler.init_req_max_new_tokens`)."""


@dataclass(frozen=True)
class Model:
    """A model in a folder.

    Attributes:
        id: the folder's path in the checkout, elsewhere its name.
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
            ValueError: one sentence: there is no model, or its configuration does not say what is needed.
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
        """Tokens that a prompt and its answer may have together."""
        return self.positions - SPARE

    def sha256(self) -> str:
        """Of the weights and of what else says how text becomes an answer, names included, in the order of the names.

        Raises:
            ValueError: one sentence: there are none.
        """
        files = next((found for kind in _WEIGHTS if (found := sorted(self.folder.glob(kind)))), [])
        if not files:
            raise ValueError(f"There are no weights in {self.folder} ({', '.join(_WEIGHTS)}).")
        others = {file for kind in _OTHERS for file in self.folder.glob(kind)}
        digest = hashlib.sha256()
        for file in sorted({*files, *others}):
            digest.update(file.name.encode() + b"\0")
            with file.open("rb") as source:
                while piece := source.read(_PIECE):
                    digest.update(piece)
        return digest.hexdigest()
