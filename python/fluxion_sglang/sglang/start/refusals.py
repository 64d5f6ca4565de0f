"""What refuses to start says one line, whichever process it is in.

SGLang has a scheduler that fails log a traceback and kill the process that started it. Here the scheduler sends its
sentence to the launcher and waits: as long as it lives, other ranks see no broken connection to log. The launcher ends
all of them and raises the sentence.
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
"""Of the environment: where processes of this server send refusals."""

_PATIENCE_S = 60.0
"""How long one that has sent its refusal waits for its end."""

_ends: tuple[int, int] | None = None
"""The launcher's pipe."""


def is_ours(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "fluxion_sglang"


def print_as_sentence(refusal: type[BaseException]) -> None:
    """Should this refusal end the process, print its sentence without forty lines of traceback above it."""
    default = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, refusal):
            print(f"error: {error}", file=sys.stderr)
        else:
            default(kind, error, trace)

    sys.excepthook = hook


def listen() -> None:
    """Hear the refusals of processes that are started from here on."""
    global _ends
    if _ends is None:
        _ends = os.pipe()
        os.set_blocking(_ends[0], False)
    os.environ[_VARIABLE] = f"/proc/{os.getpid()}/fd/{_ends[1]}"


def make_scheduler(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """AROUND Scheduler.__init__. What it refuses the launcher says; anything else goes SGLang's way."""
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
    """AROUND _wait_for_scheduler_ready: until each scheduler has said that it is ready, or one is dead.

    Raises:
        ConfigError: what one of them refused.
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
                os.read(_ends[0], 1 << 16)  # what other ranks said in the meantime
            print_as_sentence(ConfigError)
            raise ConfigError(sentence)
        if not set(dead).isdisjoint(ready):
            break
        waiting = [reader for reader in waiting if reader not in ready]
    return original(readers, processes)
