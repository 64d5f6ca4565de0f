"""Ends requests of SGLang with an error."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

_LONGEST = 300
"""Characters of an exception that an answer repeats."""


def end_request(request: Any, sentence: str, status: HTTPStatus, kind: str) -> None:
    """Let SGLang end a running request, and keep its further KV out of the radix tree.

    A request that is already ending keeps its reason.

    Raises:
        RuntimeError: this SGLang's request has no such means.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if not hasattr(request, "to_finish"):
        raise RuntimeError(f"SGLang's request cannot be told to end: {sentence}")
    keep_out_of_tree(request)
    if request.to_finish is None:
        request.to_finish = FINISH_ABORT(sentence, status, kind)


def keep_out_of_tree(request: Any, when: object = True) -> None:
    """Keep a request's KV that is not yet in the radix tree out of it. Raises as `end_request`.

    Args:
        when: evaluated as a bool before each insertion.
    """
    if not hasattr(request, "skip_radix_cache_insert"):
        raise RuntimeError("SGLang's request cannot be told to stay out of the radix tree.")
    request.skip_radix_cache_insert = when


def answer(scheduler: Any, request: Any, why: dict[str, object] | None) -> None:
    """Answer a request that is in no batch and holds no rows or pages, without output.

    Args:
        why: its finish reason; None if its client has disconnected.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.managers.scheduler import _make_abort_req

    for queue in (scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue):
        if request in queue:
            queue.remove(request)
    scheduler._release_aborted_request(request)
    if not request.finished():  # a session reads it
        request.finished_reason = FINISH_ABORT()
    request.finished_output = True
    scheduler.send_abort_output(_make_abort_req(request, finished_reason=why), request)


def reason(sentence: str, status: HTTPStatus) -> dict[str, object]:
    """The finish reason of an ended request in SGLang's form."""
    return {"type": "abort", "message": sentence, "status_code": status, "err_type": _KINDS[status]}


_KINDS = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
}


def said(error: BaseException) -> str:
    """A short description of an exception."""
    first = str(error).strip().partition("\n")[0][:_LONGEST]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
