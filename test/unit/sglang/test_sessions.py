"""Streaming sessions whose turns have different policies: approximated KV of one turn is not reused by another
policy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fluxion_sglang.sglang.requests import sessions
from fluxion_sglang.sglang.requests.sessions import (
    approximated,
    is_approximated,
    try_cache_finished_req,
    try_match_prefix,
)


class Session(SimpleNamespace):
    __hash__ = object.__hash__


class Sessions:
    """The parts of SGLang's StreamingSession in use."""

    def __init__(self) -> None:
        self.released: list[str] = []

    def release_session(self, name: str) -> None:
        self.released.append(name)


def turn(session: Session | None, spec: Any = None, to_finish: Any = None) -> Any:
    params = None if spec is None else {"fluxion_policy": spec}
    return SimpleNamespace(session=session, sampling_params=SimpleNamespace(custom_params=params), to_finish=to_finish)


def released(request: Any) -> list[str]:
    there = Sessions()
    params = SimpleNamespace(req=request)
    assert try_match_prefix(lambda *args: args, there, params) == (there, params), "SGLang goes on as ever"
    return there.released


@pytest.fixture
def session() -> Session:
    return Session(session_id="mine", streaming=True)


def test_a_turn_under_another_policy_starts_from_the_prompt(session: Session) -> None:
    approximated(turn(session, "streaming"), "streaming", "full")
    assert released(turn(session, "streaming")) == []
    assert released(turn(session, "full")) == ["mine"]
    assert released(turn(session, "full")) == [], "what is there now is exact"


@pytest.mark.parametrize(("server", "gone"), [("fixed:16:0.5", []), ("full", ["mine"])])
def test_a_turn_without_a_policy_has_the_server_s(session: Session, server: str, gone: list[str]) -> None:
    approximated(turn(session, "fixed:16:0.5"), "fixed:16:0.5", server)
    assert released(turn(session)) == gone


def test_a_turn_that_ends_at_once_leaves_the_session_alone(session: Session) -> None:
    approximated(turn(session, "streaming"), "streaming", "full")
    assert released(turn(session, "full", to_finish="aborted")) == []
    assert released(turn(session, "full")) == ["mine"]


def test_a_policy_that_is_none_gets_nothing(session: Session) -> None:
    approximated(turn(session, "streaming"), "streaming", "full")
    assert released(turn(session, ["full"])) == ["mine"]


def test_exact_turns_and_other_sessions_stay(session: Session) -> None:
    assert released(turn(session, "streaming")) == []
    assert released(turn(None, "streaming")) == []
    branching = Session(session_id="other", streaming=False)
    approximated(turn(branching, "streaming"), "streaming", "full")
    approximated(turn(None, "streaming"), "streaming", "full")
    assert released(turn(branching, "full")) == [], "its KV is in the tree, which has exact KV alone"
    del branching
    assert not [kept for kept in sessions._sessions if kept.session_id == "other"]


def test_a_turn_knows_that_it_begins_with_what_another_approximated(session: Session) -> None:
    assert not is_approximated(turn(session)) and not is_approximated(turn(None))
    approximated(turn(session, "streaming"), "streaming", "full")
    assert is_approximated(turn(session, "streaming"))
    released(turn(session, "full"))
    assert not is_approximated(turn(session, "full"))


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_remembered_of_a_turn_goes_with_it(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session keeps its row without a free; any other row is freed, which `rows.py` reports."""
    told: list[tuple[Any, list[int]]] = []
    monkeypatch.setattr(sessions.rows, "tell", lambda table, rows: told.append((table, rows)))
    there = SimpleNamespace(cache=SimpleNamespace(req_to_token_pool="the table"))
    request = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=3))

    def original(_: Any, request: Any) -> bool:
        request.kv = None  # as SGLang detaches it
        return kept

    assert try_cache_finished_req(original, there, request) is kept
    assert told == ([("the table", [3])] if kept else [])
