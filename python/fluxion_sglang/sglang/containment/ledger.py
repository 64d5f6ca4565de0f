"""Tracks the requests that the scheduler has received and not answered."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

_unanswered: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The order of arrival of each of SGLang's requests."""

_order = count()


def create_generation_req(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND Scheduler._create_generation_req, which makes every request, also a session's turn.

    SGLang refuses a turn of a streaming session while another one runs. The end of the refused turn would mark the
    session as free for a third, which would then share the first turn's row. So it is detached.
    """
    request = original(scheduler, *args, **kwargs)
    session = request.session
    if session is not None and session.streaming and session._inflight:
        request.session = None
    _unanswered[request] = next(_order)
    return request


def send_abort_output(original: Callable[..., None], scheduler: Any, abort: Any, request: Any) -> None:
    """AROUND Scheduler.send_abort_output: an answer without output."""
    original(scheduler, abort, request)
    _unanswered.pop(request, None)


def answered(request: Any) -> bool:
    """Whether the request's last output has been sent."""
    return request not in _unanswered or bool(request.finished() and request.finished_output)


def unanswered() -> list[Any]:
    """Requests without their last output, in order of arrival."""
    for request in [each for each in list(_unanswered) if answered(each)]:
        del _unanswered[request]
    return sorted(_unanswered, key=_unanswered.__getitem__)
