"""Messages that come to the scheduler, one at a time: one that cannot be taken in is answered, and the others
are processed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from fluxion_sglang.sglang.containment import counts, frames, ledger
from fluxion_sglang.sglang.containment.ending import answer, reason, said

logger = logging.getLogger(__name__)

LONGEST_SLEEP_S = 60.0
"""What an operator may have every pass sleep (SGLang's `/slow_down`)."""


class NotTakenIn(Exception):
    """A message that could not be taken in by one of several ranks: they must agree before it is answered."""

    def __init__(self, message: Any) -> None:
        super().__init__()
        self.message = message


def process_input_requests(original: Callable[..., None], scheduler: Any, recv_reqs: Sequence[Any]) -> None:
    """AROUND Scheduler.process_input_requests.

    Raises:
        NotTakenIn: for `loop.py`; messages behind it come again.
    """
    if not recv_reqs:  # what it does besides is due in any case
        original(scheduler, recv_reqs)
        return
    messages = list(_single(recv_reqs))
    for done, message in enumerate(messages, 1):
        try:
            _check(message)
            original(scheduler, [message])
        except Exception as error:
            from sglang.srt.runtime_context import get_parallel

            rest = messages[done:]
            if frames.went_through(error, *_AFTERWARDS):  # the message itself is taken in
                scheduler._deferred_input_requests[:0] = rest
                raise
            if get_parallel().launch_world_size > 1:
                scheduler._deferred_input_requests[:0] = rest
                raise NotTakenIn(message) from error
            refuse(scheduler, message, error)


_AFTERWARDS = ("check_pending", "check_pending_load")
"""What SGLang looks after when it has taken all messages in."""


def _single(messages: Sequence[Any]) -> Iterator[Any]:
    """SGLang takes the requests of a batch in one by one; a failure of one must not lose those behind it."""
    from sglang.srt.managers.io_struct import AbortReq, BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
    from sglang.srt.managers.utils import is_health_check_generate_req

    for message in messages:
        if isinstance(message, BatchTokenizedGenerateReqInput):
            yield from message
            continue
        if not isinstance(message, TokenizedGenerateReqInput | AbortReq) and is_health_check_generate_req(message):
            message.rid = None  # SGLang would drop a control message of that name
        yield message


def _check(message: Any) -> None:
    """Raises ValueError for an operator's message that would stop the loop."""
    from sglang.srt.managers.io_struct import SlowDownReqInput

    if isinstance(message, SlowDownReqInput) and message.forward_sleep_time is not None:
        seconds = message.forward_sleep_time
        if not (math.isfinite(seconds) and 0 <= seconds <= LONGEST_SLEEP_S):
            raise ValueError(f"forward_sleep_time is {seconds}; give seconds from 0 to {LONGEST_SLEEP_S:g}.")


def refuse(scheduler: Any, message: Any, error: BaseException) -> None:
    """Tell the sender of a message that it was not taken in."""
    from sglang.srt.managers.io_struct import AbortReq, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput

    logger.error("Fluxion: a message to the scheduler cannot be taken in; its sender is told", exc_info=error)
    counts.contained("arrivals")
    sender = scheduler.ipc_channels.send_to_tokenizer
    if not isinstance(message, TokenizedGenerateReqInput | TokenizedEmbeddingReqInput):
        if (failed := _failed(type(message).__name__, error)) is not None:
            sender.send_output(failed, message)
        return
    status = HTTPStatus.BAD_REQUEST if isinstance(error, ValueError) else HTTPStatus.INTERNAL_SERVER_ERROR
    why = reason(f"the server cannot take in this request ({said(error)}); change it, or report it.", status)
    made = [request for request in ledger.unanswered() if request.rid == message.rid]
    for request in made:
        answer(scheduler, request, why)
    if not made:
        sender.send_output(AbortReq(rid=message.rid, finished_reason=why), message)


def _failed(name: str, error: BaseException) -> Any | None:
    """The answer to a control request that failed, of SGLang's type for it; None where SGLang sends none."""
    from sglang.srt.managers import io_struct

    for ending in ("ReqInput", "Req", "Input"):
        if name.endswith(ending):
            kind = getattr(io_struct, f"{name.removesuffix(ending)}{ending.removesuffix('Input')}Output", None)
            if kind is not None:
                return _filled(kind, said(error))
    return None


def _filled(kind: type[Any], sentence: str) -> Any:
    """A message of this type that says no wherever it can."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        if field.name == "success":
            values[field.name] = False
        elif field.name in ("message", "error_message"):
            values[field.name] = sentence
        elif field.required:
            values[field.name] = None
    return kind(**values)


def abort_request(original: Callable[..., None], scheduler: Any, recv_req: Any) -> None:
    """AROUND Scheduler.abort_request: a request that is there under its whole name is the only one that ends.

    SGLang ends every request whose rid begins with the one that is to end. A client that names its request "a" and
    hangs up would end a sixteenth of all others.
    """
    requests = ledger.unanswered()
    if recv_req.abort_all or not any(request.rid == recv_req.rid for request in requests):
        original(scheduler, recv_req)
        return
    hidden = [r for r in requests if r.rid != recv_req.rid and r.rid.startswith(recv_req.rid)]
    names = [request.rid for request in hidden]
    for request in hidden:
        request.rid = f"\0{request.rid}"
    try:
        original(scheduler, recv_req)
    finally:
        for request, name in zip(hidden, names, strict=True):
            request.rid = name
