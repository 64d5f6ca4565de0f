"""Provenance of a result file (machine, versions, commit), and how result files are written and read."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
"""The checkout; without one, an arbitrary folder (`CHECKOUT` is false)."""
CHECKOUT = (ROOT / "pyproject.toml").is_file()

PACKAGES = ("fluxion-sglang", "sglang", "torch", "transformers", "apache-tvm-ffi", "numpy")
CODE = ("fluxion_sglang",)
MEASURED = ("python", "csrc", "models", "CMakeLists.txt")
_ENVIRONMENT = ("OMP_", "MKL_", "GOMP_", "FLUXION_ISA", "SGLANG_")
_DRAWS = re.compile(r"^(.*tables|__main__|plot|registry|rendering)\.py$")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile")


def _generation(info: str, flags: set[str]) -> str | None:
    """AMD's name of the core generation, because a virtual machine may report only "AMD EPYC"."""
    family = re.search(r"^cpu family\s*:\s*(\d+)$", info, re.M)
    if "AuthenticAMD" not in info or family is None:
        return None
    of_25 = "Zen 4" if "avx512f" in flags else "Zen 3"
    return {23: "Zen 2", 25: of_25, 26: "Zen 5"}.get(int(family[1]))


def machine() -> dict[str, Any]:
    """Properties of this machine that affect results."""
    info = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.*)$", info, re.M)
    flags = set((re.search(r"^flags\s*:\s*(.*)$", info, re.M) or [""])[0].split())
    memory = re.search(r"MemTotal:\s*(\d+) kB", _read("/proc/meminfo"))
    gpus = [_read(path) for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "generation": _generation(info, flags),
        "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in _CPU_FLAGS if flag in flags],
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "kernel": platform.release(),
        "gpu": ", ".join(name.strip() for text in gpus for name in re.findall(r"^Model:(.*)$", text, re.M)) or None,
    }


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def commit(paths: Sequence[str] = MEASURED) -> str:
    """The measured commit, with a + if `paths` differ from it; "unknown" outside of a checkout."""
    if not CHECKOUT:
        return "unknown"
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", *paths)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


@functools.cache
def sources(packages: tuple[str, ...] = CODE) -> str:
    """Digest of the code that runs: Python files and native libraries of installed packages.

    In a checkout it includes the benchmarks, which define the measurement and are no package, but not those that only
    plot results.
    """
    digest = hashlib.sha256()
    folders = [("benchmark", ROOT / "benchmark")] if CHECKOUT else []
    for package in packages:
        spec = importlib.util.find_spec(package)
        folders += [(package, Path(path)) for path in (spec.submodule_search_locations if spec else None) or ()]
    for name, folder in folders:
        for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.so")]):
            if not (name == "benchmark" and _DRAWS.search(file.name)):
                digest.update(f"{name}/{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def header(
    benchmark: str, packages: Sequence[str] = PACKAGES, code: tuple[str, ...] = CODE, paths: Sequence[str] = MEASURED
) -> dict[str, Any]:
    """The header of a result file: what was measured, where and when.

    Args:
        packages: their versions are recorded. code: packages to digest. paths: measured paths of the checkout.
    """
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(paths),
        "sources": sources(code),
        "machine": machine(),
        "versions": versions(packages),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_ENVIRONMENT)},
    }


def load(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def save(path: Path, data: dict[str, Any]) -> None:
    """Write a result file atomically, because an interrupted run continues from it.

    Fractions keep six digits: no measurement is more exact, and the files are a third of the repository.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(_dump(data) + "\n")
    partial.replace(path)


def rounded(value: Any) -> Any:
    """The value as written by `save`."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    if isinstance(value, float) and not value.is_integer():
        return float(f"{value:.6g}")
    return value


def _dump(data: dict[str, Any]) -> str:
    # One row a line, for diffs; without spaces, which would be a tenth of the file.
    data = rounded(data)
    rows = data.get("rows", [])
    text = json.dumps({**data, "rows": []}, indent=1)
    if not rows:
        return text
    body = ",\n".join("  " + json.dumps(row, separators=(",", ":")) for row in rows)
    return text.replace('"rows": []', f'"rows": [\n{body}\n ]')


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
