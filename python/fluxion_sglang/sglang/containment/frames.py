"""Finds the requests in an exception's traceback that SGLang was processing. Used only after a failure."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


def walk(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames of the traceback with their current lines, outermost first."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def local(error: BaseException, function: str, name: str) -> Any:
    """A local variable of the innermost frame of the named function; None if there is none."""
    found = None
    for frame, _ in walk(error):
        if frame.f_code.co_name == function:
            found = frame.f_locals.get(name, found)
    return found


def went_through(error: BaseException, *functions: str) -> bool:
    """Whether the traceback contains a function with one of these names."""
    return any(frame.f_code.co_name in functions for frame, _ in walk(error))


def culprit(error: BaseException, kind: type[T]) -> T | None:
    """The object of type `kind` that the innermost frame was processing, or None.

    A frame processes an object that is a parameter of its function, or the variable of a loop around the failing line.
    The variable of a finished loop is not used: it holds the loop's last object, which need not be at fault. The same
    holds for a loop that catches the error and continues; code that may fail there needs a function of its own.
    """
    found: T | None = None
    for frame, line in walk(error):
        for name in (*_parameters(frame.f_code), *_loop_variables(frame, line)):
            value = frame.f_locals.get(name)
            if isinstance(value, kind):
                found = value
    return found


def passed_down(error: BaseException, kind: type[T]) -> Sequence[T]:
    """The parameters of type `kind` of the innermost frame that has any."""
    found: list[T] = []
    for frame, _ in walk(error):
        here = [frame.f_locals.get(name) for name in _parameters(frame.f_code)]
        found = [value for value in here if isinstance(value, kind)] or found
    return found


def _parameters(code: CodeType) -> Sequence[str]:
    if code.co_name in _COMPREHENSIONS:
        return code.co_varnames
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _loop_variables(frame: FrameType, line: int) -> list[str]:
    """Variables of the `for` statements around a line of the frame's function, outermost first."""
    try:
        source, first = inspect.getsourcelines(frame.f_code)
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, SyntaxError, TypeError):  # no source, or source that does not parse alone
        return []
    # ast counts from 1, but a module's first line is given as 0.
    at = line - max(first, 1) + 1
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and node.body[0].lineno <= at <= (node.body[-1].end_lineno or 0)
    ]
    around.sort(key=lambda node: node.lineno)
    return [name.id for node in around for name in ast.walk(node.target) if isinstance(name, ast.Name)]
