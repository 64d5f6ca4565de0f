"""The command: its arguments, its output files, its exit code."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from fluxion_sglang.commands import provenance
from fluxion_sglang.commands.needle import MODEL
from fluxion_sglang.commands.serving import running_server
from fluxion_sglang.commands.trial import card, facts, pace
from fluxion_sglang.commands.trial.course import Course, Request, flags_and_config
from fluxion_sglang.commands.trial.passages import open_passages
from fluxion_sglang.commands.trial.results import Results, TrialError
from fluxion_sglang.policy import check_spec
from fluxion_sglang.scoring.model_files import public

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def main(arguments: argparse.Namespace, starts: Callable[..., Any] = running_server) -> int:
    """Run a trial; returns the exit code: 0 with a complete report, 1 if the model is refused or the trial ended early,
    2 for bad input.

    Args:
        starts: starts a server.
    """
    console = Console(highlight=False)
    try:
        clock = pace.Clock(arguments.minutes)
        request = _request(arguments)
        passages = open_passages(request.model, arguments.text, "--trust-remote-code" in request.flags)
        out = arguments.out or Path(f"fluxion_try_{_NOT_IN_NAMES.sub('_', Path(request.model.name).name)}.html")
        for file in filter(None, (out, arguments.json)):
            _check_writable(file)
        results = Results(
            provenance.header("try"), shlex.join(["fluxion", *sys.argv[1:]]), request.model, request.served_dtype
        )

        def save(found: Results, last: bool) -> None:
            # Atomic, so that an interruption leaves the last complete files.
            partial = out.with_name(out.name + ".partial")
            partial.write_text(card.render(found, drawn=last), encoding="utf-8")
            partial.replace(out)
            if arguments.json is not None:
                provenance.save(arguments.json, found.as_dict())

        console.print(
            f"{request.model.name}: about {arguments.minutes:g} minutes. {out} grows part by part.", soft_wrap=True
        )
        try:
            Course(request, passages, results, save, clock, starts).run()
        except KeyboardInterrupt:
            card.show(results, console)
            return 130
    except TrialError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    card.show(results, console)
    files = " and ".join(str(file) for file in (out, arguments.json) if file)
    console.print(f"\nWritten to {files} in {results.seconds / 60:.1f} minutes.", soft_wrap=True)
    return 1 if results.refusal or results.stopped else 0


def _request(arguments: argparse.Namespace) -> Request:
    name = arguments.model
    if name is None:
        if not (MODEL / "config.json").is_file():
            raise TrialError("There is no bundled model here; name one: fluxion try MODEL.")
        name = str(MODEL)
    name = public(name)
    if not arguments.minutes > 0:
        raise TrialError(f"--minutes is {arguments.minutes:g}; give a number above 0.")
    try:
        words = shlex.split(arguments.server_args)
    except ValueError as error:
        raise TrialError(f"--server-args cannot be divided into words ({error}); close its quotes.") from None
    flags, config = flags_and_config(words)
    policies = list(dict.fromkeys(filter(None, (part.strip() for part in arguments.policies.split(",")))))
    for policy in policies:
        try:
            check_spec(policy)
        except ValueError as error:
            raise TrialError(f"--policies: {error}") from None
    return Request(
        model=facts.read(name, "--trust-remote-code" in flags),
        lengths=pace.parse_lengths(arguments.lengths),
        policies=policies,
        dtype=arguments.dtype,
        flags=flags,
        config=config,
    )


def _check_writable(file: Path) -> None:
    """Check before ten minutes are spent."""
    try:
        file.open("a").close()
    except OSError as error:
        raise TrialError(
            f"The report cannot be written to {file} ({error.strerror}); name another file with --out and --json."
        ) from None
