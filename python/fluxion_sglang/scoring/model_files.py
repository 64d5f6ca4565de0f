"""Finds the files of a model, and their fingerprint, which keeps results of different models apart."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Final

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
# Files with the configuration, the tokenizer and the chat template.
_OTHERS: Final = (
    *("*config.json", "*token*.json", "vocab*.json", "chat_template*.json", "*.index.json"),
    *("*.jinja", "*.model", "merges.txt", "*.tiktoken"),
)
_PIECE: Final = 1 << 24


def model_folder(name: str) -> Path | None:
    """The model folder `name`; None if `name` is a model on the Hub.

    Raises:
        ValueError: one sentence: it is a path without a model.
    """
    folder = Path(name).expanduser()
    # os.path treats files that this user may not see as missing.
    if os.path.isfile(folder / "config.json"):
        return folder
    if os.path.isdir(folder):
        raise ValueError(
            f"{name} holds no config.json, so it is no model that SGLang can read; give the folder that has "
            "config.json, the weights and the tokenizer."
        )
    if os.path.exists(folder) or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ValueError(f"There is no folder {name}; give the folder of a model, or a name on the Hub (OWNER/MODEL).")
    return None


def cache() -> Path:
    """The folder of `make checkpoints`: `fluxion` under XDG_CACHE_HOME, else under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fluxion"


def public(name: str, kind: str = "checkpoints") -> str:
    """The path of a download of `make checkpoints` by name; other names and paths are returned unchanged.

    Args:
        kind: "checkpoints", or "texts".
    """
    if os.path.exists(name) or os.path.basename(name) != name:
        return name
    place = cache() / kind / (f"{name}.txt" if kind == "texts" else name)
    return str(place) if place.exists() else name


def weights(folder: Path) -> list[Path]:
    """The weight files in the first format found; [] if there are none. If there is an index, only the files that it
    names: a repository may have a second copy in another layout."""
    for kind in _WEIGHTS:
        if not (found := sorted(folder.glob(kind))):
            continue
        named = {name for index in folder.glob(f"{kind}.index.json") for name in _indexed(index)}
        return [file for file in found if file.name in named] or found
    return []


def _indexed(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return set()


def fingerprint(folder: Path) -> str:
    """SHA-256 of the weights and of all other files that determine an answer, names included, in the order of names.

    Raises:
        ValueError: one sentence: there are no weights.
    """
    files = weights(folder)
    if not files:
        raise ValueError(f"There are no weights in {folder} ({', '.join(_WEIGHTS)}).")
    others = {file for kind in _OTHERS for file in folder.glob(kind)}
    digest = hashlib.sha256()
    for file in sorted({*files, *others}):
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as source:
            while piece := source.read(_PIECE):
                digest.update(piece)
    return digest.hexdigest()
