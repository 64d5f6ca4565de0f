"""The same model in SGLang with and without this plug-in, and in other implementations for CPUs.

    python benchmark/race.py                # every model, depth and implementation; hours on two cores
    python benchmark/race.py --quick        # a small model at 1K and 4K, to see that all of them run
    python benchmark/race.py --only Fluxion llama.cpp --models llama-111m

A round runs one implementation after another, each in its own process. It loads the model, prefills prompts of each
depth and decodes (racers/). Other implementations have their own environments, which the first run creates
(racers/entries.py). Tables name an implementation that cannot be installed, with the reason, and a cell that exceeds
the time limit. All get the same token ids, and their greedy answers to a short prompt are compared with those of
transformers in float32. Results go to race.json in benchmark/results/<machine>. An interrupted run continues there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import checkpoints
import common
from racers import entries
from racers.entries import ENTRIES, Entry, NotInstalled
from tqdm import tqdm

DEPTHS, QUICK_DEPTHS = (4096, 16384, 32768), (1024, 4096)
BATCHES = (4, 1)
STEPS = 16
LOAD_LIMIT = 900
"""Seconds to load a model; one implementation compiles it first."""
PROBE, SAYS = list(range(100, 164)), 12
CACHE = Path.home() / ".cache" / "fluxion-race"
REFERENCE = Entry("reference", "transformers", options={"dtype": "float32"})


class Failed(Exception):
    """A driver took too long or ended; the message is printed in the tables."""


def plan(model: str, folder: Path, depths: list[int], entry: Entry, args: argparse.Namespace) -> dict[str, Any]:
    """The `Plan` for a driver."""
    config = checkpoints.config(model)
    facts = {"kv_bytes": checkpoints.kv_bytes(config), "model_type": config["model_type"]}
    return {
        "model": str(folder),
        "depths": depths,
        "batches": sorted(args.batches, reverse=True),
        "steps": args.steps,
        "threads": common.machine()["cores"],
        "options": {**facts, **entry.options, "policies": list(entry.policies)},
        "probe": PROBE,
        "says": SAYS,
        "vocabulary": config["vocab_size"],
    }


def events(command: list[str], env: dict[str, str], log: Path, limit: float) -> Iterator[dict[str, Any]]:
    """Events of a driver, as they arrive.

    Raises:
        Failed: the driver ended early, or no cell arrived for `limit` seconds.
    """
    with log.open("w") as err, subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=err, text=True) as run:
        assert run.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(run.stdout, lines), daemon=True).start()
        until = time.monotonic() + LOAD_LIMIT
        try:
            while True:
                try:
                    line = lines.get(timeout=max(until - time.monotonic(), 0))
                except queue.Empty:
                    raise Failed("over the limit") from None
                if line is None:
                    run.wait()
                    break
                yield json.loads(line)
                until = time.monotonic() + limit
        finally:
            run.kill()
    if run.returncode:
        raise Failed(f"ended with exit code {run.returncode}")


def _read(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def cell_rows(entry: Entry, cell: dict[str, Any], said: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of a depth, one per variant and batch."""
    names = entry.rows()
    return [
        {
            **said,
            "system": names[found["variant"]],
            "depth": cell["depth"],
            "batch": found["batch"],
            "prefill_s": cell["prefill_s"],
            "prefill_cpu_s": cell["prefill_cpu_s"],
            "decode_ms": round(median(found["decode_s"]) * 1e3, 4),
            "least_ms": round(min(found["decode_s"]) * 1e3, 4),
            "steps": len(found["decode_s"]),
            "peak_gb": cell["peak_gb"],
            **({"cpu_median_ms": round(median(found["step_cpu_s"]) * 1e3, 4)} if "step_cpu_s" in found else {}),
        }
        for found in cell["decode"]
    ]


def failed_rows(entry: Entry, depths: list[int], why: str, said: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {**said, "system": name, "depth": depth, "failed": why} for depth in depths for name in entry.rows().values()
    ]


