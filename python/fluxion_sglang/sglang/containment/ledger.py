"""Which requests the scheduler has taken in and not answered."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

_unanswered: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""SGLang's requests -> the order in which they came."""

_order = count()


def create_generation_req(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND Scheduler._create_generation_req: every request comes from here, also a session's turn.

    SGLang refuses a turn of a streaming session while another one runs. The end of the refused one would make the
    session free for a third, which then shares the row of the first. So it is no turn of the session.
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
    """Whether its last output has been sent."""
    return request not in _unanswered or bool(request.finished() and request.finished_output)


def unanswered() -> list[Any]:
    """Requests without their last output, in the order in which they came."""
    for request in [each for each in list(_unanswered) if answered(each)]:
        del _unanswered[request]
    return sorted(_unanswered, key=_unanswered.__getitem__)
