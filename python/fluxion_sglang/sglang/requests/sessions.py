"""Streaming sessions: a turn does not reuse KV that an earlier turn decoded under another sparse policy, and a
policy's state of a turn is dropped after it.

For other requests, only exact KV goes into the radix tree (`requests.py`). A streaming session keeps its whole KV
beside the tree. If a turn was decoded by approximation and the next turn names another policy, the session's KV is
dropped, and the turn prefills the conversation again, exactly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from fluxion_sglang.sglang.requests import rows
from fluxion_sglang.wishes import spec_of


class _Approximated(NamedTuple):
    """The specs of the policy that decoded part of a session's KV, and of the server's policy."""

    spec: str
    server: str


_sessions: weakref.WeakKeyDictionary[Any, _Approximated] = weakref.WeakKeyDictionary()


def approximated(request: Any, spec: str, server: str) -> None:
    """Note that the request decodes under the inexact policy `spec`; `server` is the spec of the server's policy."""
    session = getattr(request, "session", None)
    if session is not None and session.streaming:
        _sessions[session] = _Approximated(spec, server)


def is_approximated(request: Any) -> bool:
    """Whether a turn begins with KV that an earlier turn of its session approximated."""
    return getattr(request, "session", None) in _sessions


def try_match_prefix(original: Callable[..., Any], sessions: Any, params: Any) -> Any:
    """AROUND StreamingSession.try_match_prefix: hide a session's KV from a turn under another policy."""
    request = params.req
    session: Any = getattr(request, "session", None)
    written = None if session is None else _sessions.get(session)
    # A turn that is already ending leaves the session's KV to the next one.
    if written is not None and request.to_finish is None and spec_of(request, written.server) != written.spec:
        del _sessions[session]
        sessions.release_session(session.session_id)
    return original(sessions, params)


def try_cache_finished_req(original: Callable[..., bool], sessions: Any, request: Any) -> bool:
    """AROUND StreamingSession.try_cache_finished_req: the session keeps the row, but its request has ended."""
    row = request.kv.req_pool_idx
    kept = original(sessions, request)
    if kept:
        rows.tell(sessions.cache.req_to_token_pool, [row])
    return kept
