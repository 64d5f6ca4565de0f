"""Odd request bodies: one to three fields of a short legal body get values at or beyond their limits.

Fields and their types come from SGLang: the schemas of its HTTP application, and its `SamplingParams`. Values are legal
ones, boundary values, or of another type. Body `index` of a seed depends only on these two numbers.
"""

from __future__ import annotations

import copy
import functools
import random
import warnings
from collections.abc import Callable
from typing import Any, get_type_hints

from faults.wire import Call

SESSION = "@session"
"""Placeholder for the name of an open session."""

VOCABULARY = 512
Json = Any
Schema = dict[str, Any]
Rng = random.Random

INTEGERS = [
    -1, 0, 1, 2, 3, -2, -7, 7, 31, 63, 64, 128, VOCABULARY - 1, VOCABULARY, 4096, 99999, 2**31 - 1, 2**31, -(2**31),
    2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**70,
]  # fmt: skip
NUMBERS = [
    0.0, -0.0, 1.0, 0.5, 0.9, 2.0, -1.0, 5.0, 1e-40, 1e-7, 1.1e-6, 1e-6, 1e30, 3e38, -3e38, 1e39, 1e308, 5e-324, 1.5,
    float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
STRINGS = [
    "", "w1", "w1 w2", "x", "0", "none", "\x00", "\ud800", "\u00e9", "\U0001d54f", "a" * 300, "{}", "[]",
    "HEALTH_CHECK_x", "a", "1", "(.+)+zzzz", "((((", "127.0.0.1", "/", "None", "auto", "required",
]  # fmt: skip

HINTS: dict[str, list[Json]] = {
    "logit_bias": [
        {"300": 1.0}, {"511": -100}, {"512": 1}, {"300": 1e39}, {"300": 3e38}, {"-1": 1}, {"w1": 1}, {"300": None},
        {str(token): -1e39 for token in range(VOCABULARY)}, {str(2**63): 1}, {"3e2": 1}, {" 300": 5},
    ],
    "stop_token_ids": [[300], [511], [512], [-1], [99999], [2**63], [[300]], [None], [3.0], [True], []],
    "stop": [["w1"], "w2", ["w" * 5, "w1"], ["\ud800"], ["", "w1"], [""], ["w1"] * 33],
    "stop_regex": ["w1|w2", "(.+)+zzzz", r"(\w+\s?)+!!", ["w.*"], "(", "a{1,9999}", r"(w1)\1", "(?=w)", ""],
    "regex": ["(w1|w2)+", "w1", "((w1|w1w1)*)*c", "(", "a{1000}", ".*", "", r"\d+", "(?=w)"],
    "ebnf": ['root ::= "w1" | "w2"', "root ::= root", "root ::=", 'root ::= ("w1")* root', ""],
    "json_schema": [
        '{"type":"object"}', '{"type":"string","pattern":"(a|aa)+"}', "{", "{}", '{"$ref":"#"}', "null", "$$ANY$$",
    ],
    "structural_tag": ["{}", '{"type":"structural_tag","structures":[],"triggers":[]}'],
    "choice": [["w1", "w2"], [""], []],
    "custom_params": [
        {"fluxion_policy": "full"}, {"fluxion_policy": "lfps"}, {"fluxion_policy": 3}, {"fluxion_check": True}, {},
        {"fluxion_record": {"id": 0, "samples": [[0, [1]]]}}, {"fluxion_check": "x"}, {"a": [1]}, {"a": {"b": [1]}},
        {"__sglang_reasoning_end_token_ids": [300]}, {"__sglang_reasoning_in_grammar": True},
    ],
    "token_ids_logprob": [[300], [0, 511], [512], [-1], [[300]], []],
    "top_logprobs_num": [0, 1, 5, 20, 511, 512, 513, 600, [5], -1],
    "logprob_start_len": [-1, 0, 1, 5, 9, 10, 11, -7, [0], 10**9],
    "top_logprobs": [0, 5, 20, 21, 512, 600, -1],
    "session_params": [
        {"id": SESSION}, {"id": SESSION, "replace": True}, {"id": SESSION, "rid": "a"}, {"id": SESSION, "offset": -1},
        {"id": SESSION, "rid": [1]}, {"id": [1]}, {"id": "none"}, {}, {"id": SESSION, "offset": 3, "rid": "a"},
        {"id": SESSION, "drop_previous_output": True}, {"id": None}, {"rid": "a"},
    ],
    "session_id": [SESSION, "none", ""],
    "rid": ["a", "b1", "HEALTH_CHECK_x", "", ["a", "a"], ["x1"], [1]],
    "positional_embed_overrides": [5, {"embeds": [[0.1] * 256], "positions": [1]}, {"embeds": [], "positions": []}, []],
    "input_embeds": [[[0.1] * 256] * 3, [[0.1, 0.2]], [[0.1] * 256, [0.1]], [[[0.1] * 256] * 2], [[]], [[None] * 256]],
    "custom_labels": [{"a": "b"}, {}, {"a": 1}],
    "custom_logit_processor": ["x", "{}", '{"callable": "00"}'],
    "response_format": [
        {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "structural_tag", "structures": [], "triggers": []},
    ],
    "tools": [[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], [{}], []],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "query_embed_overrides": [[[0.1, 0.2]], [[0.1] * 256], [[]], [[0.1] * 256] * 3],
    "embed_override_token_id": [300, 512, -1],
    "label_token_ids": [[300], [512], [-1], []],
    "n": [1, 2, 3, 0, -1, 129, 10**6, 10**9],
    "top_k": [1, 5, 511, 512, 513, -1, 0, 3_000_000_000, 2**31, 2**63],
    "beam_width": [1, 2, 0, -1],
    "lora_id": ["x", ["x"], ""],
    "stream": [True, False, "yes", 1],
    "temperature": [0, 1, 0.5, 1e-6, 1.1e-6, 1e-40, 1e38, -1],
    "min_new_tokens": [1, 2, 8, 9, -1],
    "stream_interval": [1, 2, 0, -1, "5"],
    "seed": [0, 1, -1, 2**63, 2**64, 2**70, 1.5],
    "sampling_seed": [0, 1, -1, 2**31, 2**63, 2**64],
}  # fmt: skip
"""Values that reach deep code or are known to cause trouble, by field name."""

COMPANIONS: dict[str, dict[str, Json]] = {
    "top_logprobs_num": {"return_logprob": True},
    "logprob_start_len": {"return_logprob": True},
    "token_ids_logprob": {"return_logprob": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
    "query_embed_overrides": {"embed_override_token_id": 300},
}
"""Fields without which the key has no effect."""

SLOW = ("max_new_tokens", "max_tokens", "max_completion_tokens", "num_predict", "max_output_tokens")
"""Fields that are rarely odd: a long answer is legal, and takes time."""

KEPT = ("abort_all",)
"""Fields that keep their values: their purpose is to end all requests."""

_WORDS = ["w1 w2 w3", "w5", "K k1 k2 v1 v2 v3 ; Q k1 k2", "w7 w9 w11 w13 w20 w31"]
_MESSAGES = [{"role": "user", "content": "w1 w2"}]


@functools.cache
def schemas() -> tuple[dict[str, Schema], dict[str, Schema]]:
    """Body schemas by path, and definitions, of SGLang's HTTP application."""
    from sglang.srt.entrypoints.http_server import app

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        described = app.openapi()
    paths: dict[str, Schema] = {}
    for path, operations in described["paths"].items():
        for operation in operations.values():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content:
                paths[path] = content["schema"]
    return paths, described["components"]["schemas"]


@functools.cache
def sampling_fields() -> dict[str, Schema]:
    """Schemas of the fields of SGLang's SamplingParams, including internal ones, and of the fields that its gate
    accepts."""
    from pydantic import TypeAdapter
    from sglang.api.v1 import api_types
    from sglang.srt.sampling.sampling_params import SamplingParams

    found: dict[str, Schema] = {}
    for name, hint in {**get_type_hints(api_types.SamplingParams), **get_type_hints(SamplingParams)}.items():
        try:
            found[name] = TypeAdapter(hint).json_schema()
        except Exception:  # a type without schema takes anything
            found[name] = {}
    return found


def fields_of(path: str) -> dict[str, Schema]:
    paths, definitions = schemas()
    return dict(_resolved(paths[path], definitions).get("properties", {}))


def _resolved(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    while "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    return schema


def value(rng: Rng, schema: Schema, depth: int = 0) -> Json:
    """A value of a schema, legal or at a boundary."""
    schema = _resolved(schema, schemas()[1])
    if options := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return value(rng, rng.choice(options), depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    match schema.get("type"):
        case "integer":
            return rng.randint(0, 8) if rng.random() < 0.4 else rng.choice(INTEGERS)
        case "number":
            return rng.choice([rng.choice(NUMBERS[:8]), rng.choice(NUMBERS), rng.choice(INTEGERS), rng.random()])
        case "string":
            return rng.choice(STRINGS)
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case "array":
            return [value(rng, schema.get("items", {}), depth + 1) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
        case "object":
            properties = schema.get("properties", {})
            wanted = {name for name in properties if name in schema.get("required", ()) or rng.random() < 0.2}
            if depth > 3:
                wanted &= set(schema.get("required", ()))
            found = {name: value(rng, properties[name], depth + 1) for name in sorted(wanted)}
            if not properties and depth < 3:
                found = {rng.choice(STRINGS): anything(rng, depth + 1) for _ in range(rng.randint(0, 2))}
            return found
    return anything(rng, depth)


def anything(rng: Rng, depth: int = 0) -> Json:
    """A value of any type."""
    kind = rng.randrange(6 if depth > 2 else 9)
    if kind < 2:
        return rng.choice(INTEGERS)
    if kind == 2:
        return rng.choice(NUMBERS)
    if kind == 3:
        return rng.choice(STRINGS)
    if kind < 6:
        return rng.choice([None, True, False, [], {}])
    if kind == 6:
        return {rng.choice(STRINGS): anything(rng, depth + 1) for _ in range(rng.randint(0, 3))}
    return [anything(rng, depth + 1) for _ in range(rng.randint(0, 3))]


def _odd(rng: Rng, name: str, schema: Schema) -> Json:
    """A value for a field of this name and schema."""
    chance = rng.random()
    if name in HINTS and chance < 0.6:
        return copy.deepcopy(rng.choice(HINTS[name]))
    if chance < 0.85:
        return value(rng, schema)
    return anything(rng)


def _spoil(rng: Rng, body: dict[str, Json], fields: dict[str, Schema], count: int) -> None:
    """Give `count` fields of a body odd values."""
    names = sorted(fields.keys() - set(KEPT))
    weights = [0.05 if name in SLOW else 3.0 if name in HINTS else 1.0 for name in names]
    for name in rng.choices(names, weights, k=count):
        body[name] = _odd(rng, name, fields[name])
        if rng.random() < 0.8:
            body.update(copy.deepcopy(COMPANIONS.get(name, {})))


def _sampling(rng: Rng, odd: int) -> dict[str, Json]:
    params: dict[str, Json] = {"max_new_tokens": rng.randint(1, 8)}
    if rng.random() < 0.5:
        params["temperature"] = 0
    if rng.random() < 0.3:
        params |= {"top_p": 0.9, "top_k": rng.choice([1, 5, 100])}
    if rng.random() < 0.3:
        params["ignore_eos"] = True
    _spoil(rng, params, sampling_fields(), odd)
    return params


def _prompt(rng: Rng) -> dict[str, Json]:
    ids = [1, *(rng.randint(208, 511) for _ in range(rng.choice([1, 4, 9, 9, 9, 40, 130])))]
    chance = rng.random()
    if chance < 0.5:
        return {"input_ids": ids}
    if chance < 0.8:
        return {"text": rng.choice(_WORDS)}
    if chance < 0.9:
        return {"text": rng.sample(_WORDS, rng.randint(1, 3))}
    if chance < 0.93:
        return {"input_ids": [ids, ids[:3]]}
    if chance < 0.95:
        return {"input_ids": [*ids[:3], rng.choice(INTEGERS)]}
    if chance < 0.97:
        return {"input_ids": [1] * rng.choice([300, 490, 511, 512, 700, 752, 760, 767, 768])}
    return {"input_embeds": copy.deepcopy(rng.choice(HINTS["input_embeds"]))}


def _generate(rng: Rng, fields: dict[str, Schema]) -> dict[str, Json]:
    """A body for /generate; most odd fields are sampling parameters."""
    odd = rng.choice([1, 1, 1, 2, 2, 3])
    inner = sum(rng.random() < 0.6 for _ in range(odd))
    body = {**_prompt(rng), "sampling_params": _sampling(rng, inner)}
    if rng.random() < 0.3:
        body["stream"] = True
    if rng.random() < 0.1:
        body |= {"session_params": {"id": SESSION}, "rid": rng.choice("abcdefgh") + "0"}
    _spoil(rng, body, {name: schema for name, schema in fields.items() if name != "sampling_params"}, odd - inner)
    if rng.random() < 0.02:
        body["sampling_params"] = anything(rng)
    return body


def _vertex(rng: Rng) -> dict[str, Json]:
    body = _generate(rng, fields_of("/generate"))
    prompt = {name: body.pop(name) for name in ("text", "input_ids", "input_embeds") if name in body}
    return {"instances": [prompt] if rng.random() < 0.9 else anything(rng), "parameters": body}


OLLAMA_OPTIONS = [
    "temperature", "top_p", "top_k", "num_predict", "stop", "presence_penalty", "frequency_penalty", "seed",
]  # fmt: skip


def _ollama(rng: Rng, prompt: dict[str, Json], fields: dict[str, Schema]) -> dict[str, Json]:
    options: dict[str, Json] = {"num_predict": rng.randint(1, 8)}
    for name in rng.sample(OLLAMA_OPTIONS, rng.choice([1, 1, 2])):
        if name != "num_predict":
            options[name] = _odd(rng, name, sampling_fields().get(name, {"type": "number"}))
        elif rng.random() < 0.5:
            options[name] = rng.choice([8.0, 1.5, "8", -1, 0, [1], True])
    body = {"model": "needle", "stream": rng.random() < 0.3, "options": options, **prompt}
    if rng.random() < 0.2:
        _spoil(rng, body, fields, 1)
    return body


def _openai(base: dict[str, Json], limit: str) -> Callable[[Rng, dict[str, Schema]], dict[str, Json]]:
    """Bodies of an OpenAI-like route: `base` with odd fields. `limit` is the field for the length of the answer."""

    def make(rng: Rng, fields: dict[str, Schema]) -> dict[str, Json]:
        body = {"model": "needle", **copy.deepcopy(base)}
        if limit:
            body[limit] = rng.randint(1, 8)
        if rng.random() < 0.3:
            body["temperature"] = 0
        if "stream" in fields and rng.random() < 0.3:
            body["stream"] = True
        _spoil(rng, body, fields, rng.choice([1, 1, 1, 2, 2, 3]))
        return body

    return make


_SHAPES: dict[str, tuple[int, Callable[[Rng, dict[str, Schema]], dict[str, Json]]]] = {
    "/generate": (40, _generate),
    "/v1/completions": (12, _openai({"prompt": "w1 w2 w3"}, "max_tokens")),
    "/v1/chat/completions": (12, _openai({"messages": _MESSAGES}, "max_tokens")),
    "/v1/messages": (5, _openai({"messages": _MESSAGES}, "max_tokens")),
    "/v1/responses": (2, _openai({"input": "w1 w2"}, "max_output_tokens")),
    "/vertex_generate": (10, lambda rng, fields: _vertex(rng)),
    "/api/generate": (5, lambda rng, fields: _ollama(rng, {"prompt": "w1 w2"}, fields)),
    "/api/chat": (4, lambda rng, fields: _ollama(rng, {"messages": _MESSAGES}, fields)),
    "/v1/score": (4, _openai({"query": [1, 300], "items": [[301]], "label_token_ids": [300]}, "")),
    "/v1/rerank": (1, _openai({"query": "w1", "documents": ["w2", "w3"]}, "")),
    "/v1/embeddings": (1, _openai({"input": "w1"}, "")),
    "/v1/classify": (1, _openai({"input": "w1"}, "")),
    "/v1/tokenize": (1, _openai({"prompt": "w1"}, "")),
    "/v1/detokenize": (1, _openai({"tokens": [1, 300]}, "")),
    "/v1/messages/count_tokens": (1, _openai({"messages": _MESSAGES}, "")),
    "/encode": (1, _openai({"text": "w1"}, "")),
    "/abort_request": (1, _openai({"rid": "a", "abort_all": False}, "")),
    "/open_session": (1, _openai({"capacity_of_str_len": 1000}, "")),
}
"""By path: approximate number among a hundred bodies, and how to make them."""

ROUTES = tuple(_SHAPES)


def call(seed: int, index: int, routes: tuple[str, ...] = ROUTES) -> Call:
    """Body `index` of a seed, as a call. Some clients hang up early."""
    rng = random.Random(f"{seed}:{index}")
    path = rng.choices(routes, [_SHAPES[route][0] for route in routes])[0]
    body = _SHAPES[path][1](rng, fields_of(path))
    leaves = rng.randint(0, 40) if rng.random() < 0.05 else None
    return Call(body, path, at=rng.choice([0, 0, 1, 3, 6, 12, 20]), hang_up=leaves)


def with_session(body: Json, name: str) -> Json:
    """The body with `SESSION` replaced by a session's name."""
    if isinstance(body, dict):
        return {key: with_session(item, name) for key, item in body.items()}
    if isinstance(body, list):
        return [with_session(item, name) for item in body]
    return name if isinstance(body, str) and body == SESSION else body
