"""`fluxion explain`: what layers and heads read, of a running server or an audit file, in the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from fluxion_sglang.commands import reads

if TYPE_CHECKING:
    from fluxion_sglang.commands.reads.picture import Picture

HELP = "show what layers and heads read, of a running server or an audit file"

add_arguments = reads.add_arguments


def run(arguments: argparse.Namespace) -> int:
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
