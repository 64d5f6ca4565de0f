"""What containment costs a decode step in which nothing fails.

    PYTHONPATH=test python benchmark/containment.py            # the bundled model; about two minutes
    PYTHONPATH=test python benchmark/containment.py --quick

A server in one process decodes. Its hooks are taken out and put back in turn, a block of steps each. `hooks_us` is
what the hooks themselves take, with functions that do nothing in the place of SGLang's. Results go to
containment.json in benchmark/results/<machine>.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from importlib import import_module
from statistics import median
from types import SimpleNamespace
from typing import Any

import common
import torch
from faults.inprocess import Call, InProcess

from fluxion_sglang.sglang import compat
from fluxion_sglang.sglang.plugin import HOOKS

IN_A_STEP = (compat.TAKE_IN, compat.LOGITS, compat.SEND_OUTPUT)
"""Hooks of containment that run in a decode step while the queue is empty."""

BLOCK = 20
"""Steps with the hooks, and then as many without."""


def owner(need: compat.Need) -> tuple[Any, str]:
    value = import_module(need.module)
    *outer, name = need.name.split(".")
    for part in outer:
        value = getattr(value, part)
    return value, name


def put(there: bool, hooked: dict[compat.Need, Any]) -> None:
    for need, function in hooked.items():
        setattr(*owner(need), function if there else function.__wrapped__)


def steps(server: InProcess, requests: int, new: int, temperature: float) -> dict[bool, list[float]]:
    """Microseconds of decode steps with the hooks (True) and without, without the time of other processes' parts."""
    times: dict[bool, list[float]] = {True: [], False: []}
    hooked = {need: getattr(*owner(need)) for need in IN_A_STEP}
    state = SimpleNamespace(last=0.0, beside=0.0, count=0)
    run_batch, turn = server.scheduler.run_batch, server.door._turn

    def timed_turn() -> None:
        start = time.perf_counter()
        turn()
        state.beside += time.perf_counter() - start

    def timed_run(batch: Any, *args: Any, **kwargs: Any) -> Any:
        now = time.perf_counter()
        there = state.count // BLOCK % 2 == 0
        if batch.forward_mode.is_decode() and len(batch.reqs) == requests:
            if state.last and state.count % BLOCK > 1:  # a step of each block is of both kinds
                times[there].append((now - state.last - state.beside) * 1e6)
            state.count += 1
            put(state.count // BLOCK % 2 == 0, hooked)
        state.last, state.beside = time.perf_counter(), 0.0
        return run_batch(batch, *args, **kwargs)

    server.scheduler.run_batch, server.door._turn = timed_run, timed_turn
    params = {"max_new_tokens": new, "ignore_eos": True, "temperature": temperature, "top_p": 0.9}
    body = {"input_ids": list(range(100, 400)), "sampling_params": params}
    try:
        answers = server.together([Call(body) for _ in range(requests)], patience=600)
        assert all(len(answer.tokens) == new for answer in answers)
    finally:
        put(True, hooked)
        server.scheduler.run_batch, server.door._turn = run_batch, turn
    return times


def hooks_us(requests: int, calls: int) -> float:
    """Microseconds that the hooks of a step take, beside what they are around."""
    logits, info = torch.zeros(requests, 512), SimpleNamespace(is_all_greedy=False)
    arguments: dict[compat.Need, tuple[Any, ...]] = {
        compat.TAKE_IN: (None, []),
        compat.LOGITS: (None, logits, info),
        compat.SEND_OUTPUT: (None, [None] * requests, False),
    }
    nothing: Callable[..., Any] = lambda *args: args[1]  # noqa: E731

    def each(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function(*args)
        return (time.perf_counter() - start) / calls * 1e6

    return sum(each(HOOKS[need], (nothing, *args)) - each(nothing, args) for need, args in arguments.items())


def interval(times: dict[bool, list[float]]) -> list[float]:
    """With over without, medians: the middle 95% of 1,000 resamples."""
    draw = random.Random(0)
    ratios = sorted(
        median(draw.choices(times[True], k=len(times[True]))) / median(draw.choices(times[False], k=len(times[False])))
        for _ in range(1000)
    )
    return [round(ratios[25], 4), round(ratios[975], 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--quick", action="store_true", help="200 steps; the result file is not a published one")
    parser.add_argument("--machine", default=common.machine_name(), help="folder under benchmark/results")
    args = parser.parse_args()
    count = 200 if args.quick else args.steps
    server = InProcess(config={"host_tokens": 8 * (count + 400)})
    rows = []
    for requests, temperature in ((1, 0), (1, 1), (8, 0), (8, 1)):
        times = steps(server, requests, count, temperature)
        with_, without, hooks = median(times[True]), median(times[False]), hooks_us(requests, 20_000)
        row = {
            "requests": requests,
            "sampled": temperature > 0,
            "step_us": round(without, 1),
            "with_us": round(with_, 1),
            "ratio": round(with_ / without, 4),
            "interval": interval(times),
            "hooks_us": round(hooks, 2),
            "hooks_share": round(hooks / without, 5),
        }
        print(row)
        rows.append(row)
    path = common.RESULTS / args.machine / ("containment_quick.json" if args.quick else "containment.json")
    common.save(path, {**common.header("containment"), "steps": count, "rows": rows})
    print(f"{path.relative_to(common.ROOT)}: {len(rows)} rows")


if __name__ == "__main__":
    main()
