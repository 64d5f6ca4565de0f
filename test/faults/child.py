"""A server in a process of its own, so that tests survive its death."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.inprocess import PATIENCE_S, InProcess
from faults.wire import Died, Spoiled, Stuck, trace
from places import ROOT

START_S = 600.0

MOST_GIB = 8.0
"""A server that grows beyond this is ended; it has two hundred megabytes of weights and KV."""


def resident_gib(pid: int | str = "self") -> float:
    """Resident memory of a process in GiB; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def _serve(connection: Any, log: str, flags: tuple[str, ...], options: dict[str, Any]) -> None:
    """The child's side: create a server, and call functions with it that the parent names."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(ROOT)
    server: InProcess | None = None

    def reply(function: Callable[..., Any], *args: Any) -> tuple[str, Any]:
        try:
            return "value", function(*args)
        except (Died, Stuck, Spoiled) as error:
            return type(error).__name__, str(error)
        except BaseException as error:
            return "error", trace(error)

    def start() -> None:
        nonlocal server
        server = InProcess(*flags, **options)

    connection.send(reply(start))
    while server is not None:
        function, args, patience = connection.recv()
        faulthandler.dump_traceback_later(patience, file=descriptor)
        answer = reply(function, server, *args)
        faulthandler.cancel_dump_traceback_later()
        connection.send(answer)


class Child:
    """`InProcess` in a process of its own, which is restarted after a call that it did not survive.

    Args:
        flags, options: see `InProcess`. log: file for its output.
    """

    def __init__(self, *flags: str, log: Path, env: dict[str, str] | None = None, **options: Any) -> None:
        self._flags, self._options, self._log, self._env = flags, options, log, env or {}
        self._process: Any = None
        self.starts = 0

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        keep = {name: os.environ.get(name) for name in self._environment()}
        os.environ.update(self._environment())
        try:
            words = (theirs, str(self._log), self._flags, self._options)
            self._process = context.Process(target=_serve, args=words, daemon=True)
            self._process.start()
        finally:
            for name, value in keep.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
        theirs.close()
        self.starts += 1
        self._reply(START_S)

    def _environment(self) -> dict[str, str]:
        return {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **self._env}

    def run(self, function: Callable[..., Any], *args: Any, patience: float = 2 * PATIENCE_S) -> Any:
        """`function(server, *args)` in the server's process; the function is pickled by name, so it belongs to a
        module.

        Raises:
            AssertionError: an assertion in the function failed, or the server did not survive; the next call starts
                another.
        """
        if self._process is None:
            self.start()
        self._connection.send((function, args, patience))
        return self._reply(patience + 15)

    def _reply(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        kind, value = "Stuck", f"the process of the server does not come back in {seconds:.0f} s"
        while time.monotonic() < deadline and kind == "Stuck":
            try:
                if self._connection.poll(0.5):
                    kind, value = self._connection.recv()
            except (EOFError, ConnectionError):
                kind, value = "Died", "the process of the server ended"
            if self._process.is_alive() and resident_gib(self._process.pid) > MOST_GIB:
                kind, value = "Died", f"the process of the server grew beyond {MOST_GIB} GiB"
        if kind == "value":
            return value
        if kind == "error":
            raise AssertionError(value)
        self.stop()
        raise {"Died": Died, "Stuck": Stuck, "Spoiled": Spoiled}[kind](
            f"{value}\nIts log ends with:\n{self.log()[-3000:]}"
        )

    @property
    def alive(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
