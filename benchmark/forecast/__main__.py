"""Forecast the time of a decode step on a machine that is not available.

    python benchmark/forecast --batch 8 --context 1000000 --server "2 x EPYC 9654, DDR5-4800"

A forecast combines kernel rates of one worker (step.py) with a machine's cores and memory (hardware.py), and simulates
one attention layer event by event (layer.py). The rates were measured on two Zen 5 cores on 2026-11-26, together with
decode steps of whole models. A test checks that the rates predict these steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `python benchmark/forecast` imports like the scripts beside it

import common
from forecast.hardware import MACHINES, machines
from forecast.step import Rates, forecast
from forecast.work import Model, Reading

RATES = common.RESULTS / "amd-epyc-2-cores" / "forecast.json"


def said(args: argparse.Namespace) -> str:
    """One line with the step's time and its parts.

    Raises:
        ValueError: the arguments name a case that cannot be forecast.
    """
    known = machines(args.machines)
    if args.server not in known:
        raise ValueError(f"no machine {args.server!r} in {args.machines}; it has {', '.join(known)}")
    if min(args.ranks, args.batch, args.context) < 1:
        raise ValueError("--ranks, --batch and --context are 1 or more")
    machine, rates = known[args.server], Rates.from_json(json.loads(RATES.read_text())["rates"])
    model = Model.read(args.model)
    if (pool := model.pool_bytes(args.batch * args.context) / 2**30) > machine.memory_gib:
        raise ValueError(f"the KV takes {pool:,.0f} GiB, and {machine.name} has {machine.memory_gib:,}")
    domain, reading = machine.domain(args.ranks, rates.alone), Reading.of(args.policy, model.group)
    found = forecast(model, domain, rates, args.batch, args.context, reading, args.ranks)
    parts = ", ".join(
        f"{name} {getattr(found, f'{name}_ms'):.1f}" for name in ("matrices", "attention", "reduce", "rest")
    )
    return (
        f"{machine.name}, {args.ranks} rank(s): {args.batch} x {args.context:,} {args.policy}: {found.ms:.1f} ms a "
        f"token ({parts}), {args.batch / found.ms * 1e3:,.0f} tokens/s; {found.gb_per_s:.0f} GB/s; KV {pool:,.0f} GiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python benchmark/forecast", description=__doc__.splitlines()[0])
    parser.add_argument("--server", required=True, help="a name in the file of machines")
    parser.add_argument("--machines", type=Path, default=MACHINES, help="a file like machines.json")
    parser.add_argument("--model", type=Path, default=common.MODELS / "llama-3.1-8b", help="folder with config.json")
    parser.add_argument("--ranks", type=int, default=1, help="1, or one a NUMA node")
    parser.add_argument("--batch", type=int, required=True, help="requests that decode at once; at most 32")
    parser.add_argument("--context", type=int, required=True, help="tokens of each")
    parser.add_argument("--policy", default="full", help="full or fixed:BLK:SHARE")
    try:
        print(said(parser.parse_args()))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
