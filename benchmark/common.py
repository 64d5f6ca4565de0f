"""What every benchmark here records: the machine, the versions, the commit; and where results go."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmark" / "results"
MODELS = ROOT / "benchmark" / "models"
NEEDLE = ROOT / "models" / "needle"

# Results of runs that agree in these belong together.
SAME = ("commit", "machine", "versions", "environment")

_PACKAGES = ("fluxion-sglang", "sglang", "torch", "transformers", "apache-tvm-ffi")
_ENVIRONMENT = ("OMP_", "MKL_", "GOMP_", "FLUXION_ISA", "SGLANG_")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile")


def machine() -> dict[str, Any]:
    """Facts of this machine that timings depend on."""
    info = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.*)$", info, re.M)
    flags = set((re.search(r"^flags\s*:\s*(.*)$", info, re.M) or [""])[0].split())
    memory = re.search(r"MemTotal:\s*(\d+) kB", _read("/proc/meminfo"))
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in _CPU_FLAGS if flag in flags],
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "kernel": platform.release(),
        "gpu": None,
    }


def machine_name() -> str:
    """A folder name for this machine's results, such as amd-epyc-2-cores."""
    facts = machine()
    return re.sub(r"[^a-z0-9]+", "-", f"{facts['cpu']} {facts['cores']} cores".lower()).strip("-")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def commit() -> str:
    """The commit that is measured, with a + if code or models differ from it; "unknown" outside of git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", "python", "csrc", "models", "benchmark/*.py", "CMakeLists.txt")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def memory_read_gb_per_s(threads: int) -> float:
    """Best of six streaming reads of 1 GiB with `threads` threads, in GB/s (10^9 bytes)."""
    import torch

    torch.set_num_threads(threads)
    data = torch.ones(2**28, dtype=torch.float32)
    best = 0.0
    for _ in range(6):
        start = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - start) / 1e9)
    return round(best, 1)


def header(benchmark: str) -> dict[str, Any]:
    """The part of a result file that says what was measured, where and when."""
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_ENVIRONMENT)},
    }


def load(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def save(path: Path, data: dict[str, Any]) -> None:
    """Write a result file whole or not at all: an interrupted run is taken up from it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(_dump(data) + "\n")
    partial.replace(path)


def resume(path: Path, fresh: dict[str, Any], same: tuple[str, ...]) -> dict[str, Any]:
    """The file at `path` if it measured the same (equal in the keys `same`), else `fresh` with no rows."""
    old = load(path)
    if old is not None and all(old.get(key) == fresh.get(key) for key in same):
        return old
    return {**fresh, "rows": []}


def relative(command: list[str]) -> list[str]:
    """A command line without this machine's paths."""
    return ["python" if i == 0 else part.replace(f"{ROOT}/", "") for i, part in enumerate(command)]


def run_logged(command: list[str], log: Path) -> None:
    """Run a command with its output in `log`; on failure raise with the end of it."""
    with log.open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, check=False).returncode
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"{' '.join(command)}\nended with exit code {code}:\n{tail}")


def _dump(data: dict[str, Any]) -> str:
    # One row a line: results are read in diffs.
    rows = data.get("rows", [])
    text = json.dumps({**data, "rows": []}, indent=1)
    if not rows:
        return text
    body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return text.replace('"rows": []', f'"rows": [\n{body}\n ]')


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
