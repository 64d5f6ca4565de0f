"""Sends outputs to the clients: if a batch of outputs fails, its rows are sent one by one.

Three places handle outputs of many requests in one call: the scheduler's output streamer, the detokenizer, and the
tokenizer process. A row that fails ends its request; the other rows are sent as usual.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
import zmq

from fluxion_sglang.sglang.containment import counts, frames
from fluxion_sglang.sglang.containment.ending import reason, said

logger = logging.getLogger(__name__)

# --- output streamer, in the scheduler's process ---

_STREAM = "_stream_output_generation"
"""SGLang's function that makes one message from the outputs of a batch; its local `acc` is that message."""


def stream_output(
    original: Callable[..., None],
    streamer: Any,
    reqs: Sequence[Any],
    return_logprob: bool,
    skip_req: Any | None = None,
) -> None:
    """AROUND SchedulerOutputStreamer.stream_output.

    Raises:
        Exception: of the first request that fails alone, which the traceback names; the others have been sent. If all
            requests fail, the exception of the batch, which names none.
    """
    try:
        original(streamer, reqs, return_logprob, skip_req)
        return
    except Exception as error:
        together = error
        if (message := frames.local(error, _STREAM, "acc")) is None:
            raise  # the message is not begun, or is already sent
        logger.exception("Fluxion: outputs cannot be sent together; they are sent one by one")
        _unsend(message)
    failed: list[Exception] = []
    one_by_one = [req for req in reqs if req is not skip_req]
    for each in one_by_one:
        try:
            _stream_one(original, streamer, each, return_logprob)
        except Exception as error:
            if (message := frames.local(error, _STREAM, "acc")) is not None:
                _unsend(message)
            failed.append(error)
    if 1 < len(failed) == len(one_by_one):
        raise together
    if failed:
        raise failed[0]


def _stream_one(original: Callable[..., None], streamer: Any, req: Any, return_logprob: bool) -> None:
    """Send one request. Its parameter names the request in a traceback (`frames.culprit`); the loop variable of the
    caller has moved on by the time the traceback is read."""
    original(streamer, [req], return_logprob)


def _unsend(message: Any) -> None:
    """Undo SGLang's notes of what was sent, for the requests of a message that was not sent."""
    for i, request in enumerate(message.output_reqs):
        request.finished_output = None
        if i < len(message.output_ids):
            request.send_token_offset -= len(message.output_ids[i])
        if i < len(message.decode_ids_list):
            request.send_decode_id_offset -= len(message.decode_ids_list[i])
        if i < len(message.output_token_logprobs_val or ()):
            request.send_output_token_logprobs_offset -= len(message.output_token_logprobs_val[i])
        if i < len(message.input_token_logprobs_val or ()) and message.input_token_logprobs_val[i]:
            request.input_logprob_sent = False


# --- rows of a message ---


def _rows(message: Any) -> Iterator[Any]:
    """The messages of the single rows."""
    count = len(message.rids)

    def row(value: Any, i: int) -> Any:
        if isinstance(value, list) and len(value) == count:
            return value[i : i + 1]
        if isinstance(value, dict):
            return {key: row(each, i) for key, each in value.items()}
        return value

    for i in range(count):
        names = [field.name for field in msgspec.structs.fields(message)]
        yield msgspec.structs.replace(message, **{name: row(getattr(message, name), i) for name in names})


# --- detokenizer ---

_UNREADABLE = "the tokens of this answer cannot be turned into text"

_ended: set[str] = set()
"""Requests that were ended here. The scheduler learns of it later; until then their outputs are dropped."""


def handle_batch_token_id_out(original: Callable[..., Any], detokenizer: Any, recv_obj: Any) -> Any:
    """AROUND DetokenizerManager.handle_batch_token_id_out."""
    before = [_status(detokenizer, rid) for rid in recv_obj.rids]
    if _ended.isdisjoint(recv_obj.rids):
        try:
            return original(detokenizer, recv_obj)
        except Exception:
            logger.exception("Fluxion: answers cannot be detokenized together; they are taken one by one")
        _restore(detokenizer, before)
    texts: list[str] = []
    reasons: list[Any] = []
    for row, was in zip(_rows(recv_obj), before, strict=True):
        if row.rids[0] in _ended:
            texts.append("")
            reasons.append(None)
            if row.finished_reasons[0] is not None:
                _ended.discard(row.rids[0])
            continue
        try:
            texts += original(detokenizer, row).output_strs
            reasons += row.finished_reasons
        except Exception as error:
            _restore(detokenizer, [was])
            detokenizer.decode_status.pop(row.rids[0], None)
            texts.append("")
            reasons.append(reason(f"{_UNREADABLE} ({said(error)}).", HTTPStatus.INTERNAL_SERVER_ERROR))
            if row.finished_reasons[0] is None:
                _ended.add(row.rids[0])
            counts.contained("outputs")
    # Everything but the text is unchanged.
    whole = original(detokenizer, msgspec.structs.replace(recv_obj, rids=[], finished_reasons=reasons))
    return msgspec.structs.replace(whole, rids=recv_obj.rids, output_strs=texts)


