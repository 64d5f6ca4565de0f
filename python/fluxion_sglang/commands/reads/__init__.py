"""The data of `fluxion explain`: its options, and the picture that they ask for."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fluxion_sglang.commands.reads.picture import Picture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the source and the duration."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--url", default="http://127.0.0.1:30000", help="of a running server (default: %(default)s)")
    source.add_argument("--audit", type=Path, metavar="FILE", help="a file that the server's option audit named")
    parser.add_argument(
        "--api-key", metavar="KEY", help="of the server at --url; default: OPENAI_API_KEY of the environment"
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=10.0,
        help="how long to watch the server (default: %(default)g); control-C ends it earlier",
    )
    parser.add_argument("--once", action="store_true", help="show the server's totals since its start instead")
    parser.add_argument("--policy", metavar="SPEC", help="of an audit: only requests with this policy")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give seconds, as in 10")
    return value


def watched(arguments: argparse.Namespace) -> bool:
    """Whether to watch a server for a while."""
    return arguments.audit is None and not arguments.once


def gather(arguments: argparse.Namespace, show: Callable[[Picture, float], None] | None = None) -> Picture:
    """The picture that the arguments ask for.

    Args:
        show: called with every picture of a watched server, and the seconds left.

    Raises:
        ReadsError: there is none.
    """
    # Imported late, because the other commands do not need them.
    from fluxion_sglang.commands.reads.audited import of_audit
    from fluxion_sglang.commands.reads.picture import ReadsError
    from fluxion_sglang.commands.reads.served import Reading, of_readings, read_server, watch
    from fluxion_sglang.commands.serving import Server

    if arguments.audit is not None:
        return of_audit(arguments.audit, arguments.policy)
    if arguments.policy is not None:
        raise ReadsError("--policy needs --audit: a server's counters are of all its requests together.")
    server = Server.named(arguments.url, arguments.api_key)
    if arguments.once:
        return of_readings([Reading.nothing(), read_server(server)], server.url, "since its start")
    if show is None:
        print(f"Watching {arguments.url} for {arguments.seconds:g} s", file=sys.stderr, flush=True)
    return watch(server, arguments.seconds, show or (lambda *_: None))


def present(gathered: Callable[[], Picture], draw: Callable[[Picture], None]) -> int:
    """Gather a picture and draw it; returns the exit code."""
    from fluxion_sglang.commands.reads.picture import ReadsError

    try:
        draw(gathered())
    except ReadsError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
