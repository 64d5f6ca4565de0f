"""Prompts that no model accepts, and unknown policies, are refused before they reach the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fluxion_sglang.sglang.containment import door
from fluxion_sglang.sglang.containment.door import validate_one_request
from fluxion_sglang.sglang.start.options import options_of

VOCABULARY = 100


def asked(ids: Any, **fields: Any) -> list[Any]:
    """Calls that reach SGLang's own check."""
    server = SimpleNamespace(fluxion_config=fields.pop("config", None), enable_metrics=fields.pop("metrics", False))
    manager = SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=VOCABULARY, hidden_size=1, dtype=torch.bfloat16), server_args=server
    )
    fields = {"session_params": None, "session_id": None, "input_embeds": None, "sampling_params": None} | fields
    calls: list[Any] = []
    validate_one_request(lambda *args: calls.append(args), manager, SimpleNamespace(**fields), ids)
    return calls


def refusal(ids: Any, **fields: Any) -> str:
    with pytest.raises(ValueError) as error:
        asked(ids, **fields)
    sentence = str(error.value)
    assert sentence.endswith(".") and "\n" not in sentence and len(sentence) < 700
    return sentence


def test_a_prompt_needs_a_token() -> None:
    assert "no tokens" in refusal([])
    assert "no tokens" in refusal([], session_params={"id": None})


def test_a_session_may_have_the_prompt_already() -> None:
    assert len(asked([], session_params={"id": "mine"})) == 1


def test_a_prompt_of_embeddings_has_no_tokens() -> None:
    assert len(asked(None, input_embeds=[[0.5]])) == 1


@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=1))
def test_tokens_of_the_vocabulary_pass(ids: list[int]) -> None:
    ((_, _, seen),) = asked(ids)
    assert seen is ids


@given(
    st.lists(st.integers(0, VOCABULARY - 1)),
    st.one_of(st.integers(-(2**63), -1), st.integers(VOCABULARY, 2**63 - 1)),
    st.lists(st.integers(0, VOCABULARY - 1)),
)
def test_another_token_is_named(before: list[int], wrong: int, after: list[int]) -> None:
    sentence = refusal([*before, wrong, *after])
    assert "from 0 to 99" in sentence and str(wrong) in sentence
    assert refusal([*before, wrong, *after], session_params={"id": "mine"}) == sentence


def test_sglang_is_asked_first() -> None:
    def original(*_: Any) -> None:
        raise ValueError("too long")

    with pytest.raises(ValueError, match="too long"):
        validate_one_request(original, SimpleNamespace(), SimpleNamespace(), [])


def of_policy(spec: object) -> dict[str, object]:
    return {"custom_params": {"fluxion_policy": spec}}


@pytest.mark.parametrize(
    ("spec", "config", "words"),
    [
        ("ful", None, "policy 'ful' is not one"),
        (":" * 8_000_000, None, "policy ':::"),
        (3, None, "fluxion_policy is 3, but it takes a policy spec"),
        (["full"], None, "fluxion_policy is a JSON list"),
        ("oracle:0.1", None, "it reads everything to decide"),
        ("streaming", '{"request_policies": false}', "not taken by this server"),
        ("streaming", '{"request_policies": ["hgca"], "policy": "full"}', 'not one that this server takes; use "hgca"'),
    ],
)
def test_a_policy_that_no_server_like_this_takes_costs_no_pass(spec: Any, config: str | None, words: str) -> None:
    assert words in refusal([1], sampling_params=of_policy(spec), config=config)


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (None, None),
        ("hgca:0.5", None),
        ("fluxion", None),  # only the scheduler's process knows whether there is a predictor
        ("full", '{"request_policies": false}'),
        ("fluxion", '{"request_policies": ["hgca"]}'),
        ("oracle:0.1", '{"policy": "oracle:0.1"}'),
        ("streaming", '{"request_policies": ["streaming"]}'),
    ],
)
def test_a_policy_that_the_server_may_take_goes_on(spec: Any, config: str | None) -> None:
    assert len(asked([1], sampling_params=of_policy(spec), config=config)) == 1


@pytest.mark.parametrize("params", [None, {}, {"custom_params": None}, {"custom_params": "full"}, "full", [{}]])
def test_a_request_need_not_name_one(params: Any) -> None:
    assert len(asked([1], sampling_params=params)) == 1


def test_what_a_policy_raises_is_the_scheduler_s_to_contain(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(spec: str) -> None:
        raise OSError("its file is gone")

    monkeypatch.setattr(door.asked, "check_spec", broken)
    assert len(asked([1], sampling_params=of_policy("theirs:1"))) == 1


def test_options_that_cannot_be_read_any_more_refuse_nobody() -> None:
    options_of(SimpleNamespace(fluxion_config=None), again=True)
    assert len(asked([1], sampling_params=of_policy("full"), config="@/nowhere/options.json")) == 1


def test_refused_specs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[None] = []
    monkeypatch.setattr(door.metrics, "count_refused_spec", lambda: counted.append(None))
    refusal([1], sampling_params=of_policy("ful"))
    assert counted == []
    refusal([1], sampling_params=of_policy("ful"), metrics=True)
    refusal([], metrics=True)
    assert counted == [None]
