"""All checks and measurements for a machine with a GPU, in order, in one command.

    make gpu                               # every step that has not passed on this machine and commit
    make gpu ARGS="--only link tokens"     # these steps, also if they passed
    make gpu ARGS=--simulated              # on the simulated device: whether the steps work; times mean nothing

Each step is a process with a limit of nine minutes. Its output goes to build/gpu-day, and its result to
benchmark/results/<machine>/gpu_day.json before the next step begins. When the machine goes away nothing is lost, and
the command later continues there. The report gpu_day.md lists the steps and what they measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # `python -m benchmark.gpu_day` imports like the scripts beside it
import common
import psutil
from tqdm import tqdm

from fluxion_quality.table import grid
from fluxion_sglang.commands import provenance
from fluxion_sglang.commands.serving import exits_at_signals

LIMIT_S = 540
LOGS = common.ROOT / "build" / "gpu-day"
TESTS = common.ROOT / "test" / "gpu"
SIMULATED = LOGS / "simulated"
"""Results of the simulated device stay out of the published ones."""
HERE = "{results}"
"""Placeholder in a command for the folder of results."""
TAIL = 12
"""Lines of output that the report shows of a failed step."""


@dataclass(frozen=True)
class Shown:
    """Rows of result files that contain the first of these columns."""

    files: str  # a glob pattern
    title: str
    columns: tuple[str, ...]

    def found(self, results: Path) -> list[Path]:
        """Matching files without timelines, which are plotted instead."""
        return [path for path in sorted(results.glob(self.files)) if not path.stem.endswith("_timeline")]

    def forget(self, results: Path) -> None:
        """Delete the matching files, including plots and timelines."""
        for path in results.glob(f"{self.files.removesuffix('.json').rstrip('*')}*"):
            path.unlink()


@dataclass(frozen=True)
class Step:
    """One question to the machine.

    Attributes:
        asks: the question that the step answers.
        command: arguments of the interpreter. simulated: the same for the simulated device; None: the step needs a GPU.
        shows: measurements for the report.
    """

    name: str
    asks: str
    command: tuple[str, ...]
    simulated: tuple[str, ...] | None
    shows: tuple[Shown, ...] = ()


def _one_batch(*options: str, policies: Iterable[str] = ("off", "fixed:16:0.05", "drawn")) -> list[tuple[str, ...]]:
    """Arguments of one_batch.py for a GPU, and for the simulated device."""
    run, chosen = ("benchmark/one_batch.py", "--fresh"), ("--machine", HERE, "--policies", *policies, *options)
    real = (*run, *("--device", "cuda", "--models", "llama-3.1-8b", "--lengths", "32768", "--batches", "4"))
    simulated = (*run, *("--device", "sim", "--models", "needle", "--lengths", "1024", "--batches", "1"))
    return [(*real, *chosen), (*simulated, *chosen)]


def _steps(name: str, title: str) -> tuple[Shown, ...]:
    return (
        Shown(
            f"one_batch{name}.json",
            title,
            ("policy", "batch", "length", "tpot_ms", "idle_ms", "idle_ratio", "gpu_share"),
        ),
    )


_SPARSE = ("fixed:16:0.05", "drawn")
_NEAR = {"cuda_graphs": True, "hot_tiles_gb": 24}
_NEAR_FEW = {**_NEAR, "hot_tiles_gb": 4}
_TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
STEPS = (
    Step(
        "doctor", "is everything there", ("-m", "fluxion_sglang.cli", "doctor"), ("-m", "fluxion_sglang.cli", "doctor")
    ),
    Step(
        "device",
        "can host memory be pinned, and does a layer go to and fro",
        ("benchmark/gpu_day/first.py", "--machine", HERE),
        ("benchmark/gpu_day/first.py", "--machine", HERE, "--device", "sim"),
        (Shown("gpu_first.json", "Pinned memory", ("gib", "seconds_per_gib")),),
    ),
    Step(
        "kernels",
        "do our kernels compute what they compute on the simulated device",
        (*_TESTS, "test/gpu/test_gpu_kernels.py"),
        (*_TESTS, "test/unit/device/test_device_kernels.py", "-k", "take or merge or order"),
    ),
    Step(
        "link",
        "what does a layer's hand-over cost, and what does the link give",
        ("benchmark/gpu_link.py", "--machine", HERE),
        ("benchmark/gpu_link.py", "--machine", HERE, "--device", "sim", "--quick"),
        (
            Shown(
                "gpu_link*.json",
                "A layer's hand-over",
                ("model", "batch", "launched", "resident_us", "layer_us", "overhead_us"),
            ),
            Shown(
                "gpu_link*.json",
                "The link, GB/s",
                ("tiles", "copy_engine_gb_per_s", "in_order_gb_per_s", "gather_gb_per_s"),
            ),
        ),
    ),
    Step("flashinfer", "do FlashInfer's kernels compile and run", ("benchmark/gpu_day/warm.py",), None),
    Step(
        "door",
        "do FlashInfer's kernels compute what attention is",
        (*_TESTS, "test/gpu/test_gpu_flashinfer.py"),
        (*_TESTS, "test/gpu/test_gpu_flashinfer.py", "-k", "stand-in"),
    ),
    Step(
        "ranks",
        "does a GPU that ranks blocks read what the CPU would read",
        (*_TESTS, "test/gpu/test_gpu_near.py"),
        (*_TESTS, "test/unit/device/test_near.py", "-k", "every_shape"),
    ),
    Step(
        "tokens",
        "does the bundled model answer as without the flag",
        ("benchmark/gpu_day/tokens.py", "--machine", HERE),
        ("benchmark/gpu_day/tokens.py", "--machine", HERE, "--device", "sim", "--quick"),
        (Shown("gpu_tokens.json", "Answers of the bundled model", ("dtype", "config", "prompts", "same", "right")),),
    ),
    Step(
        "load",
        "do servers answer many clients as without the flag, and live",
        ("benchmark/gpu_day/load.py", "--machine", HERE),
        ("benchmark/gpu_day/load.py", "--machine", HERE, "--device", "sim", "--quick"),
        (Shown("gpu_load.json", "Servers under load", ("config", "answers", "right", "alive")),),
    ),
    Step(
        "decode",
        "how long is a step of 4 x 32K, and how long the device idle in it",
        *_one_batch("--name", "decode"),
        _steps("_decode*", "Steps"),
    ),
    Step(
        "graphs",
        "the same, with recorded steps",
        _one_batch("--config", '{"cuda_graphs": true}', "--name", "graphs", policies=_SPARSE)[0],
        None,
        _steps("_graphs*", "Steps, recorded"),
    ),
    Step(
        "near",
        "the same, with a GPU that ranks blocks itself and has copies of all tiles",
        _one_batch("--config", json.dumps(_NEAR), "--name", "near", policies=_SPARSE)[0],
        _one_batch("--config", json.dumps({**_NEAR, "hot_tiles_gb": 0.1, "cuda_graphs": False}), "--name", "near")[1],
        _steps("_near", "Steps, recorded, ranked on the GPU, all tiles near"),
    ),
    Step(
        "near_few",
        "the same, with copies of a quarter of the tiles",
        _one_batch("--config", json.dumps(_NEAR_FEW), "--name", "near_few", policies=_SPARSE[:1])[0],
        None,
        _steps("_near_few", "Steps, recorded, ranked on the GPU, a quarter of the tiles near"),
    ),
    *(
        Step(
            tool,
            f"does compute-sanitizer's {tool} find anything in our kernels",
            (*_TESTS, "--full", "test/gpu/test_gpu_sanitizer.py", "-k", tool),
            None,
        )
        for tool in ("memcheck", "racecheck")
    ),
)


def run(step: Step, simulated: bool, results: Path, limit_s: float) -> dict[str, Any]:
    """Run a step with its output in `LOGS`; return its row for gpu_day.json. results: folder for what it measures."""
    chosen = step.simulated if simulated else step.command
    assert chosen is not None
    command = [str(results) if part == HERE else part for part in chosen]
    of_gpu = {"FLUXION_NEEDS_GPU": "1"}
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(common.SIMULATED if simulated else of_gpu)}
    for shown in step.shows:
        shown.forget(results)  # delete old results, which this run may not measure again
    log = LOGS / f"{step.name}.log"
    start = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=out, stderr=subprocess.STDOUT, cwd=common.ROOT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Kill all processes that the step started: the next step needs the whole device.
            kill_session(process)
    text = log.read_text(errors="replace").strip().splitlines()
    return {
        "step": step.name,
        **of_now(),
        "asks": step.asks,
        "command": shlex.join(("python", *command)).replace(f"{common.ROOT}/", ""),
        "passed": code == 0,
        "ended": "out of time" if code is None else f"exit code {code}",
        "seconds": round(time.monotonic() - start, 1),
        "says": text[-TAIL:],
    }


def of_now() -> dict[str, Any]:
    """State under which a step counts as passed; if any of it changes, the step runs again."""
    # Includes a hash of the sources, because the commit does not identify uncommitted code.
    tests = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(TESTS.glob("*.py")))).hexdigest()[:16]
    versions = common.header("gpu_day")["versions"]
    return {"commit": common.commit(), "sources": provenance.sources(), "tests": tests, "versions": versions}


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the session of a process and, while the process runs, also descendants with sessions of their own."""
    started = []
    if process.returncode is None:  # after its end the pid may belong to another process
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    for child in started:  # last, because the process could start replacements
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def report(data: dict[str, Any], results: Path) -> str:
    """The steps and their measurements, as Markdown."""
    ended = {row["step"]: row for row in data["rows"]}
    rows = []
    for step in STEPS:
        row = ended.get(step.name)
        if row is None:
            found = "needs a GPU" if data["simulated"] and step.simulated is None else "not run yet"
            rows.append([step.name, step.asks, found, "", ""])
        else:
            found = "passed" if row["passed"] else row["ended"]
            rows.append([step.name, step.asks, found, f"{row['seconds']:.0f}", row["commit"]])
    out = ["# GPU day", ""]
    if data["simulated"]:
        out += ["**Simulated: everything ran on the CPU, and times mean nothing.**", ""]
    out += [grid(["step", "question", "found", "seconds", "commit"], rows, "lllrl"), ""]
    for row in data["rows"]:
        if not row["passed"]:
            out += [f"## {row['step']}", "", f"`{row['command']}`", "", "```text", *row["says"], "```", ""]
    passed = [step for step in STEPS if ended.get(step.name, {}).get("passed")]
    for shown in (shown for step in passed for shown in step.shows):
        for path in shown.found(results):
            measured = [row for row in common.load(path)["rows"] if shown.columns[0] in row]
            columns = [column for column in shown.columns if any(column in row for row in measured)]
            cells = [[str(row.get(column, "")) for column in columns] for row in measured]
            if cells:
                out += [f"## {shown.title}", "", grid(columns, cells, "l" * len(columns)), ""]
    return "\n".join(out)


