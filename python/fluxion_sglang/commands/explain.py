"""`fluxion explain`: shows what layers and heads of a server or an audit file read, in the terminal or a file."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fluxion_sglang.commands import reads

if TYPE_CHECKING:
    from fluxion_sglang.commands.reads.picture import Picture

HELP = "show what layers and heads read, of a running server or an audit file"
SUFFIXES = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    reads.add_arguments(parser)
    parser.add_argument("--out", type=_out, metavar="FILE", help="draw it as a .png, .svg or .pdf instead")


def _out(text: str) -> Path:
    path = Path(text)
    if path.suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} has no suffix that says the format; give {', '.join(SUFFIXES)}")
    return path


def run(arguments: argparse.Namespace) -> int:
    return _in_terminal(arguments) if arguments.out is None else _as_file(arguments)


def _in_terminal(arguments: argparse.Namespace) -> int:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from fluxion_sglang.commands.reads.terminal import console_of, rendered

    console = console_of(sys.stdout)

    def gather() -> Picture:
        if not (reads.watched(arguments) and console.is_terminal):
            return reads.gather(arguments)
        with Live(Text(f"Watching {arguments.url}"), console=console, transient=True) as live:

            def show(picture: Picture, left: float) -> None:
                more = Text(f"\n{left:.0f} s more; control-C ends it now", style="dim")
                live.update(Group(rendered(picture, console), more))

            return reads.gather(arguments, show)

    return reads.present(gather, lambda picture: console.print(rendered(picture, console)))


def _as_file(arguments: argparse.Namespace) -> int:
    if find_spec("matplotlib") is None:
        print(
            "--out needs matplotlib; install it with: pip install 'fluxion-sglang[bench]', or leave --out away to see "
            "the same in the terminal.",
            file=sys.stderr,
        )
        return 2
    from fluxion_sglang.commands.reads.figure import draw
    from fluxion_sglang.commands.reads.picture import ReadsError

    def write(picture: Picture) -> None:
        try:
            draw(picture, arguments.out)
        except OSError as error:
            raise ReadsError(
                f"{arguments.out} cannot be written ({error.strerror or error}); give another --out."
            ) from error
        print(arguments.out)

    return reads.present(lambda: reads.gather(arguments), write)
