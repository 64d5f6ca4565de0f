"""Keeps what was measured of requests, and has a predictor trained on them when there is reason to."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import load, save

from fluxion_sglang.learning.apart import train_apart
from fluxion_sglang.learning.familiar import thinned
from fluxion_sglang.learning.learned import THRESHOLD, Learned
from fluxion_sglang.learning.measured import Measured, pack, unpack

logger = logging.getLogger(__name__)

FIRST: Final = 96
"""Requests that the first predictor is trained on."""

MORE: Final = 8
"""So many more, and it is trained anew; a sixteenth of all where that is more."""

KEPT: Final = 256
"""Requests that are kept; of those that are most alike the older ones go first."""

MOST: Final = KEPT + KEPT // 8
"""So many are there at most, until a training has thinned them. Those that come then teach nothing."""

STALE_S: Final = 3600
"""Nobody writes a file for that long."""

AT_ONCE: Final = "FLUXION_LEARNS_AT_ONCE"
"""Of the environment: everybody waits for a training, so that what is known does not depend on how long it takes."""

Train = Callable[[Sequence[Measured], float], Learned]


class Learner:
    """What it has learned it keeps in a file, if it is given one, and has again at the next start.

    Args:
        tau: that budgets were measured for.
        path: of the file; None: nothing is kept.
        train: what trains; it runs in a thread.

    Attributes:
        learned: the latest; None: nothing yet, or what was kept cannot be read.
        trainings, failures: that ended well, and badly, so far.
    """

    def __init__(self, tau: float, path: Path | None = None, train: Train = train_apart) -> None:
        self.tau = tau
        self.path = path
        self.learned: Learned | None = None
        self.trainings = self.failures = 0
        self._train = train
        self._requests: list[Measured] = []
        self._new = 0  # requests since the last training began
        self._enough = FIRST
        self._thread: Thread | None = None
        self._result: Learned | None = None
        self._thinned: list[Measured] = []  # what those became that the training was given
        self._given = 0  # how many these were
        self._failed = False  # the last training
        if path is not None:
            self._load(path)

    def __len__(self) -> int:
        return len(self._requests)

    def take(self, request: Measured) -> None:
        """One more. One of other layers or heads than those before, or with what is no number, teaches nothing; nor
        does another answer to a prompt that is kept."""
        if self._requests and request.anchor.shape != self._requests[0].anchor.shape:
            return
        if not all(bool(part.isfinite().all()) for part in request):
            return
        if any(request.like(other) for other in self._requests):
            return
        if len(self._requests) == MOST and self._failed and self._thread is None:
            self._requests = thinned(self._requests, KEPT)
        full = len(self._requests) == MOST
        if not full:
            self._requests.append(request)
            self._new += 1
        if (full or self._new >= self._enough) and self._thread is None:
            self._begin(Thread(target=self._work, args=(list(self._requests),), daemon=True))

    def poll(self) -> Learned | None:
        """What was learned since the last call, if anything was; waits for nothing."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        self._requests[: self._given] = self._thinned
        found, self._result = self._result, None
        if found is None:
            self._fail()
            return None
        self._failed = False
        self._enough = max(MORE, len(self._requests) // 16)
        self.trainings += 1
        self.learned = found
        return found

    def _begin(self, training: Thread) -> None:
        given, self._new = len(self._requests), 0
        try:
            training.start()
        except RuntimeError as error:  # this process may have no more threads
            logger.warning("Fluxion: adaptive could not begin to learn (%s); it goes on as before", error)
            self._fail()
            return
        self._thread, self._given = training, given
        if os.environ.get(AT_ONCE):
            self.wait()

    def _fail(self) -> None:
        """The same would fail again: not before there are as many requests more."""
        self.failures += 1
        self._failed = True
        self._enough = max(MORE, len(self._requests))

    def wait(self) -> None:
        """Until nothing is being trained."""
        if self._thread is not None:
            self._thread.join()

    def _work(self, requests: list[Measured]) -> None:
        self._thinned = requests
        try:
            requests = self._thinned = thinned(requests, KEPT)
            if self.learned is None:
                self._save(requests, None)  # a server that stops meanwhile need not measure them again
            found = self._train(requests, self.tau)
        except Exception as error:  # no request may fail for it
            logger.warning(
                "Fluxion: adaptive could not learn from %d requests (%s); it goes on as before", len(requests), error
            )
            return
        self._result = found
        self._save(requests, found)
        logger.info("Fluxion: adaptive has learned from %d requests", len(requests))

    def _save(self, requests: Sequence[Measured], learned: Learned | None) -> None:
        path = self.path
        if path is None:
            return
        part = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for left in path.parent.glob(f"{path.name}.*.part"):  # by a server that was killed while it wrote
                with suppress(OSError):  # another's, or gone by now
                    if time.time() - left.stat().st_mtime > STALE_S:
                        left.unlink()
            # A reader sees the old file or the new one, never half of one; nor do two writers share one.
            handle, part = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(save({**pack(requests), **({} if learned is None else learned.tensors())}))
            os.replace(part, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(part)
            logger.warning("Fluxion: adaptive cannot keep what it has learned in %s (%s)", path, error.strerror)

    def _load(self, path: Path) -> None:
        try:
            if not path.exists():
                return
            tensors = load(path.read_bytes())
            self._requests = unpack(tensors)[-MOST:]
            learned = Learned.of(tensors, self.tau) if THRESHOLD in tensors else None
            if learned is not None and learned.familiar.mean.shape != self._requests[-1].anchor.shape:
                raise ValueError("its parts do not belong together")
        except (OSError, SafetensorError, LookupError, ValueError, RuntimeError, TypeError) as error:
            self._requests.clear()
            logger.warning("Fluxion: adaptive begins anew, as %s cannot be read (%s)", path, error)
            return
        self.learned = learned
        self._new = len(self._requests)
        if learned is not None:
            self._new, self._enough = 0, MORE
