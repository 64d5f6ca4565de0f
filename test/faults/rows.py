"""Requests known to end an SGLang server or to block all others, and the statuses that each may get."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from faults import scenes
from faults.inprocess import POOL
from faults.wire import Call

REFUSED = frozenset({400, 413, 422})
FAILED = REFUSED | {500, 501, 503}
ANSWERED = REFUSED | {200}
"""Either is right: the value is accepted (a lowered bound), or it is refused."""
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
    """One row per call, named by its route."""
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
    *(generate(f"{kind} for a language model", **{kind: "data:,x"}) for kind in ("image_data", "audio_data")),
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


QUICK = {
    "repetition_penalty", r"stop_regex (.*)*$x", "top_k", "logprob_start_len -7", "logprobs 600 /v1/chat/completions",
    "logit_bias -1e39 of all", "min_new_tokens -1", "session_params a list as name", "positional_embed_overrides 5",
    "embed overrides", "vertex regex", "vertex plain", "ollama num_predict a float", "a prompt of 4080",
    "a prompt of 4089", "n /generate", "n 3", "regex slow to accept", "logprobs of everything",
    "rid of the health check", "no JSON", "image_data for a language model",
}  # fmt: skip
"""Rows of `ROWS` in the quick tests; the others need --full."""
