"""The `fluxion` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    arguments = _parser().parse_args(argv)
    code: int = arguments.run(arguments)
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
    return parser


def _doctor(arguments: argparse.Namespace) -> int:
    from fluxion_sglang.doctor import FAIL, run_checks

    checks = run_checks()
    failed = any(check.status == FAIL for check in checks)
    if arguments.json:
        print(json.dumps({"ok": not failed, "checks": [check.as_dict() for check in checks]}, indent=2))
    else:
        for check in checks:
            print(f"{check.status:4}  {check.name:18}  {check.found}")
            if check.advice:
                print(f"{'':26}{check.advice}")
        print("Not ready: see the lines with FAIL." if failed else "Ready: add --enable-fluxion to the server.")
    return 1 if failed else 0


def _options(arguments: argparse.Namespace) -> int:
    from fluxion_sglang.config import FluxionConfig

    for option in FluxionConfig.options():
        print(f"{option.key}  ({option.type}, default {option.default})")
        print(f"    {option.doc} Example: {option.example}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
