"""`fluxion train`: its options. `run.py` has the implementation."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

HELP: Final = "train the predictor of a model, and calibrate its tau"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--model", required=True, help="folder of the model, or its name on the Hub")
    option("--data", type=Path, required=True, help="JSONL: text or input_ids a line, or LongBench-V2's; see the docs")
    option("--out", type=Path, required=True, help="folder of the predictor; the same command goes on from it")
    option("--taus", default="0.05,0.1,0.2,0.3", help="errors to train for (default: %(default)s)")
    option("--kl", type=float, default=0.02, help="quality target: mean KL from full attention, nats a token")
    option("--accuracy", type=float, default=0.05, help="quality target: share of answers that may be lost")
    option("--sinks", type=int, default=64, help="as the server's (default: %(default)s)")
    option("--window", type=int, default=256, help="as the server's (default: %(default)s)")
    option("--epochs", type=int, default=30, help="passes over the samples (default: %(default)s)")
    option("--quantile", type=float, default=0.9, help="of the budget to predict: higher reads more, errs less")
    option("--coverage", type=float, default=0.98, help="share of every head's budgets that is to suffice")
    option("--miss-rate", type=float, default=0.001, help="share of needed heads that may be called streaming")
    option("--seed", type=int, default=0, help="of steps, split and training (default: %(default)s)")
    option("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="default: the model's")
    option("--device", help="as of SGLang's --device; default: its choice")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    from fluxion_sglang.training.run import main  # imports torch, which would delay `fluxion --help` by seconds

    return main(arguments)
