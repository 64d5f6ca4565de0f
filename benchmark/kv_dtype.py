"""What KV in 8 bits (`kv_dtype`) does to attention of decode steps: the same steps over two host pools, in turns.

    python benchmark/kv_dtype.py            # 32K, four requests; a few minutes on two cores
    python benchmark/kv_dtype.py --quick

Both pools hold the same requests, one in bfloat16 and one in int8; every step is taken over one and then over the
other, so a machine that drifts drifts for both. Errors are those of the attention of each pool against exact attention
over what was appended, in float64. Results go to kv_dtype.json in benchmark/results/<machine>.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median
from typing import Any

import common

from fluxion_sglang import openmp

if __name__ == "__main__":
    openmp.wait_passively()  # as in serving; before torch is imported

from attention import SOURCES, Bench
from tqdm import tqdm

from fluxion_sglang.policy import Policy, parse_spec

MODELS = ("random", "needle")
POLICIES = ("full", "fixed:128:0.25", "fixed:16:0.10")
BATCH = 4


def step_seconds(bench: Bench, policy: Policy, index: int) -> float:
    start = time.perf_counter()
    bench.step(index, policy)
    return time.perf_counter() - start


def measure(model: str, length: int, turns: int) -> list[dict[str, Any]]:
    """A row a policy: ms a layer of either pool, and the median over steps of what one takes over the other."""
    requests = SOURCES[model](length, BATCH)
    benches = {name: Bench(requests, BATCH, name == "int8") for name in ("bfloat16", "int8")}
    exact, layers = benches["bfloat16"].exact(), requests.shape.layers
    rows = []
    for spec in tqdm(POLICIES, desc=f"{model} {length}"):
        policy = parse_spec(spec)
        errors = {name: float(bench.errors(policy, exact).mean()) for name, bench in benches.items()}
        times: dict[str, list[float]] = {name: [] for name in benches}
        for _ in range(turns):
            for bench in benches.values():
                bench.rewind(policy)
            for index in range(requests.steps):
                taken = {name: step_seconds(bench, policy, index) for name, bench in benches.items()}
                for name, seconds in taken.items() if index else ():  # the first step of a turn warms up
                    times[name].append(seconds)
        ratios = sorted(a / b for a, b in zip(times["bfloat16"], times["int8"], strict=True))
        rows.append(
            {
                "model": model,
                "length": length,
                "batch": BATCH,
                "policy": spec,
                **{f"{name}_ms": round(median(t) * 1e3 / layers, 4) for name, t in times.items()},
                "faster": round(median(ratios), 3),
                "quartiles": [round(ratios[len(ratios) * i // 4], 3) for i in (1, 3)],
                **{f"{name}_error": float(f"{error:.3g}") for name, error in errors.items()},
                "steps": len(ratios),
                "load": round(os.getloadavg()[0], 2),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="2K; the result file is not a published one")
    parser.add_argument("--fresh", action="store_true", help="start over instead of continuing a result file")
    parser.add_argument("--machine", default=common.machine_name(), help="folder under benchmark/results")
    args = parser.parse_args()
    length, turns = (2048, 2) if args.quick else (args.length, args.turns)
    path = common.result_path(args, "kv_dtype")
    settings = {"turns": turns, "length": length}
    data = common.resume(path, {**common.header("kv_dtype"), **settings}, (*common.SAME, *settings), args.fresh)
    for model in args.models:
        if any(row["model"] == model for row in data["rows"]):
            continue
        data["rows"] += measure(model, length, turns)
        common.save(path, data)
    for row in data["rows"]:
        print(
            f"{row['model']} {row['length']:,} x{row['batch']} {row['policy']:15} "
            f"bfloat16 {row['bfloat16_ms']:.3f} ms, int8 {row['int8_ms']:.3f} ms: {row['faster']:.2f} times as fast"
        )


if __name__ == "__main__":
    main()
