"""How long a decode step would take on a machine that is not here.

    python benchmark/forecast measure     # rates of this machine, and whether they foretell its own steps; 25 min
    python benchmark/forecast machines    # from the rates: servers of machines.json; seconds
    python benchmark/forecast ask --batch 8 --context 1000000 --server "2 x EPYC 9654, DDR5-4800"

A forecast takes rates of this machine's kernels, each for one worker (step.py), and a machine's cores and memory
(hardware.py), and goes through one layer of attention event by event (layer.py). It has first to foretell whole decode
steps of models on this machine, which `measure` does, with two models that it has learnt its overhead from and one that
it has not. "This machine" is the one that `measure` ran on. Results go to forecast.json and forecast_machines.json in
benchmark/results/<machine>.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `python benchmark/forecast` as for the scripts beside it

from fluxion_sglang import openmp

if __name__ == "__main__":
    openmp.wait_passively()  # before torch is loaded

import common
from forecast import hardware
from forecast.hardware import BOUND
from forecast.step import Rates, forecast
from forecast.work import Model, Reading
from tqdm import tqdm

MODEL = "llama-3.1-8b"
ASKED = ((1, 1_000_000), (8, 1_000_000), (32, 250_000), (32, 32_000))
"""Requests and tokens of each."""
POLICIES = ("full", "fixed:16:0.05")


def measured(args: argparse.Namespace) -> None:
    from forecast import measure

    path = common.result_path(args, "forecast")
    calibrated = () if args.quick else measure.CALIBRATED
    checked = measure.QUICK if args.quick else measure.CHECKED
    pace = measure.Pace()
    rates, usual = measure.measure_rates([*calibrated, *(model for model, _ in checked)], args.quick, pace, tqdm.write)
    with tqdm(total=len(calibrated) + len(checked), unit="model") as bar:
        seen = []
        for model in calibrated:
            seen += measure.decoded(model, measure.CALIBRATED_DEPTH, measure.SPECS[:1], pace, usual)
            bar.update()
        if calibrated:
            rates = replace(rates, **measure.around(rates, seen))
        tqdm.write(f"a step {rates.step_us} us, a layer {rates.layer_us} us, one request and each other")
        data: dict[str, Any] = {**common.header("forecast"), "rates": rates.to_json(), "calibrated": calibrated}
        data |= {"rows": []}
        for model, depth in checked:
            for one in measure.decoded(model, depth, measure.SPECS, pace, usual):
                ms = measure.expected(rates, one)
                row = {**asdict(one), "forecast_ms": round(ms, 3), "error": round(ms / one.ms - 1, 4)}
                data["rows"].append({**row, "ms": round(one.ms, 3), "tiles": round(one.tiles, 4)})
                at = f"memory {one.memory:.2f}, cores {one.cores:.2f}"
                tqdm.write(f"{model} {depth} x{one.batch} {one.spec:14} {one.ms:8.2f} ms, forecast {ms:8.2f} ({at})")
            common.save(path, data)
            bar.update()
    errors = [abs(row["error"]) for row in data["rows"]]
    within = sum(error <= BOUND for error in errors)
    print(
        f"{path.relative_to(common.ROOT)}: {within} of {len(errors)} steps within {BOUND:.0%}, errors up to "
        f"{max(errors):.0%}, the median {median(errors):.0%}."
    )


def foretold(machine: str) -> dict[str, Any]:
    """What was measured on a machine, if it foretells that machine's own steps."""
    from forecast.measure import BATCHES, CHECKED, SPECS

    path = common.RESULTS / machine / "forecast.json"
    data = common.load(path)
    if data is None:
        sys.exit(f"error: {path} does not exist; measure first: python benchmark/forecast measure")
    whole = len(CHECKED) * len(SPECS) * len(BATCHES)
    worst = max((abs(row["error"]) for row in data["rows"]), default=1.0)
    if len(data["rows"]) < whole or worst > BOUND:
        sys.exit(
            f"error: {path} has {len(data['rows'])} of {whole} steps, forecast with errors up to {worst:.0%}, where "
            f"{BOUND:.0%} is allowed; measure again: python benchmark/forecast measure"
        )
    return data


