"""Reports the refusal of a server to start as one line, from any of its processes.

In SGLang a failing scheduler logs a traceback and kills the process that started it. Here the scheduler sends its
sentence to the launcher and waits; while it lives, other ranks see no broken connection to log. The launcher ends all
of them and raises the sentence.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

from fluxion_sglang.config import ConfigError
from fluxion_sglang.sglang.memory import capacity

_VARIABLE = "FLUXION_REFUSALS"
"""Environment variable with the pipe to which processes of this server send refusals."""

_PATIENCE_S = 60.0
"""Seconds that a process waits for its end after it has sent a refusal."""

_ends: tuple[int, int] | None = None
"""The launcher's pipe."""


def is_ours(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "fluxion_sglang"


def print_as_sentence(refusal: type[BaseException]) -> None:
    """If this refusal ends the process, print its sentence without a traceback."""
    default = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, refusal):
            print(f"error: {error}", file=sys.stderr)
        else:
            default(kind, error, trace)

    sys.excepthook = hook


def listen() -> None:
    """Receive refusals from processes that are started from here on."""
    global _ends
    if _ends is None:
        _ends = os.pipe()
        os.set_blocking(_ends[0], False)
    os.environ[_VARIABLE] = f"/proc/{os.getpid()}/fd/{_ends[1]}"


def make_scheduler(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """AROUND Scheduler.__init__: send refusals to the launcher; other errors are left to SGLang."""
    try:
        original(*args, **kwargs)
        capacity.set_lengths(args[0])
    except Exception as error:
        if is_ours(error) and multiprocessing.parent_process() is not None and _send(str(error)):
            time.sleep(_PATIENCE_S)
        raise


def _send(sentence: str) -> bool:
    with suppress(OSError, KeyError):
        launcher = os.open(os.environ[_VARIABLE], os.O_WRONLY | os.O_CLOEXEC)
        try:
            return os.write(launcher, f"{sentence}\n".encode()) > 0
        finally:
            os.close(launcher)
    return False


def wait_for_schedulers(original: Callable[..., Any], readers: Sequence[Any], processes: Sequence[Any]) -> Any:
    """AROUND _wait_for_scheduler_ready: wait until each scheduler is ready, or one is dead.

    Raises:
        ConfigError: a refusal by one of them.
    """
    waiting = list(readers)
    dead = [process.sentinel for process in processes]
    while waiting and _ends is not None:
        ready = wait([*waiting, *dead, _ends[0]])
        if _ends[0] in ready:
            from sglang.srt.utils import kill_process_tree

            sentence = os.read(_ends[0], 1 << 16).decode(errors="replace").partition("\n")[0]
            kill_process_tree(os.getpid(), include_parent=False)
            with suppress(BlockingIOError):
                os.read(_ends[0], 1 << 16)  # drop the refusals of other ranks
            print_as_sentence(ConfigError)
            raise ConfigError(sentence)
        if not set(dead).isdisjoint(ready):
            break
        waiting = [reader for reader in waiting if reader not in ready]
    return original(readers, processes)
