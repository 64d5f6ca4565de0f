"""The same GGUF file in llama.cpp and in Fluxion: decode steps at several depths, and prompt tokens per second.

    python benchmark/same_file.py                        # both public files; an hour on two cores
    python benchmark/same_file.py --models smollm2 --depths 512 4096 --rounds 1
    python benchmark/same_file.py --quick

A round runs each way in its own process (racers/), one after another. Times are medians over steps, then over rounds; a
ratio is the median of the rounds' ratios. The first run builds llama.cpp for this machine. `make checkpoints` fetches
the files. Results go to same_file.json in benchmark/results/<machine>.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

import common
from racers import entries
from racers.driver import Plan
from racers.entries import Entry

from fluxion_sglang.scoring.model_files import public

DEPTHS = {"smollm2": [512, 4096, 7900], "gemma3": [512, 8192, 16384]}
VOCABULARY = 32000
BATCHES, STEPS, ROUNDS = [4, 1], 16, 3
POLICIES = ("sketch", "full")  # the first policy creates the pool, with sketches
CACHE = Path.home() / ".cache" / "fluxion-race"


def llama(name: str, kv: str, flash_attention: bool) -> Entry:
    return Entry(name, "llama_cpp", "llama", {"kv": kv, "flash_attention": flash_attention})


WAYS = (
    llama("llama.cpp", "f16", False),
    llama("llama.cpp, flash attention", "f16", True),
    llama("llama.cpp, flash attention, KV in q8_0", "q8_0", True),
    Entry("Fluxion", "sglang", policies=POLICIES),
)
Cells = dict[tuple[str, int, int], float]
"""Milliseconds of a step by (way, depth, batch); batch 0 holds prompt tokens per second."""


def cells(way: Entry, file: Path, depths: list[int]) -> Cells:
    """Results of one process."""
    options = {**way.options, "policies": list(way.policies), "file": file.name}
    model = file.parent if way.peer else file
    plan = Plan(str(model), depths, BATCHES, STEPS, common.machine()["cores"], options, [5, 6, 7], 1, VOCABULARY)
    peers = CACHE / "peers"
    script = entries.HERE / f"run_{way.driver}.py"
    command = [str(entries.python(way, peers)), str(script), json.dumps(vars(plan))]
    done = subprocess.run(command, capture_output=True, text=True, env=entries.environment(way, peers))
    if done.returncode:
        raise SystemExit(f"error: {script.name} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    found: Cells = {}
    for cell in map(json.loads, done.stdout.splitlines()):
        if cell["event"] == "cell":
            for row in cell["decode"]:
                name = way.rows()[row["variant"]]
                found[name, cell["depth"], row["batch"]] = median(row["decode_s"]) * 1e3
                found[name, cell["depth"], 0] = cell["depth"] / cell["prefill_s"]
    return found


def rows(name: str, found: list[Cells]) -> list[dict[str, Any]]:
    """A row per depth and batch: each way's median, and our median ratio to the fastest llama.cpp of each round."""
    made = []
    for depth, batch in dict.fromkeys(key[1:] for key in found[0]):
        each = {
            way: [one[way, depth, batch] for one in found] for way, *_ in found[0] if (way, depth, batch) in found[0]
        }
        best = max if batch == 0 else min
        theirs = [best(one[key] for key in one if key[1:] == (depth, batch) and "llama" in key[0]) for one in found]
        ours = {way: values for way, values in each.items() if "llama" not in way}
        made.append(
            {
                "model": name,
                "depth": depth,
                "batch": batch,
                "each": {way: round(median(values), 3) for way, values in each.items()},
                "ratio": {
                    way: round(median(mine / other for mine, other in zip(values, theirs, strict=True)), 4)
                    for way, values in ours.items()
                },
            }
        )
    return made


def main() -> None:
    parser = common.arguments(__doc__, "one round at 512 tokens")
    parser.add_argument("--models", nargs="+", choices=DEPTHS, default=list(DEPTHS))
    parser.add_argument("--depths", nargs="+", type=int, help="tokens before the steps; default: those of each model")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    made = []
    for name in args.models:
        depths = [512] if args.quick else args.depths or DEPTHS[name]
        file = Path(public(name)) / f"{name}.gguf"
        if not file.exists():
            raise SystemExit(f"error: {file} is not there; run `make checkpoints ARGS={name}` first.")
        found: list[Cells] = []
        for turn in range(1 if args.quick else args.rounds):
            one: Cells = {}
            for way in WAYS[:: 1 if turn % 2 == 0 else -1]:
                one |= cells(way, file, depths)
            found.append(one)
            print(json.dumps(rows(name, found)), flush=True)
        made += rows(name, found)
    common.publish(args, "same_file", made, rounds=args.rounds, steps=STEPS)


if __name__ == "__main__":
    main()
