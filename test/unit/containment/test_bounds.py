"""Legal values of request fields, and their costs, field by field."""

from __future__ import annotations

import re
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from fluxion_sglang.sglang.containment import bounds, budgets

VOCABULARY = 100


def request(**fields: Any) -> Any:
    params: dict[str, Any] = dict.fromkeys(
        bound.path.partition(".")[2] for bound in bounds.of_model(VOCABULARY) if "." in bound.path
    )
    params |= fields.pop("params", {})
    plain = {"token_ids_logprob": None, "top_logprobs_num": 0, "logprob_start_len": -1, "return_logprob": False}
    return SimpleNamespace(**plain | {"input_ids": range(10)} | fields, sampling_params=SimpleNamespace(**params))


def problems(**fields: Any) -> list[str]:
    return list(bounds.problems(request(**fields), bounds.of_model(VOCABULARY)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_logprobs_num": VOCABULARY, "return_logprob": True, "logprob_start_len": 0},
        {"token_ids_logprob": [0, VOCABULARY - 1]},
        {"logprob_start_len": 7},
        {"params": {"stop_token_ids": {0, 99}}},
        {"params": {"logit_bias": {"3": -100.0, "4": 1e30}}},
        {"params": {"repetition_penalty": 1e-6}},
        {"params": {"n": 128, "stream_interval": 1}},
        {"params": {"regex": "a" * bounds.GRAMMAR_BYTES}},
    ],
)
def test_legal_values_pass(fields: Any) -> None:
    assert problems(**fields) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_logprobs_num": VOCABULARY + 1}, "top_logprobs_num is 101, but takes numbers from 0 to 100."),
        ({"top_logprobs_num": -1}, "top_logprobs_num is -1"),
        ({"token_ids_logprob": [VOCABULARY]}, "takes tokens from 0 to 99."),
        ({"logprob_start_len": -2}, "takes -1 or a position"),
        ({"params": {"stop_token_ids": {-1}}}, "stop_token_ids is {-1}, but takes tokens"),
        ({"params": {"logit_bias": {"3": float("nan")}}}, "logit_bias is"),
        ({"params": {"logit_bias": {"3": 3e38}}}, "takes biases from"),
        ({"params": {"repetition_penalty": 1e-36}}, "repetition_penalty is 1e-36"),
        ({"params": {"n": 0}}, "n is 0, but takes numbers from 1 to 128."),
        ({"params": {"json_schema": "é" * (bounds.GRAMMAR_BYTES // 2 + 1)}}, "takes at most 65536 bytes."),
        (
            {"input_ids": range(20_000), "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 51},
            "logprobs of 51 tokens at 20000 positions of the prompt are more than 1000000",
        ),
    ],
)
def test_others_get_a_sentence(fields: Any, words: str) -> None:
    (sentence,) = problems(**fields)
    assert words in sentence and sentence.endswith(".") and len(sentence) < 250


@pytest.mark.parametrize(
    ("embeds", "fine"),
    [
        ([[0.5, 1]], True), ([[0.5, 1], [2.0, 3.0]], True), ([], False), ("text", False), ([[0.5]], False),
        ([[0.5, 1], [2.0]], False), ([0.5, 1], False), ([[0.5, float("inf")]], False), ([[0.5, None]], False),
    ],
)  # fmt: skip
def test_embeddings(embeds: Any, fine: bool) -> None:
    assert (bounds.embedding_problem(embeds, 2) is None) == fine


@pytest.mark.parametrize("pattern", ["abc", r"\d{3}", "a+", "(ab)*c", "[ab]+", "(?:a|b)*", "(a|bc)d", "^$"])
def test_patterns_with_a_bound(pattern: str) -> None:
    assert budgets.has_a_bound(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(.+)+z", "(a|aa)+", "(a|ab)*$", r"(\w+\s?)+!!", ".*.*x", "(a*)*", "(?:a?){70}", r"(a)(\1)*b",
        "(?:(?:a|aa){1,50})b", "a{0,60}a{0,60}b", "(a*?)+",
    ],
)  # fmt: skip
def test_patterns_without(pattern: str) -> None:
    assert not budgets.has_a_bound(pattern)


def test_a_search_has_a_time_limit() -> None:
    assert budgets.StopRegex.search("b+", "aabb") and not budgets.StopRegex.search("c", "aabb")
    with pytest.raises(re.error, match=r"took longer than 0\.1 s"):
        budgets.StopRegex.search("(a|aa)+$", "a" * 60 + "b")
    with pytest.raises(re.error):
        budgets.StopRegex.search("(", "")


def test_a_grammar_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, wrapper = SimpleNamespace(), SimpleNamespace()
    clock = iter([0.0, 0.4, 1.0, 1.7])
    grammars = [type("Grammar", (), {})() for _ in range(2)]
    grammar, other = grammars
    wrapper = type("Wrapper", (), {"grammar": grammar})()
    monkeypatch.setattr(budgets.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(budgets, "_spent", weakref.WeakKeyDictionary())

    def requests() -> list[Any]:
        made = [SimpleNamespace(grammar=each, to_finish=None) for each in (None, other, grammar, wrapper)]
        return [*made, SimpleNamespace(grammar=grammar, to_finish="ends")]

    budgets.accept_token(lambda grammar, token: None, grammar, 3)
    assert list(budgets.overspent(requests())) == []
    with pytest.raises(ValueError):
        budgets.accept_token(lambda grammar, token: int("no"), grammar, 3)
    places = dict(budgets.overspent(requests()))
    assert list(places) == [2, 3] and all("took longer than 1 s" in why for why in places.values())


def test_as_many_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "GRAMMARS", 2)
    backend = SimpleNamespace(cache={"a": 1})

    def original(backend: Any, key: str, value: int) -> None:
        backend.cache[key] = value

    for key in "bcd":
        budgets.set_cache(original, backend, key, 2)
    assert list(backend.cache) == ["c", "d"]
