"""Prompts that no model can take are refused where they are tokenized, before they reach the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxion_sglang.sglang.prompts import validate_one_request

VOCABULARY = 100


def asked(ids: Any, **fields: Any) -> list[Any]:
    """The calls that SGLang's own check got."""
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCABULARY))
    fields = {"session_params": None, "session_id": None, "input_embeds": None} | fields
    calls: list[Any] = []
    validate_one_request(lambda *args: calls.append(args), manager, SimpleNamespace(**fields), ids)
    return calls


def refusal(ids: Any, **fields: Any) -> str:
    with pytest.raises(ValueError) as error:
        asked(ids, **fields)
    sentence = str(error.value)
    assert sentence.endswith(".") and "\n" not in sentence and len(sentence) < 300
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
