"""Asks questions about a long file through the openai client, and prints the cost of every answer.

The first question includes the prefill of the file. For later questions the file's KV is a cache hit.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from openai import APIError
from rich.console import Console
from rich.markup import escape

from fluxion_sglang.commands.answers import Answer, Asked
from fluxion_sglang.commands.document import QUESTION_ROOM, STDIN, AskError, Document, local_tokenizer
from fluxion_sglang.commands.needle import MODEL
from fluxion_sglang.commands.serving import (
    MEASURED,
    SMALL,
    RequestFailed,
    Server,
    ServerError,
    free_port,
    launch_command,
    running_server,
)
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.scoring.model_files import public

_KEPT_ANSWERS = 8
"""Answers and questions for which the host pool has room beside the file. The radix tree drops older ones."""


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0: every question was answered; 1: the server refused one, or an answer of the demo is wrong; 2: there
    was nothing to ask."""
    news = Console(stderr=True, highlight=False)
    try:
        _check(arguments)
        if arguments.url is None:
            arguments.model = public(arguments.model)
        if arguments.demo:
            document = Document.demo(arguments.model)
            arguments.questions = list(document.questions)
        else:
            document = Document.read(public(arguments.file, "texts"))
        with contextlib.ExitStack() as stack:
            questions = _questions(arguments, news, stack)
            asked, document = stack.enter_context(_server(arguments, document, news))
            return _session(arguments, asked, document, questions, news)
    except (AskError, ServerError) as error:
        news.print(f"{error}", style="red", markup=False, soft_wrap=True)
        return 2
    except RequestFailed as error:
        news.print(f"The server does not answer any more: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        news.print()
        return 130


def _check(arguments: argparse.Namespace) -> None:
    if arguments.demo:
        if arguments.file is not None or arguments.url is not None:
            raise AskError("--demo brings questions and starts a server; leave FILE and --url out.")
        arguments.model = arguments.model or str(MODEL)
    elif arguments.file is None:
        raise AskError("Give a FILE to ask about, or --demo for a document with questions.")
    if arguments.url is None and arguments.model is None:
        raise AskError("Give --model MODEL to start a server for the file, or --url URL to use one that runs.")
    if any(not question.strip() for question in arguments.questions):
        raise AskError("A question is empty; leave it out to be asked for questions.")
    if arguments.url is None and arguments.policy is not None:
        from fluxion_sglang.policy import check_spec

        try:
            check_spec(arguments.policy)
        except ValueError as error:
            raise AskError(str(error)) from None


@contextlib.contextmanager
def _server(arguments: argparse.Namespace, document: Document, news: Console) -> Iterator[tuple[Asked, Document]]:
    """An existing server, or a new one for the duration of the block, and the document with its token count."""
    if arguments.url is not None:
        server = Server.named(arguments.url.rstrip("/").removesuffix("/v1"), arguments.api_key)
        asked = Asked.of(server, arguments.model)
        with contextlib.suppress(RequestFailed, KeyError):  # the server cannot count tokens
            document = document.counted(asked.tokenize, asked.model)
        if arguments.policy is not None and not asked.fluxion:
            news.print(f"{asked.server.url} does not run Fluxion, so --policy has no effect.", style="yellow")
        yield asked, _checked(document, asked, arguments.max_tokens)
        return
    tokenize, context = local_tokenizer(arguments.model)
    document = document.counted(tokenize, arguments.model)
    if context is not None:
        # Check before the server's start, which takes minutes.
        document.check_fits(context, arguments.max_tokens, arguments.model, _SHORTER)
    port = free_port()
    with contextlib.ExitStack() as stack:
        with contextlib.redirect_stdout(sys.stderr):
            command = server_command(arguments.model, port, document, arguments.max_tokens, arguments.policy)
            server = stack.enter_context(running_server(command, port, what=f"a server for {arguments.model}"))
        asked = Asked.of(server)
        yield asked, _checked(document, asked, arguments.max_tokens)


_SHORTER = "cut the file, or take a model with a longer context"


def _checked(document: Document, asked: Asked, max_tokens: int) -> Document:
    if asked.context is not None:
        document.check_fits(asked.context, max_tokens, asked.model, _SHORTER)
    if asked.pool is not None:
        document.check_fits(
            asked.pool,
            max_tokens,
            "the server",
            "start it with a larger host_tokens (--fluxion-config), or cut the file",
        )
    return document


def server_command(model: str, port: int, document: Document, max_tokens: int, policy: str | None) -> list[str]:
    """The command line of a server with room for the file and some answers, and with this policy."""
    tokens = (document.tokens or 0) + _KEPT_ANSWERS * (QUESTION_ROOM + max_tokens)
    flags = [*SMALL, *MEASURED, "--enable-cache-report"]
    config: dict[str, Any] = {"host_tokens": -(-tokens // PAGE) * PAGE}
    if policy is not None:
        config["policy"] = policy
    return launch_command(model, port, *flags, fluxion=config)


def _questions(arguments: argparse.Namespace, news: Console, stack: contextlib.ExitStack) -> Iterator[str]:
    """Questions from the command line, the terminal or a pipe, without blank ones."""
    if arguments.questions:
        return _echoed(arguments.questions, news)
    if arguments.file == STDIN:  # already read as the file
        try:
            sys.stdin = stack.enter_context(open("/dev/tty"))  # noqa: SIM115 (the stack closes it)
        except OSError:
            raise AskError(
                "The file is the standard input and there is no terminal to ask at; put the questions on the "
                "command line."
            ) from None
    return _typed(news) if sys.stdin.isatty() else _echoed(map(str.strip, sys.stdin), news)


def _echoed(questions: Iterable[str], news: Console) -> Iterator[str]:
    for question in filter(None, questions):
        news.print(f"[bold]> {escape(question)}[/]", soft_wrap=True)
        yield question


def _typed(news: Console) -> Iterator[str]:
    """Questions from the terminal until end of input; the line can be edited."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    news.print("Ask; Ctrl-D ends.", style="dim")
    with contextlib.suppress(EOFError):
        while True:
            # If the standard output is a file, the prompt must not go there.
            if not sys.stdout.isatty():
                news.print("> ", end="")
            if question := input("> " if sys.stdout.isatty() else "").strip():
                yield question
    news.print()


def _session(
    arguments: argparse.Namespace, asked: Asked, document: Document, questions: Iterator[str], news: Console
) -> int:
    size = "" if document.tokens is None else f": {document.tokens:,} tokens"
    news.print(f"{document.name}{size}; {asked.model} at {asked.server.url}", style="dim", markup=False, soft_wrap=True)
    code, right = 0, []
    for question in questions:
        try:
            prompt = document.prompt(question, asked.chat, arguments.stop)
            with _Writer(news) as writer:
                answer = asked.ask(prompt, arguments.max_tokens, arguments.temperature, arguments.policy, writer.write)
        except APIError as error:
            code = 1
            news.print(_sentence(error), style="red", markup=False, soft_wrap=True)
        except KeyboardInterrupt:
            # The server drops a request when its client disconnects. With questions as arguments, Ctrl-C ends all.
            if arguments.questions:
                raise
            news.print("Stopped.", style="dim")
        else:
            news.print(cost(answer, asked, arguments.policy), style="dim", markup=False, soft_wrap=True)
            if known := document.questions.get(question):
                right.append(known in writer.said)
                if not right[-1]:
                    news.print(f"Wrong: it is {known}", style="red", markup=False)
            news.print()
    if right:
        news.print(f"{sum(right)} of {len(right)} answers are right.")
    return code or int(not all(right))


class _Writer:
    """Writes an answer as it arrives. On a terminal, a spinner turns until its first piece.

    A context manager: at its end, also after an error, the spinner is removed and the line is complete.

    Attributes:
        said: the answer so far.
    """

    def __init__(self, news: Console) -> None:
        self.said = ""
        self._news = news
        self._waiting = news.status("Reading") if news.is_terminal else None
        self._line: Console | TextIO | None = None  # the stream with an unfinished line
        self._begun = False

    def __enter__(self) -> _Writer:
        if self._waiting is not None:
            self._waiting.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_waiting()
        self._end_line()

    def write(self, text: str, thought: bool) -> None:
        """Write a piece of the answer, or of the model's reasoning before it."""
        self._stop_waiting()
        if thought:
            self._news.print(text, end="", style="dim", markup=False, soft_wrap=True)
            self._line = None if text.endswith("\n") else self._news
            return
        if not self._begun:
            self._end_line()
            text = text.lstrip()
            self._begun = bool(text)
        self.said += text
        sys.stdout.write(text)
        sys.stdout.flush()
        if text:
            self._line = None if text.endswith("\n") else sys.stdout

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.stop()

    def _end_line(self) -> None:
        if isinstance(self._line, Console):
            self._line.print()
        elif self._line is not None:
            self._line.write("\n")
            self._line.flush()
        self._line = None


def cost(answer: Answer, asked: Asked, policy: str | None) -> str:
    """The line that is printed below an answer."""
    parts = [f"{answer.prompt_tokens:,} prompt tokens"]
    if answer.cached is not None:
        parts[0] += f", {answer.cached:,} cached ({answer.cached / max(answer.prompt_tokens, 1):.1%})"
    if answer.ttft is not None:
        parts.append(f"first token {answer.ttft:.2f} s")
    if answer.tpot is not None:
        parts.append(f"{answer.tpot * 1e3:.1f} ms a token")
    if answer.share is None:
        parts.append(f"reads unknown: {answer.why}")
    else:
        named = asked.policy_of(policy, answer.share)
        parts.append(f"read {answer.share:.1%} of the middle (policy {named})")
    return " · ".join(parts)


def _sentence(error: APIError) -> str:
    """The server's message, without the client's prefix."""
    body = error.body
    said = body.get("message") if isinstance(body, dict) else None
    return str(said or error.message)