def one(model: Model, machine: hardware.Machine, rates: Rates, ranks: int, batch: int, context: int, spec: str) -> dict:
    domain = machine.domain(ranks, rates.alone)
    found = forecast(model, domain, rates, batch, context, Reading.of(spec, model.group), ranks)
    said = {"machine": machine.name, "ranks": ranks, "batch": batch, "context": context, "policy": spec}
    return said | {key: float(f"{value:.4g}") for key, value in asdict(found).items()}


def line(row: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {row[f'{name}_ms']:.1f}" for name in ("matrices", "attention", "reduce", "rest"))
    return (
        f"{row['machine']}, {row['ranks']} rank(s): {row['batch']} x {row['context']:,} {row['policy']:14}"
        f"{row['ms']:9.1f} ms a token ({parts}), {row['batch'] / row['ms'] * 1e3:,.0f} tokens/s;"
        f" {row['gb_per_s']:.0f} GB/s; KV {row['pool_gib']:,.0f} GiB"
    )


def machines(args: argparse.Namespace) -> None:
    data, model = foretold(args.machine), Model.read(common.MODELS / MODEL)
    rates = Rates.from_json(data["rates"])
    rows = []
    for machine in hardware.machines().values():
        for (batch, context), spec in ((asked, spec) for asked in ASKED for spec in POLICIES):
            if model.pool_bytes(batch * context) > 0.9 * machine.memory_gib * 2**30:
                continue
            for ranks in (1, machine.nodes):
                rows.append(one(model, machine, rates, ranks, batch, context, spec))
                print(line(rows[-1]), flush=True)
    path = common.RESULTS / args.machine / "forecast_machines.json"
    of_rates = {key: data[key] for key in ("machine", "versions", "commit", "date") if key in data}
    common.save(path, {**common.header("forecast_machines"), **of_rates, "model": MODEL, "rows": rows})
    print(f"{path.relative_to(common.ROOT)}: {len(rows)} rows. Now: python benchmark/tables.py")


def ask(args: argparse.Namespace) -> None:
    known = hardware.machines(args.machines)
    if args.server not in known:
        sys.exit(f"error: no machine {args.server!r} in {args.machines}; it has {', '.join(known)}")
    machine, rates = known[args.server], Rates.from_json(foretold(args.machine)["rates"])
    try:
        if min(args.ranks, args.batch, args.context) < 1:
            raise ValueError("--ranks, --batch and --context are 1 or more")
        model = Model.read(args.model)
        if (pool := model.pool_bytes(args.batch * args.context)) > machine.memory_gib * 2**30:
            raise ValueError(f"the KV takes {pool / 2**30:,.0f} GiB, and {machine.name} has {machine.memory_gib:,}")
        row = one(model, machine, rates, args.ranks, args.batch, args.context, args.policy)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(line(row))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python benchmark/forecast", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for name, run in (("measure", measured), ("machines", machines), ("ask", ask)):
        command = commands.add_parser(name)
        command.set_defaults(run=run, fresh=True)
        command.add_argument("--machine", default=common.machine_name(), help="folder under benchmark/results")
        if name == "measure":
            command.add_argument("--quick", action="store_true", help="small sizes; not a published result")
        if name == "ask":
            command.add_argument("--server", required=True, help="a name in the file of machines")
            command.add_argument("--machines", type=Path, default=hardware.MACHINES, help="a file like machines.json")
            command.add_argument("--model", type=Path, default=common.MODELS / MODEL, help="folder with config.json")
            command.add_argument("--ranks", type=int, default=1, help="1, or one a NUMA node")
            command.add_argument("--batch", type=int, required=True, help="requests that decode at once")
            command.add_argument("--context", type=int, required=True, help="tokens of each")
            command.add_argument("--policy", default="full", help="full or fixed:BLK:SHARE")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
