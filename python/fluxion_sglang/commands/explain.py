"""`fluxion explain`: what layers and heads read, of a running server or an audit file, in the terminal."""

from __future__ import annotations

import argparse
import sys

from fluxion_sglang.commands import reads

HELP = "show what layers and heads read, of a running server or an audit file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    reads.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from fluxion_sglang.commands.reads.picture import Picture, ReadsError
    from fluxion_sglang.commands.reads.terminal import console_of, rendered

    console = console_of(sys.stdout)
    watched = arguments.audit is None and not arguments.once
    try:
        if not (watched and console.is_terminal):
            if watched:
                print(f"Watching {arguments.url} for {arguments.seconds:g} s", file=sys.stderr, flush=True)
            picture = reads.gather(arguments)
        else:
            with Live(Text(f"Watching {arguments.url}"), console=console, transient=True) as live:

                def show(picture: Picture, left: float) -> None:
                    more = Text(f"\n{left:.0f} s more; control-C ends it now", style="dim")
                    live.update(Group(rendered(picture, console), more))

                picture = reads.gather(arguments, show)
    except ReadsError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    console.print(rendered(picture, console))
    return 0
