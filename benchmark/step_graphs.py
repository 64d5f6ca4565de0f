"""Decode steps of small models with and without step graphs, in turns in one process.

    python benchmark/step_graphs.py             # two models, one request and four; some minutes
    python benchmark/step_graphs.py --quick

A step is complete, as in SGLang's own benchmark: batch preparation, the model, the choice of a token. Turns of a few
steps with and without the graph alternate; the first step of a turn does not count. Results go to step_graphs.json in
benchmark/results/<machine>.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import common

from fluxion_sglang import openmp

if __name__ == "__main__":
    openmp.wait_passively()  # before torch is loaded, here and in child processes

import checkpoints
from racers import driver

MODELS, BATCHES, DEPTH = ("llama-111m", "qwen3-0.6b"), (4, 1), 1024
TURNS, STEPS = 30, 8
CACHE = Path.home() / ".cache" / "fluxion-race" / "checkpoints"
POLICY = "full"


def turns_of(say: Any, model: str, turns: int, depth: int) -> None:
    """Rows of one model, in a process of its own."""
    sys.path.insert(0, str(Path(driver.__file__).parent))  # drivers of the race import each other this way
    from run_sglang import Sglang

    config = checkpoints.config(model)
    room = depth + (turns * 2 + 2) * STEPS * len(BATCHES)
    options = {"policies": [POLICY], "config": {"host_tokens": BATCHES[0] * (room + 64)}}
    folder = checkpoints.made(model, CACHE)
    plan = driver.Plan(str(folder), [room], list(BATCHES), STEPS, common.machine()["cores"], options, [], 0, 32000)
    racer = Sglang()
    racer.load(plan)
    racer.prefill(plan.prompts(depth))
    backbone = racer._runner.torch_runner.model.model
    ways = {"graph": backbone.forward, "python": type(backbone).forward.__get__(backbone)}
    assert ways["graph"] != ways["python"], "the model has no step graphs"
    layers = config["num_hidden_layers"]
    for batch in BATCHES:
        racer.decode(POLICY, batch, STEPS)  # this builds the graph
        spent: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(turns):
            for way, forward in ways.items():
                backbone.forward = forward
                spent[way].append(median(racer.decode(POLICY, batch, STEPS)[1:]) * 1e3)
        say.send(
            {
                "model": model,
                "layers": layers,
                "batch": batch,
                "depth": depth,
                **{f"{way}_ms": round(median(found), 4) for way, found in spent.items()},
                "ratio": round(median(a / b for a, b in zip(*spent.values(), strict=True)), 4),
            }
        )
    os._exit(0)


def rows_of(start: Any, measure: Callable[..., None], *args: Any) -> Iterator[dict[str, Any]]:
    """Messages that `measure(say, *args)` sends from a process of its own. start: a context of multiprocessing.

    Raises:
        SystemExit: the process failed; its earlier messages have been yielded.
    """
    said, say = start.Pipe(duplex=False)
    process = start.Process(target=measure, args=(say, *args))
    process.start()
    say.close()  # the process then holds the only other end, and its death closes the pipe
    with said:
        try:
            while True:
                yield said.recv()
        except EOFError:
            process.join()
    if process.exitcode:
        raise SystemExit(f"error: the process that measured {args[0]} ended with exit code {process.exitcode}")


def main() -> None:
    parser = common.arguments(__doc__, "two turns")
    parser.add_argument("--models", nargs="+", choices=tuple(checkpoints.CUTS), default=MODELS)
    parser.add_argument("--turns", type=int, help="of each kind, for a batch")
    parser.add_argument("--depth", type=int, default=DEPTH, help="tokens of the prompts")
    args = parser.parse_args()
    turns = args.turns or (2 if args.quick else TURNS)
    spawn = multiprocessing.get_context("spawn")
    rows = common.told(row for model in args.models for row in rows_of(spawn, turns_of, model, turns, args.depth))
    common.publish(args, "step_graphs", rows, turns=turns, steps=STEPS - 1, policy=POLICY)


if __name__ == "__main__":
    main()