def results_folder(simulated: bool) -> Path:
    """Folder for results of this machine's device."""
    if simulated:
        return SIMULATED
    if (gpu := common.gpu()) is None:
        raise SystemExit(
            "error: nvidia-smi finds no GPU here; to try the command without one: make gpu ARGS=--simulated"
        )
    return common.RESULTS / common.folder_name(gpu[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--simulated", action="store_true", help="on the simulated device")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], help="these, passed before or not")
    parser.add_argument("--fresh", action="store_true", help="all of them once more")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a step")
    args = parser.parse_args()
    results = results_folder(args.simulated)
    path = results / "gpu_day.json"
    for folder in (results, LOGS):
        folder.mkdir(parents=True, exist_ok=True)
    header = {**common.header("gpu_day"), "simulated": args.simulated}
    data = {**common.resume(path, header, ("simulated",), fresh=False), **header}
    now = of_now()
    passed = {row["step"] for row in data["rows"] if row["passed"] and row.items() >= now.items()}
    steps = [
        step
        for step in STEPS
        if (step.simulated is not None or not args.simulated)
        and (step.name in args.only if args.only else args.fresh or step.name not in passed)
    ]
    chosen = {step.name for step in steps}
    if args.fresh:  # save this now: an interrupted run must not leave old results as passed
        data["rows"] = [row for row in data["rows"] if row["step"] not in chosen]
        common.save(path, data)
    failed = []
    # A step has its own session and would survive a hang-up of this one.
    with exits_at_signals(), tqdm(steps, unit="step") as bar:
        for step in bar:
            bar.set_description(step.name)
            row = run(step, args.simulated, results, args.limit)
            data["rows"] = [old for old in data["rows"] if old["step"] != step.name] + [row]
            common.save(path, data)
            (results / "gpu_day.md").write_text(report(data, results))
            bar.write(f"{step.name}: {'passed' if row['passed'] else row['ended']}, {row['seconds']:.0f} s")
            if not row["passed"]:
                failed.append(step.name)
                bar.write("\n".join(row["says"]))
    print((results / "gpu_day.md").relative_to(common.ROOT))
    if failed:
        raise SystemExit(f"error: these steps failed: {', '.join(failed)}; their output is in build/gpu-day")


if __name__ == "__main__":
    main()
