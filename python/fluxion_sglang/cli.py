"""The `fluxion` command."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Final

ENTRY_POINTS: Final = "fluxion_commands"
"""The group of entry points by which other packages add commands."""

_Commands = argparse._SubParsersAction


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe (`fluxion options | head`). Redirect stdout, which Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:  # the command handles no interrupt itself
        return 130
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

    from fluxion_sglang.commands import ask, explain, trial
    from fluxion_sglang.training import command as train

    for name, command in (("try", trial), ("ask", ask), ("explain", explain), ("train", train)):
        _add(commands, name, command)
    _add_others(commands)
    return parser


def _add_others(commands: _Commands) -> None:
    """Add the commands of other packages: entry points GROUP-NAME of modules with `HELP`, `add_arguments` and `run`."""
    groups: dict[str, _Commands] = {}
    # Key by name: the metadata may list a package twice.
    for point in {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}.values():
        group, _, name = point.name.partition("-")
        try:
            module = point.load()
        except ImportError as error:  # one broken package must not disable the other commands
            print(f"fluxion {group} {name} is left out, because it cannot be imported: {error}", file=sys.stderr)
            continue
        if group not in groups:
            parser = commands.add_parser(group, help="measure", epilog="Without a name: the benchmarks of a checkout.")
            parser.set_defaults(run=_benchmarks, names=["--list"])
            groups[group] = parser.add_subparsers(metavar="BENCHMARK", action=_Benchmarks)
            groups[group].choices = None  # type: ignore[assignment]  # any word passes
        _add(groups[group], name, module)


class _Benchmarks(_Commands):
    """Commands of other packages; other words are passed to `python -m benchmark` in a checkout."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        if values[0] in self._name_parser_map:
            super().__call__(parser, namespace, values, option)
        else:
            namespace.names = values


def _benchmarks(arguments: argparse.Namespace) -> int:
    from fluxion_sglang.commands.provenance import ROOT

    if not (ROOT / "benchmark" / "registry.py").is_file():
        print("Only the benchmark quality is installed; the others run in a checkout of Fluxion.", file=sys.stderr)
        return 2
    return subprocess.run([sys.executable, "-m", "benchmark", *arguments.names], cwd=ROOT, check=False).returncode


def _add(commands: _Commands, name: str, module: Any) -> None:
    """Add the command of a module with `HELP`, `add_arguments` and `run`."""
    parser = commands.add_parser(name, help=module.HELP)
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)


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

    for group, options in itertools.groupby(FluxionConfig.options(), lambda option: option.group):
        print(f"{group}:\n")
        for option in options:
            print(f"{option.key}  ({option.type}, default {option.default})")
            print(f"    {option.doc} Example: {option.example}")
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
