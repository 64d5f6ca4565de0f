"""The `fluxion` command."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads has seen enough (`fluxion options | head`). At its end Python would flush, and fail, once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    from fluxion_sglang import __version__

    parser = argparse.ArgumentParser(prog="fluxion", description="Long contexts for SGLang: KV in host memory.")
    parser.add_argument("--version", action="version", version=f"fluxion-sglang {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    doctor = commands.add_parser("doctor", help="check whether this machine and environment can serve with Fluxion")
    doctor.add_argument("--json", action="store_true", help="print the checks as JSON")
    doctor.set_defaults(run=_doctor)

    options = commands.add_parser("options", help="list the keys of --fluxion-config")
    options.set_defaults(run=_options)

    from fluxion_sglang.commands import ask, explain, plot, trial
    from fluxion_sglang.training import command as train

    for name, command, text in (
        ("try", trial, "a report card for a model: is it served, how fast, what does it answer, what to run"),
        ("ask", ask, "ask questions about a long file"),
        ("explain", explain, "show what layers and heads read, of a running server or an audit file"),
        ("plot", plot, "draw the same as one picture"),
    ):
        subparser = commands.add_parser(name, help=text)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)

    training = commands.add_parser("train", help="train the predictor of a model, and calibrate its tau")
    train.add_arguments(training)
    training.set_defaults(run=train.main)

    bench = commands.add_parser("bench", help="measure").add_subparsers(metavar="BENCHMARK", required=True)
    _add_quality(bench.add_parser("quality", help="what policies cost in quality, against full attention"))
    return parser


def _add_quality(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--suite", required=True, help="ruler, longbench, leval, perplexity or extraction")
    option("--lengths", default="", help="tokens of a prompt, as in 4k,8k (k is 1,024); default 4k")
    option(
        "--policies",
        default="oracle,fixed:16:0.05",
        help="policy specs; full is always among them; oracle alone takes the budgets of the others; off is SGLang "
        "without the flag (default: %(default)s)",
    )
    option("--model", type=Path, help="folder of a model, not its name; default: models/needle of the checkout")
    option("--samples", type=int, default=20, help="questions of a task at a length (default: %(default)s)")
    option("--tasks", default="", help="some of the suite's tasks; default: all")
    option("--data", type=Path, help="folder with the suite's files, where it has any")
    option("--seed", type=int, default=0, help="of samples and intervals (default: %(default)s)")
    option("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="default: the model's")
    option("--batch", type=int, default=8, help="requests that run at a time (default: %(default)s)")
    option("--device", help="as of SGLang's --device; default: its choice")
    option("--predictor", type=Path, help="folder of a predictor; default: `fluxion` in the model's folder")
    option("--fluxion-config", type=_config, default={}, help="further options of the server: a JSON object")
    option("--out", type=Path, help="result file; the same command goes on from it (default: quality_SUITE_MODEL.json)")
    option("--fresh", action="store_true", help="replace the result file instead of going on from it")
    parser.set_defaults(run=_quality)


_MEASURED = ("policy", "request_policies", "predictor", "host_tokens", "host_memory_gb", "audit", "record")
"""Keys of `--fluxion-config` that `bench quality` sets, or has an option for."""


def _config(text: str) -> dict[str, object]:
    """Options of the server that the benchmark does not set itself."""
    from fluxion_sglang.config import ConfigError, FluxionConfig

    try:
        values: dict[str, object] = json.loads(text)
        FluxionConfig.from_dict(values)
    except (ConfigError, ValueError, AttributeError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"give a JSON object of options ({error})") from None
    own = sorted(set(_MEASURED) & values.keys())
    if own:
        raise argparse.ArgumentTypeError(
            f"{', '.join(own)} cannot be given, because the benchmark or an option of its own sets it"
        )
    return values


def _doctor(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from fluxion_sglang.commands import doctor

    console = Console()
    with console.status("Looking") if console.is_terminal and not arguments.json else contextlib.nullcontext():
        checks = doctor.run_checks()
    if arguments.json:
        doctor.print_json(checks)
    else:
        doctor.print_report(checks, console)
    return 0 if doctor.ready(checks) else 1


def _options(arguments: argparse.Namespace) -> int:
    from fluxion_sglang.config import FluxionConfig

    for option in FluxionConfig.options():
        print(f"{option.key}  ({option.type}, default {option.default})")
        print(f"    {option.doc} Example: {option.example}")
    return 0


def _quality(arguments: argparse.Namespace) -> int:
    try:
        from fluxion_quality import command
    except ModuleNotFoundError as error:
        print(
            f"fluxion bench quality needs the Python package {error.name!r}; install it with: "
            "pip install 'fluxion-sglang[quality]'.",
            file=sys.stderr,
        )
        return 2
    return command.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
