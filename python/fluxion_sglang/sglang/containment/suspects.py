"""Finds which of several requests makes passes fail, if the traceback does not name it.

All requests of a failed pass become suspects. They are tried one after another, the newest first, and a suspect on
trial runs alone. If its pass fails, it is the guilty one. A suspect is cleared after some tokens without a failure;
each of its failures doubles this number, so that a request that fails late is also found. When the guilty request has
ended, all others are cleared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from fluxion_sglang.sglang.containment import counts, ledger

TOKENS = 2
"""Tokens that clear a suspect after its first failure."""


class TrialEnds(Exception):
    """The suspect on trial is cleared and goes back into the queue, because the next one must run alone."""


class Suspects:
    """The suspects of this process's scheduler, the same on every rank, because they depend only on the batches."""

    def __init__(self) -> None:
        self._failures: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._waiting: list[Any] = []
        self._had = 0
        """Tokens of the suspect on trial when its trial began."""

    def accuse(self, requests: Sequence[Any]) -> None:
        """Make the requests of a failed pass suspects; given oldest first."""
        counts.suspected(len(requests))
        for request in requests:
            self._failures[request] = self._failures.get(request, 0) + 1
        rest = [request for request in self._waiting if request not in requests]
        self._waiting = [*reversed(requests), *rest]
        self._begin()

    def clear(self) -> None:
        """Clear all suspects: the guilty one was found, or cannot be found."""
        self._waiting.clear()

    def _begin(self) -> None:
        self._had = len(self._waiting[0].output_ids) if self._waiting else 0

    @property
    def on_trial(self) -> Any | None:
        """The request that must run alone, or None."""
        while self._waiting and ledger.answered(self._waiting[0]):
            self._waiting.pop(0)
            self._begin()
        return self._waiting[0] if self._waiting else None

    def end_trial(self) -> None:
        """Clear the suspect on trial."""
        self._waiting.pop(0)
        self._begin()

    def admits(self, request: Any, running: Sequence[Any]) -> bool:
        """Whether a request may be admitted beside the running ones.

        Raises:
            TrialEnds: the running requests must go back into the queue first.
        """
        trial = self.on_trial
        if trial is None:
            return True
        if not running:
            return request is trial
        if trial in running and len(trial.output_ids) - self._had >= TOKENS << self._failures.get(trial, 1) - 1:
            if len(self._waiting) > 1:
                raise TrialEnds
            self.clear()
            return True
        return False


suspects = Suspects()


def calc_priority(original: Callable[..., Any], policy: Any, waiting: list[Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND SchedulePolicy.calc_priority: the suspect on trial comes first, and SGLang sorts it alone."""
    if (trial := suspects.on_trial) is None:
        return original(policy, waiting, *args, **kwargs)
    others = [request for request in waiting if request is not trial]
    waiting[:] = [trial] if len(others) < len(waiting) else []
    try:
        return original(policy, waiting, *args, **kwargs)
    finally:
        waiting.extend(others)


def add_one_req(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND PrefillAdder.add_one_req: a suspect on trial runs alone."""
    if suspects.on_trial is not None:
        running = [*adder.can_run_list, *(r for r in adder.running_batch.reqs if not r.finished())]
        if not suspects.admits(req, running):
            from sglang.srt.managers.schedule_policy import AddReqResult

            return AddReqResult.OTHER
    return original(adder, req, *args, **kwargs)