def _status(detokenizer: Any, rid: str) -> tuple[str, Any, tuple[Any, ...]]:
    """The detokenizer's state of a request, for `_restore`. Its lists only grow at their ends."""
    status = detokenizer.decode_status.get(rid)
    if status is None:
        return rid, None, ()
    offsets = (status.surr_offset, status.read_offset, status.sent_offset, status.decoded_text_len)
    return rid, status, (*offsets, len(status.decode_ids), len(status.decoded_text_chunks))


def _restore(detokenizer: Any, before: Sequence[tuple[str, Any, tuple[Any, ...]]]) -> None:
    for rid, status, values in before:
        if status is None:
            detokenizer.decode_status.pop(rid, None)
            continue
        *offsets, ids, chunks = values
        status.surr_offset, status.read_offset, status.sent_offset, status.decoded_text_len = offsets
        del status.decode_ids[ids:]
        del status.decoded_text_chunks[chunks:]
        detokenizer.decode_status[rid] = status


# --- tokenizer process ---


async def handle_loop(original: Callable[..., Any], manager: Any) -> None:
    """AROUND TokenizerManager.handle_loop: a message that cannot be handled ends its request."""
    while True:
        try:
            return await original(manager)
        except Exception as error:
            if isinstance(error, zmq.ZMQError):
                raise
            if frames.went_through(error, "async_sock_recv"):  # the message could not be decoded
                logger.exception("Fluxion: a message to the tokenizer process cannot be read")
                continue
            message = frames.local(error, "handle_loop", "recv_obj")
            logger.exception("Fluxion: a message of the scheduler cannot be handled; its request is ended")
            for rid in getattr(message, "rids", None) or [getattr(message, "rid", None)]:
                _end(manager, rid, error)


async def handle_batch_output(original: Callable[..., Any], manager: Any, recv_obj: Any) -> None:
    """AROUND TokenizerManager._handle_batch_output."""
    try:
        await original(manager, recv_obj)
    except Exception as error:
        if (at := frames.local(error, "_handle_batch_output", "i")) is None:
            raise
        logger.exception("Fluxion: an answer cannot be handed over; its request is ended")
        for state in (frames.local(error, "_handle_batch_output", "pending_notify") or {}).values():
            state.event.set()  # the rows before this one
        _end(manager, recv_obj.rids[at], error)
        for row in list(_rows(recv_obj))[at + 1 :]:
            await handle_batch_output(original, manager, row)
        return
    for rid, why in zip(recv_obj.rids, recv_obj.finished_reasons, strict=True):
        if why and str(why.get("message", "")).startswith(_UNREADABLE):
            _stop(manager, rid)  # the scheduler does not know yet


def _end(manager: Any, rid: str | None, error: Exception) -> None:
    """Answer a request with a failed output, and let the scheduler stop it."""
    from sglang.srt.managers.io_struct import AbortReq

    state = None if rid is None else manager.rid_to_state.get(rid)
    if state is None:
        return
    sentence = f"the answer to this request cannot be handed over ({said(error)}); change the request, or report it."
    why = reason(sentence, HTTPStatus.INTERNAL_SERVER_ERROR)
    state.obj.return_logprob = False  # logprobs may be the cause of the failure
    try:
        manager._handle_abort_req(AbortReq(rid=rid, finished_reason=why))
    except Exception:  # it computes statistics from the same request
        logger.exception("Fluxion: the request is ended without what SGLang says of it")
        manager.rid_to_state.pop(rid, None)
        state.finished = True
        state.out_list.append({"text": "", "output_ids": [], "meta_info": {"id": rid, "finish_reason": why}})
        state.event.set()
    _stop(manager, rid)
    counts.contained("outputs")


def _stop(manager: Any, rid: str | None) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    manager._dispatch_to_scheduler(AbortReq(rid=rid))
