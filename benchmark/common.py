"""Helpers that the benchmarks share. `fluxion_quality.record` defines what a result file records; it imports nothing
from here."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fluxion_quality.record import ROOT, SAME, commit, header, load, machine, save, versions

__all__ = ["ROOT", "SAME", "commit", "header", "load", "machine", "save", "versions"]

RESULTS = ROOT / "benchmark" / "results"
MODELS = ROOT / "benchmark" / "models"
NEEDLE = ROOT / "models" / "needle"
PREDICTOR = NEEDLE / "fluxion"
SKETCH = "sketch:0.10"
"""Benchmarks use this spec, whatever the default of `sketch` is; benchmarks of public checkpoints use the default."""
SIMULATED = {
    "FLUXION_DEVICE": "sim",
    "FLUXION_DEVICE_LIBRARIES": os.environ.get("FLUXION_DEVICE_LIBRARIES") or str(ROOT / "build" / "native" / "tests"),
}
"""Environment that serves CPU tensors as a device's. `make native-tests` builds the libraries."""
PHASES = ("attention", "resident", "features", "plan", "queue", "other")
"""Times in a row of attention.json: the whole step first, then its parts."""


def machine_name() -> str:
    """A folder name for this machine's results, such as amd-epyc-2-cores.

    A virtual machine may report only "AMD EPYC" as its CPU. The name therefore also tells a matrix unit (amx), AVX2
    without AVX-512, and Zen 4.
    """
    facts = machine()
    flags = facts["flags"]
    extra = " amx" * ("amx_tile" in flags) + " avx2" * ("avx2" in flags and "avx512f" not in flags)
    extra += " zen4" * (facts["generation"] == "Zen 4")
    return folder_name(f"{facts['cpu']} {facts['cores']} cores{extra}")


def folder_name(text: str) -> str:
    """The text in lower case letters, digits and dashes, such as amd-epyc-2-cores."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def gpu() -> tuple[str, int] | None:
    """Name and bytes of memory of the first NVIDIA GPU, from `nvidia-smi`: a CUDA context would occupy part of the
    memory."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    name, mib = found[0].rsplit(",", 1)
    return name, int(mib) << 20


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


def arguments(doc: str | None, quick: str, rounds: int | None = None, fresh: bool = False) -> argparse.ArgumentParser:
    """The options that benchmarks share: --quick and --machine.

    Args:
        doc: docstring of the program; its first line becomes the description.
        quick: what --quick does, for the help.
        rounds: default of --rounds; None: the option does not exist.
        fresh: whether --fresh exists, because the benchmark continues a result file.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{quick}; the result file is not a published one")
    parser.add_argument("--machine", default=machine_name(), help="folder under benchmark/results")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="of all that is measured, in turns")
    if fresh:
        parser.add_argument("--fresh", action="store_true", help="start over instead of continuing a result file")
    else:
        parser.set_defaults(fresh=True)
    return parser


def told(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print each row as it comes, and return all of them."""
    found = []
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        found.append(row)
    return found


def publish(args: Any, name: str, rows: list[dict[str, Any]], **facts: Any) -> None:
    """Save the rows of a benchmark that does not continue result files."""
    path = result_path(args, name)
    save(path, {**header(name), **facts, "rows": rows})
    print(f"{path.relative_to(ROOT)}: {len(rows)} rows. Now: python benchmark/tables.py")


def result_path(args: Any, name: str) -> Path:
    """Path of a benchmark's result file by --machine and --quick; --fresh deletes the file first."""
    path = RESULTS / args.machine / f"{name}{'_quick' if args.quick else ''}.json"
    if args.fresh:
        path.unlink(missing_ok=True)
    return path


def differing(old: dict[str, Any], header: dict[str, Any], same: tuple[str, ...]) -> list[str]:
    """The keys of `same` in which two results are not equal, or which one of them lacks."""
    return [key for key in same if key not in old or old[key] != header[key]]


def resume(path: Path, header: dict[str, Any], same: tuple[str, ...], fresh: bool) -> dict[str, Any]:
    """The file at `path`, to be continued; `header` without rows if there is no file or `fresh` is set.

    Raises:
        SystemExit: the file measured something else (`differing`), and saving the first row would replace it. Quick
            results, which are never published, start over.
    """
    old = None if fresh else load(path)
    if old is None:
        return {**header, "rows": []}
    others = differing(old, header, same)
    if others and path.stem.endswith("_quick"):
        return {**header, "rows": []}
    if others:
        raise SystemExit(f"error: {path} differs in {', '.join(others)}; start over with --fresh, or move it away.")
    return old


def relative(command: list[str]) -> list[str]:
    """A command line without paths of this machine."""
    return ["python" if i == 0 else part.replace(f"{ROOT}/", "") for i, part in enumerate(command)]


def run_logged(command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
    """Run a command with its output in `log`; raise SystemExit with the end of it on failure. env: added to this
    process's."""
    with log.open("w") as out:
        environment = {**os.environ, **(env or {})}
        code = subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, check=False
        ).returncode
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"{' '.join(command)}\nended with exit code {code}:\n{tail}")