class Race:
    """One result file: its contents, and the runs that fill it."""

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        self.args, self.path = args, path
        settings = {"batches": list(args.batches), "steps": args.steps}
        header = {**common.header("race"), **settings}
        self.data = common.resume(path, header, (*common.SAME, *settings), args.fresh)
        if args.retry:
            self.data["rows"] = [row for row in self.data["rows"] if "failed" not in row]
        self.data.setdefault("systems", {})
        self.data.setdefault("models", {})

    def missing(self, entry: Entry, model: str, turn: int) -> list[int]:
        """Depths that this round lacks, without those that failed in an earlier round."""
        names = set(entry.rows().values())
        found = [row for row in self.data["rows"] if row["model"] == model and row["system"] in names]
        done = {row["depth"] for row in found if row["round"] == turn or "failed" in row}
        return [depth for depth in sorted(self.args.depths) if depth not in done]

    def reference(self, model: str, folder: Path) -> list[int]:
        """Answer of the model to the probe in float32.

        Raises:
            SystemExit: there is no answer. Without it the tokens of no entry can be judged.
        """
        path = folder / "says.json"
        if not path.is_file():
            try:
                first = next(self._events(REFERENCE, model, folder, []), None)
            except Failed as error:
                raise SystemExit(f"error: {model} in float32: {error}; see {self._log(REFERENCE)}") from None
            if first is None:
                raise SystemExit(f"error: {model} in float32 said nothing; see {self._log(REFERENCE)}")
            path.write_text(json.dumps(first["says"]))
        said: list[int] = json.loads(path.read_text())
        return said

    def run(self, entry: Entry, model: str, turn: int, depths: list[int]) -> None:
        """Run one process of an entry for these depths; save its rows as they arrive."""
        folder = checkpoints.made(model, self.args.cache / "checkpoints")
        config = checkpoints.config(model)
        self.data["models"][model] = {
            "cut": checkpoints.CUTS[model],
            "parameters": checkpoints.parameters(config),
            "layers": config["num_hidden_layers"],
            "kv_bytes": checkpoints.kv_bytes(config),
        }
        said = {"model": model, "round": turn, "load_before": round(os.getloadavg()[0], 2)}
        facts = self.data["systems"].setdefault(entry.name, {})
        waiting = list(depths)
        expected = self.reference(model, folder)
        try:
            interpreter = entries.python(entry, self.args.peers)
            facts["versions"] = entries.versions(entry, interpreter)
            for event in self._events(entry, model, folder, depths):
                if event["event"] == "loaded":
                    facts["settings"] = event["settings"]
                    facts.pop("reason", None)
                    same = sum(a == b for a, b in zip(event["says"], expected, strict=False))
                    facts.setdefault("says", {})[model] = f"{same} of {len(expected)}"
                    facts.setdefault("load_s", {})[model] = event["load_s"]
                elif event["event"] == "cell":
                    waiting.remove(event["depth"])
                    self.data["rows"] += cell_rows(entry, event, said)
                    common.save(self.path, self.data)
            why = "ended early"
        except NotInstalled as error:
            why = "not installed"
            facts["reason"] = str(error)
        except Failed as error:
            why = str(error)
            facts["reason"] = f"{why}: {self._last_words(entry)}" if "exit code" in why else why
        self.data["rows"] += failed_rows(entry, waiting, why, said)
        common.save(self.path, self.data)

    def _events(self, entry: Entry, model: str, folder: Path, depths: list[int]) -> Iterator[dict[str, Any]]:
        wanted = plan(model, folder, depths or [1024], entry, self.args)
        driver = Path(entries.__file__).with_name(f"run_{entry.driver}.py")
        command = [str(entries.python(entry, self.args.peers)), str(driver), json.dumps(wanted)]
        return events(command, entries.environment(entry, self.args.peers), self._log(entry), self.args.limit)

    def _log(self, entry: Entry) -> Path:
        folder: Path = self.args.cache / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{common.folder_name(entry.name)}.log"

    def _last_words(self, entry: Entry) -> str:
        lines = [line for line in self._log(entry).read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it said nothing"


def main() -> None:
    parser = common.arguments(__doc__, "1K and 4K", fresh=True)
    parser.add_argument("--models", nargs="+", choices=tuple(checkpoints.CUTS))
    parser.add_argument("--only", nargs="+", choices=[entry.name for entry in ENTRIES], help="default: all of them")
    parser.add_argument("--depths", nargs="+", type=int, help="tokens of the prompts")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--steps", type=int, default=STEPS, help="that count, of a batch at a depth")
    parser.add_argument("--rounds", type=int, help="over all implementations; tables show medians")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one depth of one implementation")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where checkpoints and logs go")
    parser.add_argument("--peers", type=Path, help="where environments are made; default: peers in the cache")
    parser.add_argument("--retry", action="store_true", help="run once more what failed before")
    args = parser.parse_args()
    args.models = args.models or (["llama-111m"] if args.quick else list(checkpoints.CUTS))
    args.depths = args.depths or (QUICK_DEPTHS if args.quick else DEPTHS)
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.peers = (args.peers or args.cache / "peers").absolute()

    chosen = [entry for entry in ENTRIES if not args.only or entry.name in args.only]
    path = common.result_path(args, "race")
    race = Race(path, args)
    with tqdm(list(itertools.product(args.models, range(args.rounds), chosen))) as bar:
        for model, turn, entry in bar:
            bar.set_description(f"{model} {entry.name}, round {turn + 1}")
            depths = race.missing(entry, model, turn)
            if depths:
                race.run(entry, model, turn, depths)
    print(f"{path.relative_to(common.ROOT)}: {len(race.data['rows'])} rows. Now: python benchmark/tables.py")


if __name__ == "__main__":
    main()
