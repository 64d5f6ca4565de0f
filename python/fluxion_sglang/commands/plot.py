"""`fluxion plot`: what layers and heads read, of a running server or an audit file, as one picture file."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fluxion_sglang.commands import reads

if TYPE_CHECKING:
    from fluxion_sglang.commands.reads.picture import Picture

HELP = "draw the same as one picture"
SUFFIXES = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=_out, default=Path("fluxion.png"), help="a .png, .svg or .pdf (default: %(default)s)"
    )
    reads.add_arguments(parser)


def _out(text: str) -> Path:
    path = Path(text)
    if path.suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} has no suffix that says the format; give {', '.join(SUFFIXES)}")
    return path


def run(arguments: argparse.Namespace) -> int:
    if find_spec("matplotlib") is None:
        print(
            "fluxion plot needs matplotlib; install it with: pip install 'fluxion-sglang[bench]'. `fluxion explain` "
            "shows the same in the terminal without it.",
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
