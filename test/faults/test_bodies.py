"""Requests known to end an SGLang server or to block all others affect only their own sender.

Two neighbours, one of them streaming, run beside each of them and get the same tokens as alone. The request gets one
answer, and nothing is lost afterwards. Legal requests are answered normally.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from faults import scenes
from faults.child import Child
from faults.inprocess import InProcess
from faults.rows import ANSWERED, CHAT, FAILED, FINE, IDS, PATIENCE_S, QUICK, REFUSED, ROWS, Row, body, generate, raw
from faults.wire import Answer, Call
from places import NEEDLE


def assert_row(server: InProcess, calls: Sequence[Call], codes: frozenset[int]) -> None:
    """Check the calls together with the neighbours, and while those decode."""
    for at in (0, 5):
        for answer in scenes.beside(server, [scenes.running(call, at) for call in calls], patience=PATIENCE_S):
            assert answer.code in codes, f"status {answer.code} {answer.message} {answer.error}"


def rows(*rows: Row) -> pytest.MarkDecorator:
    marked = [pytest.param(row, id=row.name, marks=() if row.name in QUICK else pytest.mark.full) for row in rows]
    return pytest.mark.parametrize("row", marked)


def test_the_rows_have_names_of_their_own() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names) - 2, "n is sent to one route three times"
    assert set(names) >= QUICK


class TestOneRequest:
    @rows(*ROWS)
    def test_a_request_costs_its_sender_alone(self, server: Child, row: Row) -> None:
        server.run(assert_row, row.calls, row.codes)

    def test_nothing_is_compiled_for_a_penalty(self, server: Child) -> None:
        server.run(compiles_nothing)

    def test_an_id_that_begins_others(self, server: Child) -> None:
        server.run(hang_up_with_a_prefix)

    @pytest.mark.full
    @pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
    @pytest.mark.parametrize("stream", [False, True])
    def test_clients_that_leave(self, server: Child, path: str, stream: bool) -> None:
        server.run(leave, path, stream)


def compiles_nothing(server: InProcess) -> None:
    """torch.compile needs a C++ compiler, and blocks all requests for seconds."""
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    every = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1, "min_new_tokens": 2}
    for params in ({"repetition_penalty": 1.2}, every, {**every, "top_p": 0.9, "min_p": 0.1, "top_k": 5}):
        for answer in scenes.beside(server, [scenes.running(Call(body(params)))]):
            assert answer.code == 200, answer.message
    assert counters["stats"]["unique_graphs"] == before


def hang_up_with_a_prefix(server: InProcess) -> None:
    scenes.alone(server, 0), scenes.alone(server, 1)
    named = [scenes.neighbour(0, rid="ab1"), scenes.neighbour(1, rid="ac2")]
    short = Call(
        {"input_ids": IDS, "sampling_params": scenes.greedy(2000), "rid": "a", "stream": True}, at=3, hang_up=6
    )
    scenes.assert_as_alone(server, server.together([*named, short])[:2])
    server.idle_check()


def leave(server: InProcess, path: str, stream: bool) -> None:
    """Clients that hang up while they wait, at once and after some tokens."""
    said: dict[str, Any] = {"/generate": {"input_ids": IDS, "sampling_params": scenes.greedy(600)}}.get(path) or {
        "model": "needle", "prompt": "w1", "messages": CHAT, "max_tokens": 600, "ignore_eos": True,
    }  # fmt: skip
    calls = [Call({**said, "stream": stream}, path, at=at, hang_up=after) for at, after in ((0, 0), (2, 1), (4, 9))]
    scenes.beside(server, calls)


# --- Sessions.


def turn(session: str, ids: list[int], new: int = 4, at: int = 0, rid: str | None = None, **params: Any) -> Call:
    extra = {} if rid is None else {"rid": rid}
    return Call(
        {"input_ids": ids, "sampling_params": scenes.greedy(new), "session_params": {"id": session, **params}, **extra},
        at=at,
    )


def sent(
    server: InProcess, calls: Sequence[Call], codes: frozenset[int] = FAILED | FINE, check: bool = True
) -> list[Answer]:
    answers = scenes.beside(server, calls, check=check)
    for answer in answers:
        assert answer.code in codes, f"status {answer.code} {answer.message} {answer.error}"
    return answers


def replace_without_rid(server: InProcess) -> None:
    session = server.open_session()
    for ids in (scenes.words(3), scenes.words(4, 10)):
        sent(server, [turn(session, ids)], FINE, check=False)
    sent(server, [turn(session, scenes.words(5), replace=True)], check=False)
    server.close_session(session)
    sent(server, [])


def odd_turns(server: InProcess) -> None:
    session = server.open_session()
    first = sent(server, [turn(session, scenes.words(3))], FINE, check=False)[0].meta["id"]
    odd: list[dict[str, Any]] = [
        {"rid": "none"}, {"rid": [1]}, {"rid": first, "offset": -1}, {"rid": first, "offset": 10**9},
        {"rid": first, "offset": "x"}, {"rid": first, "offset": 1.5}, {"replace": "x"}, {"replace": [1], "rid": first},
        {"drop_previous_output": "x"}, {"rid": first, "drop_previous_output": True, "offset": 2},
    ]  # fmt: skip
    for params in odd:
        sent(server, [turn(session, scenes.words(4, 10), at=5, **params)], check=False)
    server.close_session(session)
    sent(server, [])


def long_chain(server: InProcess) -> None:
    """A session of many turns, of which the first is replaced."""
    session = server.open_session()
    root = server.ask(turn(session, [300], 1, rid="root").body)
    assert root.code == 200, root.message
    last = "root"
    for number in range(1100):
        body = turn(session, [300], 1, rid=f"turn-{number}").body
        body["session_params"]["rid"] = last
        if server.ask(body).code != 200:
            break
        last = f"turn-{number}"
    replaced = {
        **turn(session, scenes.words(4), 4).body,
        "session_params": {"id": session, "rid": "root", "replace": True},
    }
    sent(server, [Call(replaced, at=3)], check=False)
    server.close_session(session)
    sent(server, [])


def embeds_in_a_session(server: InProcess) -> None:
    session = server.open_session()
    for embeds in ([[0.1] * 256] * 4, [[0.1, 0.2]]):
        call = {"input_embeds": embeds, "sampling_params": scenes.greedy(4), "session_params": {"id": session}}
        sent(server, [Call(call, at=5)], check=False)
        sent(server, [turn(session, scenes.words(4))], check=False)
    server.close_session(session)
    sent(server, [])


@pytest.mark.full
class TestSessions:
    @pytest.mark.parametrize(
        "story", [replace_without_rid, odd_turns, embeds_in_a_session], ids=lambda story: story.__name__
    )
    def test_a_session_costs_its_owner_alone(self, server: Child, story: Any) -> None:
        server.run(story)

    def test_a_chain_that_is_replaced_at_its_root(self, server: Child) -> None:
        server.run(long_chain, patience=300.0)

    @pytest.mark.parametrize(
        "extra", [{"capacity_of_str_len": -1}, {"timeout": -1.0}, {"session_id": ""}, {"timeout": 1e308}]
    )
    def test_opened_oddly(self, server: Child, extra: dict[str, Any]) -> None:
        server.run(opened_oddly, extra)


def opened_oddly(server: InProcess, extra: dict[str, Any]) -> None:
    for answer in sent(server, [Call({"capacity_of_str_len": 1000, **extra}, "/open_session", at=5)], check=False):
        if answer.status == 200 and isinstance(answer.data, str):
            sent(server, [turn(answer.data, scenes.words(4))], check=False)
            server.close_session(answer.data)
    sent(server, [])


def refused_beside_running(server: InProcess) -> None:
    """A turn runs, another is refused, a third arrives: the first keeps its row."""
    session = server.open_session(streaming=True)
    sent(server, [turn(session, scenes.words(3))], FINE, check=False)
    calls = [
        turn(session, scenes.words(4), 60), turn(session, scenes.words(5), at=6), turn(session, scenes.words(6), at=12),
        turn(session, scenes.words(7), at=20, rid="none"), turn(session, scenes.words(8), at=30),
    ]  # fmt: skip
    answers = sent(server, calls, check=False)
    assert answers[0].code == 200 and len(answers[0].tokens) == 60, answers[0].message
    server.close_session(session)
    sent(server, [])


def as_many_as_rows(server: InProcess) -> None:
    """Open sessions hold every row of the server: other requests are refused or served, and none waits for ever."""
    sessions = [server.open_session(streaming=True) for _ in range(server.scheduler.max_running_requests)]
    for session in sessions:
        answer = server.ask(turn(session, scenes.words(3)).body)
        assert answer.code in FAILED | FINE, answer.message
    for answer in server.together([Call(body()), Call(body(), at=2), turn(sessions[0], scenes.words(4))]):
        assert answer.code in {200, 503}, answer.message
    for session in sessions:
        server.close_session(session)
    sent(server, [Call(body())], FINE)


@pytest.mark.full
class TestStreamingSessions:
    FLAGS = ("--enable-streaming-session", "--chunked-prefill-size", "64")

    @pytest.mark.parametrize(
        "story", [refused_beside_running, as_many_as_rows, replace_without_rid, odd_turns, embeds_in_a_session],
        ids=lambda story: story.__name__,
    )  # fmt: skip
    def test_a_session_costs_its_owner_alone(self, server: Child, story: Any) -> None:
        server.run(story)


# --- Options.

WIDTH = 256


def embeds(rows: Sequence[Sequence[Any]], **extra: Any) -> Call:
    return Call({"input_embeds": rows, "sampling_params": scenes.greedy(4), **extra})


@pytest.mark.full
class TestWithoutRadixCache:
    FLAGS = ("--disable-radix-cache", "--dtype", "bfloat16")

    @rows(
        Row("embeds narrow", (embeds([[0.1, 0.2]]),)),
        Row("embeds ragged", (embeds([[0.1] * WIDTH, [0.1]]),)),
        Row("embeds null", (embeds([[None] * WIDTH]),)),
        Row("embeds NaN", (raw(f'{{"input_embeds":[[{",".join(["NaN"] * WIDTH)}]]}}'),)),
        Row("embeds huge", (embeds([[3e38] * WIDTH] * 3),), FAILED | FINE),
        Row("embeds empty", (embeds([]), embeds([[]])), FAILED),
        Row("embeds legal", (embeds([[0.1] * WIDTH] * 5),), FINE),
        Row("embeds beside ids", (embeds([[0.1] * WIDTH] * 5), Call(body()), embeds([[0.2] * WIDTH] * 3)), FINE),
        Row(
            "embeds sampled",
            (Call({"input_embeds": [[0.1] * WIDTH] * 5, "sampling_params": {"top_p": 0.9, "max_new_tokens": 4}}),),
            FINE,
        ),
    )
    def test_a_request_costs_its_sender_alone(self, server: Child, row: Row) -> None:
        server.run(assert_row, row.calls, row.codes)

    def test_embeds_in_a_session(self, server: Child) -> None:
        server.run(embeds_in_a_session)


@pytest.mark.full
class TestLora:
    FLAGS = (
        *("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"),
        *("--lora-backend", "torch_native"),
    )

    @rows(generate("lora_id", lora_id="zzz", codes=ANSWERED), generate("lora_path", lora_path="zzz", codes=FAILED))
    def test_a_request_costs_its_sender_alone(self, server: Child, row: Row) -> None:
        server.run(assert_row, row.calls, row.codes)


BRIEF = [
    row
    for row in ROWS
    if any(word in row.name for word in ("top_k", "logprob", "logit_bias", "min_new", "a prompt of", "regex"))
]


@pytest.mark.full
class TestChunked:
    FLAGS = ("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--disable-overlap-schedule")

    @rows(*BRIEF)
    def test_a_request_costs_its_sender_alone(self, server: Child, row: Row) -> None:
        server.run(assert_row, row.calls, row.codes)


@pytest.mark.full
class TestDrafts:
    FLAGS = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")

    @rows(*BRIEF)
    def test_a_request_costs_its_sender_alone(self, server: Child, row: Row) -> None:
        server.run(assert_row, row.calls, row.codes)


# --- Operators' endpoints.

SLOW = "/slow_down"


def post(path: str, body: Any = None, **extra: Any) -> Call:
    return Call(body, path, **extra)


WEIGHTS = "/update_weights_from_disk"
STATE = "/set_internal_state"
AWAKE = post(SLOW, {"forward_sleep_time": None}, at=2)


@pytest.mark.full
class TestOperators:
    @rows(
        Row("profile", (post("/start_profile"), post("/stop_profile", at=8)), FAILED | FINE),
        *[
            Row(f"experts {verb}", (Call(None, f"/{verb}_expert_distribution_record"),), FAILED | FINE)
            for verb in ("start", "stop", "dump")
        ],
        Row("release memory", (post("/release_memory_occupation", {}),), FAILED | FINE),
        Row("resume memory", (post("/resume_memory_occupation", {"tags": ["weights"]}),), FAILED | FINE),
        Row("resume nothing", (post("/resume_memory_occupation", {}),), FAILED | FINE),
        Row("weights from disk", (post(WEIGHTS, {"model_path": NEEDLE, "load_format": "zzz"}),), FAILED),
        Row("weights from nowhere", (post(WEIGHTS, {"model_path": "/nowhere"}),), FAILED),
        Row("slow_down NaN", (raw('{"forward_sleep_time":NaN}', SLOW), AWAKE), FAILED | FINE),
        Row("slow_down negative", (post(SLOW, {"forward_sleep_time": -1}), AWAKE), FAILED | FINE),
        Row("slow_down for ever", (post(SLOW, {"forward_sleep_time": 1e9}), AWAKE), FAILED | FINE),
        Row("flush", (post("/flush_cache"),), FAILED | FINE),
        Row("internal state", (post(STATE, {"server_args": {"pp_max_micro_batch_size": "x"}}),), FAILED | FINE),
        Row("weights by name", (post("/get_weights_by_name", {"name": "nothing"}),), FAILED | FINE),
        Row("abort nobody", (post("/abort_request", {"rid": "nobody"}),), FINE),
        Row("abort by a list", (post("/abort_request", {"rid": [1]}),), REFUSED),
    )  # fmt: skip
    def test_a_call_of_an_operator_costs_nobody(self, server: Child, row: Row) -> None:
        server.run(assert_call, row.calls, row.codes)


def assert_call(server: InProcess, calls: Sequence[Call], codes: frozenset[int]) -> None:
    """Check the calls beside running neighbours, and on an idle server."""
    for at, neighbours in ((5, 2), (0, 0)):
        for answer in scenes.beside(
            server, [scenes.running(call, at) for call in calls], neighbours, patience=PATIENCE_S
        ):
            assert answer.code in codes, f"status {answer.code} {answer.message} {answer.error}"
    scenes.beside(server, [])
