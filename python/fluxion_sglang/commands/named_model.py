"""Finds the folder of the model that a user names."""

from __future__ import annotations

import os
from pathlib import Path

from fluxion_sglang.scoring.model_files import model_folder
from fluxion_sglang.sglang.start import gguf_model


def folder_of(name: str) -> Path | None:
    """As `model_files.model_folder`; for a served GGUF file, the folder with the files that SGLang reads.

    Raises:
        ValueError: one sentence.
    """
    file = Path(name).expanduser()
    if file.suffix != ".gguf" or not os.path.isfile(file):
        return model_folder(name)
    return gguf_model.prepared(gguf_model.check(file), tokenizer=True).parent
