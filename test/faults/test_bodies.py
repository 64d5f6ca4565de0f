"""Requests that are known to end an SGLang server, or to stop everybody else: each costs its sender alone.

Two neighbours, of which one streams, run beside each of them and get the tokens that they get alone; the request gets
one answer; nothing is lost afterwards. Legal requests are answered as such.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from faults import scenes
from faults.inprocess import NEEDLE, POOL, Answer, Call, Child, InProcess

REFUSED = frozenset({400, 413, 422})
FAILED = REFUSED | {500, 501, 503}
ANSWERED = REFUSED | {200}
"""Right either way: the value means something (a bound that is lowered), or it is refused."""
FINE = frozenset({200})

IDS = [1, *range(300, 309)]
CHAT = [{"role": "user", "content": "w1 w2 w3"}]
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Row:
    """Requests that are sent together, and the statuses that each may get."""

    name: str
    calls: tuple[Call, ...]
    codes: frozenset[int] = REFUSED
    marks: tuple[pytest.MarkDecorator, ...] = field(default=())


def body(params: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    prompt = {} if extra.keys() & {"text", "input_ids", "input_embeds"} else {"input_ids": IDS}
    return {**prompt, "sampling_params": {"max_new_tokens": 4, **(params or {})}, **extra}


def generate(name: str, params: dict[str, Any] | None = None, codes: frozenset[int] = REFUSED, **extra: Any) -> Row:
    return Row(name, (Call(body(params, **extra)),), codes)


def completion(**extra: Any) -> Call:
    return Call({"model": "needle", "prompt": "w1 w2 w3", "max_tokens": 4, **extra}, "/v1/completions")


def chat(**extra: Any) -> Call:
    return Call({"model": "needle", "messages": CHAT, "max_tokens": 4, **extra}, "/v1/chat/completions")


def messages(**extra: Any) -> Call:
    return Call({"model": "needle", "messages": CHAT, "max_tokens": 4, **extra}, "/v1/messages")


def ollama(**options: Any) -> Call:
    return Call(
        {"model": "needle", "prompt": "w1 w2", "stream": False, "options": {"num_predict": 4, **options}},
        "/api/generate",
    )


def ollama_chat(**options: Any) -> Call:
    return Call(
        {"model": "needle", "messages": CHAT, "stream": False, "options": {"num_predict": 4, **options}}, "/api/chat"
    )


def vertex(params: dict[str, Any] | None = None, **parameters: Any) -> Call:
    parameters["sampling_params"] = {"max_new_tokens": 4, **(params or {})}
    return Call({"instances": [{"text": "w1 w2"}], "parameters": parameters}, "/vertex_generate")


def logprobs(length: int) -> dict[str, Any]:
    """Log probabilities of every token of a prompt."""
    return {"return_logprob": True, "logprob_start_len": 0, "input_ids": scenes.words(7, length)}


def raw(text: str, path: str = "/generate") -> Call:
    return Call(path=path, raw=text.encode())


def score(**extra: Any) -> Call:
    return Call(
        {"model": "needle", "query": [1, 300], "items": [[301]], "label_token_ids": [300], **extra}, "/v1/score"
    )


def routes(name: str, codes: frozenset[int], *calls: Call) -> list[Row]:
    """One row of each call, named by its route."""
    return [Row(f"{name} {call.path}", (call,), codes) for call in calls]


SLOW_REGEX = ("(.+)+zzzz", "(.*)*$x", r"(\w+\s?)+!!")
EVERY_BIAS = {str(token): -1e39 for token in range(512)}
LONG_PATTERN = "^(" + "|".join("a" * n for n in range(1, 801)) + ")+$"

ROWS: list[Row] = [
    generate("repetition_penalty", {"repetition_penalty": 1.1}, FINE, text="w1"),
    *routes(
        "repetition_penalty", FINE,
        completion(repetition_penalty=1.1), chat(repetition_penalty=1.1), vertex({"repetition_penalty": 1.1}),
    ),
    generate("repetition_penalty tiny", {"repetition_penalty": 1e-40}, ANSWERED),
    generate("every penalty", {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5}, FINE),
    *[
        generate(f"stop_regex {regex}", {"stop_regex": regex, "max_new_tokens": 40, "ignore_eos": True}, ANSWERED)
        for regex in SLOW_REGEX
    ],
    *routes(
        "stop_regex", ANSWERED,
        completion(stop_regex="(.+)+zzzz", max_tokens=40, ignore_eos=True),
        chat(stop_regex="(.+)+zzzz", max_tokens=40, ignore_eos=True),
    ),
    generate("stop_regex plain", {"stop_regex": "w1 w2"}, FINE),
    generate("top_k", {"top_k": 3_000_000_000}, ANSWERED),
    *routes(
        "top_k", ANSWERED,
        completion(top_k=3_000_000_000), chat(top_k=3_000_000_000), messages(top_k=3_000_000_000),
        ollama(top_k=3_000_000_000), ollama_chat(top_k=3_000_000_000), vertex({"top_k": 3_000_000_000}),
    ),
    generate("top_k the vocabulary", {"top_k": 512}, FINE),
    generate("logprob_start_len -7", return_logprob=True, logprob_start_len=-7, codes=ANSWERED),
    generate("logprob_start_len -1", return_logprob=True, logprob_start_len=-1, codes=FINE),
    generate("logprob_start_len beyond", return_logprob=True, logprob_start_len=11, codes=ANSWERED),
    generate("top_logprobs_num 600", return_logprob=True, top_logprobs_num=600),
    generate("top_logprobs_num -1", return_logprob=True, top_logprobs_num=-1),
    generate("top_logprobs_num 2", return_logprob=True, top_logprobs_num=2, codes=FINE),
    *routes("logprobs 600", REFUSED, completion(logprobs=600), chat(logprobs=True, top_logprobs=600)),
    generate("token_ids_logprob", return_logprob=True, token_ids_logprob=[512]),
    generate("token_ids_logprob negative", return_logprob=True, token_ids_logprob=[-513]),
    generate("logit_bias 1e39", {"logit_bias": {"300": 1e39}, "top_p": 0.9}, ANSWERED),
    generate("logit_bias 3e38", {"logit_bias": {"300": 3e38}, "top_p": 0.9, "temperature": 0.5}, ANSWERED),
    generate("logit_bias 1e34", {"logit_bias": {"300": 1e34}, "top_p": 0.9, "temperature": 1.1e-6}, ANSWERED),
    generate("logit_bias -1e39 of all", {"logit_bias": EVERY_BIAS, "top_p": 0.9}, ANSWERED),
    generate("logit_bias -1e39 and min_p", {"logit_bias": EVERY_BIAS, "min_p": 0.1}, ANSWERED),
    generate("logit_bias of no token", {"logit_bias": {"512": 1.0}}),
    generate("logit_bias of a word", {"logit_bias": {"w1": 1.0}}),
    Row("logit_bias NaN", (raw('{"text":"w1","sampling_params":{"logit_bias":{"300":NaN},"top_p":0.9}}'),)),
    *routes(
        "logit_bias 1e39", ANSWERED,
        completion(logit_bias={"300": 1e39}, top_p=0.9), chat(logit_bias={"300": 1e39}, top_p=0.9),
        vertex({"logit_bias": {"300": 1e39}, "top_p": 0.9}),
    ),
    generate("temperature tiny", {"temperature": 1e-40, "top_p": 0.9}, ANSWERED),
    generate("temperature huge", {"temperature": 1e38, "top_p": 0.9}, ANSWERED),
    *[
        generate(f"min_new_tokens {token}", {"min_new_tokens": 2, "stop_token_ids": [token]})
        for token in (99999, -1, 2**63)
    ],
    generate("min_new_tokens", {"min_new_tokens": 2, "stop_token_ids": [300]}, FINE),
    generate("min_new_tokens 512", {"min_new_tokens": 2, "stop_token_ids": [512]}),
    generate("top_logprobs_num a list", return_logprob=True, top_logprobs_num=[5], codes=ANSWERED),
    generate("logprob_start_len a list", return_logprob=True, logprob_start_len=[0], codes=ANSWERED),
    generate("token_ids_logprob nested", return_logprob=True, token_ids_logprob=[[300]], codes=ANSWERED),
    generate("lora_id a list", lora_id=["x"], codes=ANSWERED),
    generate("lora_id", lora_id="zzz", codes=ANSWERED),
    generate("session_params a list as name", session_params={"id": [1]}),
    *routes("session_params", ANSWERED, completion(session_params={"id": [1]}), chat(session_params={"id": {}})),
    generate("session_params of no session", session_params={"id": "none"}),
    generate("session_params empty", session_params={}, codes=ANSWERED),
    generate("session_params offset a word", session_params={"id": "none", "offset": "x", "rid": [1]}),
    generate("positional_embed_overrides 5", positional_embed_overrides=5),
    generate("positional_embed_overrides an object", positional_embed_overrides={"embeds": [[0.1]], "positions": [99]}),
    Row("embed overrides", (score(embed_override_token_id=300, query_embed_overrides=[[0.1, 0.2]]),)),
    Row("embed overrides ragged", (score(embed_override_token_id=300, query_embed_overrides=[[0.1] * 256, [0.1]]),)),
    Row("embed overrides legal", (score(embed_override_token_id=300, query_embed_overrides=[[0.1] * 256]),), ANSWERED),
    Row("score", (score(),), FINE),
    *[
        Row(f"vertex {name}", (call,), codes)
        for name, call, codes in [
            ("json_schema", vertex({"json_schema": {"type": "object"}}), ANSWERED),
            ("regex", vertex({"regex": ["a", "b"]}), REFUSED),
            ("logit_bias a list", vertex({"logit_bias": [1, 2]}), REFUSED),
            ("logit_bias a word", vertex({"logit_bias": {"300": "x"}}), REFUSED),
            ("skip_special_tokens", vertex({"skip_special_tokens": 0}), ANSWERED),
            ("skip_special_tokens a list", vertex({"skip_special_tokens": [1]}), REFUSED),
            ("stream_interval", vertex({"stream_interval": "5"}), REFUSED),
            ("is_normalized", vertex({"is_normalized": True, "temperature": 0}), ANSWERED),
            ("is_normalized stop", vertex({"is_normalized": True, "stop_token_ids": 5}), REFUSED),
            ("stop_strs", vertex({"stop_strs": 5, "stop_str_max_len": "x"}), ANSWERED),
            ("rid a list", vertex(rid=[5]), REFUSED),
            ("rid a number", vertex(rid=5), REFUSED),
            ("priority", vertex(priority=1.5), REFUSED),
            ("stream a word", vertex(stream="yes"), ANSWERED),
            ("plain", vertex(), FINE),
            ("max_new_tokens", vertex({"max_new_tokens": 4.5}), REFUSED),
            ("n", vertex({"n": 1.5}), REFUSED),
            ("custom_params", vertex({"custom_params": [1]}), ANSWERED),
            ("unknown", vertex(wish=1), FAILED),
        ]
    ],
    *[
        Row(f"ollama {name}", (call,), codes)
        for name, call, codes in [
            ("num_predict a float", ollama(num_predict=128.0), ANSWERED),
            ("num_predict a float, chat", ollama_chat(num_predict=128.0), ANSWERED),
            ("num_predict a fraction", ollama(num_predict=1.5), FAILED),
            ("num_predict a word", ollama(num_predict="12"), FAILED),
            ("num_predict -1", ollama(num_predict=-1), FAILED | FINE),
            ("stop", ollama(stop=5), FAILED),
            ("stop of numbers", ollama(stop=[5]), FAILED),
            ("seed", ollama(seed=2**70), FAILED | FINE),
            ("temperature", ollama(temperature="hot"), FAILED),
            ("top_k", ollama(top_k=1.5), FAILED | FINE),
            ("top_p", ollama(top_p=[0.9]), FAILED),
            ("plain", ollama(), FINE),
            ("plain, chat", ollama_chat(), FINE),
        ]
    ],
    *[
        generate(f"a prompt of {POOL - less}", codes=ANSWERED | {503}, input_ids=scenes.words(5, POOL - less - 1))
        for less in (33, 16, 12, 7, 1)
    ],
    generate("a long answer to a long prompt", {"max_new_tokens": 32000}, ANSWERED, input_ids=scenes.words(6, 4000)),
    *routes(
        "n", REFUSED,
        Call(body({"n": 1_000_000_000})), completion(n=3_000_000), chat(n=3_000_000), vertex({"n": 3_000_000}),
        Call(body({"n": 2**63})), Call(body({"n": 100_000}, text=["w1"] * 1000)),
    ),
    generate("n 3", {"n": 3}, FINE),
    generate("n 0", {"n": 0}, ANSWERED),
    generate(
        "regex slow to accept", {"regex": "((w1|w1w1|w1w1w1)*(w1|w2)*)*c", "max_new_tokens": 1200}, FAILED | FINE
    ),
    generate("regex", {"regex": "(w1|w2)+"}, FINE),
    generate("json_schema of 320 KB", {"json_schema": json.dumps({"type": "string", "pattern": LONG_PATTERN})}),
    generate("json_schema wrong", {"json_schema": "{"}, FAILED),
    generate("ebnf wrong", {"ebnf": "root ::= root"}, FAILED | FINE),
    generate("regex and json_schema", {"regex": "w1", "json_schema": "{}"}, FAILED | FINE),
    generate("logprobs of everything", top_logprobs_num=512, **logprobs(3000)),
    generate("logprobs of much", codes=FINE, top_logprobs_num=2, **logprobs(600)),
    generate("rid of the health check", rid="HEALTH_CHECK_x", codes=ANSWERED),
    generate("rid empty", rid="", codes=ANSWERED),
    Row("rid twice", (Call(body(rid="twin")), Call(body(rid="twin"))), ANSWERED),
    generate("rid of surrogates", rid="\ud800", codes=FAILED | FINE),
    generate("text of surrogates", text="w1 \ud800", codes=FAILED | FINE),
    generate("custom_labels", custom_labels={"a": "b"}, codes=ANSWERED),
    generate("custom_logit_processor", custom_logit_processor="zzz", codes=FAILED),
    generate("priority", priority=2**70, codes=ANSWERED),
    generate("input_embeds", input_embeds=[[0.1, 0.2]], codes=FAILED),
    generate("nothing", input_ids=[], codes=REFUSED),
    Row("no JSON", (raw("{"), raw("[]"), raw("null"), raw('"x"'), raw("")), FAILED),
]  # fmt: skip


def assert_row(server: InProcess, calls: Sequence[Call], codes: frozenset[int]) -> None:
    """At once with the neighbours, and while they decode."""
    for at in (0, 5):
        for answer in scenes.beside(server, [scenes.running(call, at) for call in calls], patience=PATIENCE_S):
            assert answer.code in codes, f"status {answer.code} {answer.message} {answer.error}"


QUICK = {
    "repetition_penalty", r"stop_regex (.*)*$x", "top_k", "logprob_start_len -7", "logprobs 600 /v1/chat/completions",
    "logit_bias -1e39 of all", "min_new_tokens -1", "session_params a list as name", "positional_embed_overrides 5",
    "embed overrides", "vertex regex", "vertex plain", "ollama num_predict a float", "a prompt of 4080",
    "a prompt of 4089", "n /generate", "n 3", "regex slow to accept", "logprobs of everything",
    "rid of the health check", "no JSON",
}  # fmt: skip
"""Rows of `ROWS` that the quick tests have; the others are for --full."""


def rows(*rows: Row) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", [pytest.param(row, id=row.name, marks=row.marks) for row in rows])


def test_the_rows_have_names_of_their_own() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names) - 2, "n is sent to one route three times"
    assert set(names) >= QUICK


class TestOneRequest:
    @rows(*(row if row.name in QUICK else replace(row, marks=(pytest.mark.full,)) for row in ROWS))
    def test_row(self, server: Child, row: Row) -> None:
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
    """torch.compile needs a C++ compiler, and takes seconds in which nobody gets a token."""
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
    def test_story(self, server: Child, story: Any) -> None:
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
    """A turn runs, another is refused, a third comes: the first keeps its row."""
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
    """Open sessions hold every row of the server: others are told so, or served, and none waits for ever."""
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
    def test_story(self, server: Child, story: Any) -> None:
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
    def test_row(self, server: Child, row: Row) -> None:
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
    def test_row(self, server: Child, row: Row) -> None:
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
    def test_row(self, server: Child, row: Row) -> None:
        server.run(assert_row, row.calls, row.codes)


@pytest.mark.full
class TestDrafts:
    FLAGS = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")

    @rows(*BRIEF)
    def test_row(self, server: Child, row: Row) -> None:
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
    def test_call(self, server: Child, row: Row) -> None:
        server.run(assert_call, row.calls, row.codes)


def assert_call(server: InProcess, calls: Sequence[Call], codes: frozenset[int]) -> None:
    """While neighbours run, and on an idle server."""
    for at, neighbours in ((5, 2), (0, 0)):
        for answer in scenes.beside(
            server, [scenes.running(call, at) for call in calls], neighbours, patience=PATIENCE_S
        ):
            assert answer.code in codes, f"status {answer.code} {answer.message} {answer.error}"
    scenes.beside(server, [])
