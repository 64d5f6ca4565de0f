"""Makes the servers of one machine size their host pools one after another.

A pool takes a share of the free memory, and two servers that measure at once would count the same memory twice. So each
server waits for its turn, which ends when its pool has its memory.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from pathlib import Path

logger = logging.getLogger(__name__)

PATIENCE_S = 300.0
"""Longest wait for a turn, so that a stuck server does not block others."""

_POLL_S = 0.05


def turn_file() -> Path:
    """The lock file of the turn, shared by all users with the same folder of temporary files."""
    return Path(tempfile.gettempdir()) / "fluxion-sizing.lock"


class Turn:
    """A server's turn, from `wait` to `end`, or to the end of the process.

    Attributes:
        held: whether this process has the turn. If another server takes too long, or the file cannot be used, the
            server measures without it.
    """

    def __init__(self, path: Path | None = None, patience_s: float = PATIENCE_S) -> None:
        self._path, self._patience_s = path, patience_s
        self._file: int | None = None

    @property
    def held(self) -> bool:
        return self._file is not None

    def wait(self) -> None:
        path = self._path or turn_file()
        try:
            file = _opened(path)
        except OSError as error:
            logger.warning("Fluxion: servers that start now do not wait for one another (%s)", error)
            return
        deadline, told = time.monotonic() + self._patience_s, False
        while not _locked(file):
            if time.monotonic() >= deadline:
                logger.warning(
                    "Fluxion: another server has been sizing its host pool for %g s; this one measures without waiting "
                    "longer, and both may count the same memory (%s)",
                    self._patience_s,
                    path,
                )
                os.close(file)
                return
            if not told:
                logger.info("Fluxion: another server is sizing its host pool; this one waits until it has its memory")
                told = True
            time.sleep(_POLL_S)
        self._file = file

    def end(self) -> None:
        """Pass the turn on, if it is held."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def __del__(self) -> None:
        self.end()


def _opened(path: Path) -> int:
    """Open the lock file, which another user may own: read access is enough for a lock."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            try:
                return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                continue


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
