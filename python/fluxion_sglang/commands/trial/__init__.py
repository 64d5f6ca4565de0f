"""`fluxion try`: a report card for a model, in a terminal and as one HTML page.

`course.py` runs the parts in order; the other modules implement them. `results.py` holds the results, `sections.py`
makes texts and tables of them, `card.py` shows these.
"""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "a report card for a model: is it served, how fast, what does it answer, what to run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder of a model, its name on the Hub, or smollm2, gemma3 (make checkpoints); default: the bundled one",
    )
    option("--out", type=Path, help="the HTML page (default: fluxion_try_MODEL.html)")
    option("--json", type=Path, help="file for all numbers, with machine and versions")
    option(
        "--lengths",
        default="",
        help="tokens of prompt and answer, as in 2k,8k (k is 1,024); default: as long as the time allows",
    )
    option(
        "--policies",
        default="",
        help="policies to try beside full, as in fluxion,fixed:16:0.25; default: fluxion where a predictor fits the "
        "model, else sketch",
    )
    option(
        "--text",
        metavar="FILE",
        help="text in UTF-8 that prompts are passages of, or handbook, python (make checkpoints); default: the "
        "reference of the Python language",
    )
    option("--minutes", type=float, default=10.0, help="about how long it may take (default: %(default)g)")
    option("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="default: the model's")
    option("--server-args", default="", help="more words for both servers, in one string, as in '--tp 2'")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code: 1 if Fluxion does not serve the model, 2 for bad input."""
    from fluxion_sglang.commands.trial.command import main

    return main(arguments)
