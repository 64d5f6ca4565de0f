"""`fluxion ask`: its command line. `commands/conversation.py` has the implementation."""

from __future__ import annotations

import argparse
from typing import Any

_EPILOG = """\
Every question stands by itself: the prompt is the file and then the question. Answers go to the standard output,
everything else to the standard error, so `fluxion ask report.txt "Who wrote it?" --model MODEL > answer.txt` keeps the
answer alone.
"""

HELP = "ask questions about a long file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Ask questions about a long file. The model reads the file once, for the first question."
    parser.epilog = _EPILOG
    option = parser.add_argument
    option("file", metavar="FILE", nargs="?", help="a text in UTF-8; - is the standard input")
    option("questions", metavar="QUESTION", nargs="*", help="without one, questions are read line by line")
    option(
        "--model",
        help="folder or name of a model, or smollm2 or gemma3 (make checkpoints); a server is started for it, with the "
        "flag, and stopped",
    )
    option(
        "--demo",
        action="store_true",
        help="instead of FILE: a document and questions, for the bundled model or --model; exit code 1: a wrong answer",
    )
    option("--url", help="use the server that runs here, such as http://127.0.0.1:30000")
    option("--api-key", metavar="KEY", help="of the server at --url; default: OPENAI_API_KEY of the environment")
    option("--policy", metavar="SPEC", help="policy of the requests, such as full; default: the server's")
    option(
        "--max-tokens", metavar="N", type=_positive, default=512, help="most tokens of an answer (default: %(default)s)"
    )
    option(
        "--temperature", metavar="T", type=float, default=0.0, help="0 takes the likeliest token (default: %(default)s)"
    )
    option("--stop", metavar="TEXT", action="append", help="end the answer here; may be given more than once")
    _intermix(parser)


def run(arguments: argparse.Namespace) -> int:
    # Imported late: the openai client takes seconds to import, which would delay `fluxion --help`.
    from fluxion_sglang.commands import conversation

    return conversation.run(arguments)


def _intermix(parser: argparse.ArgumentParser) -> None:
    """Allow questions after options, as in `FILE --model MODEL QUESTION`, by argparse's intermixed parsing."""
    plain = parser.parse_known_args

    def parse(args: Any = None, namespace: Any = None) -> Any:
        # Intermixed parsing itself calls the plain method.
        setattr(parser, "parse_known_args", plain)  # noqa: B010 (mypy knows methods, not attributes, by this name)
        try:
            return parser.parse_known_intermixed_args(args, namespace)
        finally:
            setattr(parser, "parse_known_args", parse)  # noqa: B010

    setattr(parser, "parse_known_args", parse)  # noqa: B010


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("give a number of at least 1")
    return value
