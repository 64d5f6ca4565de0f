"""Processes messages to the scheduler one at a time: a message that fails is answered, and the others continue."""

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
"""Longest sleep per pass that an operator may set (SGLang's `/slow_down`)."""


class NotTakenIn(Exception):
    """One of several ranks could not process a message. All ranks must agree before it is answered."""

    def __init__(self, message: Any) -> None:
        super().__init__()
        self.message = message


def process_input_requests(original: Callable[..., None], scheduler: Any, recv_reqs: Sequence[Any]) -> None:
    """AROUND Scheduler.process_input_requests.

    Raises:
        NotTakenIn: for `loop.py`; the messages behind it are deferred.
    """
    if not recv_reqs:  # its other work is still due
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
            if frames.went_through(error, *_AFTERWARDS):  # the message itself is already processed
                scheduler._deferred_input_requests[:0] = rest
                raise
            if get_parallel().launch_world_size > 1:
                scheduler._deferred_input_requests[:0] = rest
                raise NotTakenIn(message) from error
            refuse(scheduler, message, error)


_AFTERWARDS = ("check_pending", "check_pending_load")
"""Functions that SGLang calls after all messages are processed."""


def _single(messages: Sequence[Any]) -> Iterator[Any]:
    """Split batches: SGLang processes their requests one by one, and a failure of one must not lose the later ones."""
    from sglang.srt.managers.io_struct import AbortReq, BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
    from sglang.srt.managers.utils import is_health_check_generate_req

    for message in messages:
        if isinstance(message, BatchTokenizedGenerateReqInput):
            yield from message
            continue
        if not isinstance(message, TokenizedGenerateReqInput | AbortReq) and is_health_check_generate_req(message):
            message.rid = None  # otherwise SGLang drops a control message with this name
        yield message


def _check(message: Any) -> None:
    """Raise ValueError for an operator's message that would stop the loop."""
    from sglang.srt.managers.io_struct import SlowDownReqInput

    if isinstance(message, SlowDownReqInput) and message.forward_sleep_time is not None:
        seconds = message.forward_sleep_time
        if not (math.isfinite(seconds) and 0 <= seconds <= LONGEST_SLEEP_S):
            raise ValueError(f"forward_sleep_time is {seconds}; give seconds from 0 to {LONGEST_SLEEP_S:g}.")


def refuse(scheduler: Any, message: Any, error: BaseException) -> None:
    """Tell the sender of a message that it was not processed."""
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
    """The answer to a failed control request, of SGLang's matching type; None if SGLang sends none."""
    from sglang.srt.managers import io_struct

    for ending in ("ReqInput", "Req", "Input"):
        if name.endswith(ending):
            kind = getattr(io_struct, f"{name.removesuffix(ending)}{ending.removesuffix('Input')}Output", None)
            if kind is not None:
                return _filled(kind, said(error))
    return None


def _filled(kind: type[Any], sentence: str) -> Any:
    """A message of this type that reports failure in every field that can."""
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
    """AROUND Scheduler.abort_request: if a request has exactly this rid, only that one ends.

    SGLang ends every request whose rid begins with the given one. A client that names its request "a" and disconnects
    would otherwise end a sixteenth of all others.
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
