"""`fluxion plot`: what layers and heads read, of a running server or an audit file, as one picture file."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from fluxion_sglang.commands import reads

SUFFIXES = (".png", ".svg", ".pdf")

HELP = "draw the same as one picture"


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

    if arguments.audit is None and not arguments.once:
        print(f"Watching {arguments.url} for {arguments.seconds:g} s", file=sys.stderr, flush=True)
    try:
        draw(reads.gather(arguments), arguments.out)
    except ReadsError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{arguments.out} cannot be written ({error.strerror or error}); give another --out.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(arguments.out)
    return 0
