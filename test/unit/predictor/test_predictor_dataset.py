"""Training data: which lines are sequences, which steps are used, and the contents of the tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from world import World

from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.predictor.features import BUDGETS
from fluxion_sglang.training import dataset
from fluxion_sglang.training.dataset import (
    DataError,
    TokenSequence,
    choose_steps,
    encode_with,
    read_sequences,
    with_steps,
)
from fluxion_sglang.training.recorder import TAUS, Recorder, path

ROOM = 50


def letters(text: str, add_special_tokens: bool = True) -> list[int]:
    """A tokenizer that adds nothing."""
    return [ord(letter) for letter in text]


encode = encode_with(letters)


def write(folder: Path, *lines: object) -> Path:
    file = folder / "data.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def test_lines_are_sequences(tmp_path: Path) -> None:
    choices = {f"choice_{letter}": letter.lower() for letter in "ABCD"}
    file = write(
        tmp_path,
        {"text": "ab"},
        {"input_ids": [1, 2, 3], "answer_ids": [4], "task": "t"},
        "",
        {"text": "ab", "answer": "cde"},
        {"context": "x", "question": "y", **choices, "answer": "A"},
    )
    found = read_sequences(file, encode, ROOM)
    assert found[:3] == [
        TokenSequence((97, 98)),
        TokenSequence((1, 2, 3, 4), 1),
        TokenSequence((97, 98, 99, 100, 101), 3),
    ]
    assert bytes(found[3].tokens).decode() == "x\n\ny\n(A) a\n(B) b\n(C) c\n(D) d" and found[3].answer == 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["data.jsonl:1", "not JSON"]),
        ([1], ["data.jsonl:1", "no object"]),
        ({"txt": "a"}, ["neither `text` nor `input_ids`"]),
        ({"input_ids": [1, -1]}, ["`input_ids`", "no list of token ids"]),
        ({"input_ids": [1, True]}, ["`input_ids`", "no list of token ids"]),
        ({"text": 5}, ["`text`", "no string"]),
        ({"text": "a", "answer_ids": "b"}, ["`answer_ids`"]),
        ("", ["has no sequences"]),
    ],
)
def test_what_is_no_sequence_is_one_sentence(tmp_path: Path, line: object, words: list[str]) -> None:
    with pytest.raises(DataError) as error:
        read_sequences(write(tmp_path, line), encode, ROOM)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read .* give a JSONL file"):
        read_sequences(tmp_path / "none.jsonl", encode, ROOM)


def test_texts_are_cut_and_answers_are_not(tmp_path: Path) -> None:
    ids = list(range(ROOM))
    choices = {f"choice_{letter}": "z" for letter in "ABCD"}
    lines: list[object] = [{"input_ids": [*ids, 1]}, {"context": "x" * 100, **choices}]
    lines += [{"input_ids": ids[:-2], "answer_ids": [7, 8]}]
    text, bench, answer = read_sequences(write(tmp_path, *lines), encode, ROOM)
    assert text == TokenSequence(tuple(ids)) and len(bench.tokens) == ROOM
    assert answer == TokenSequence((*ids[:-2], 7, 8), 2)
    with pytest.raises(DataError, match=r"data.jsonl:2 has 51 tokens, its answer included, .* room for 50; shorten"):
        read_sequences(write(tmp_path, {"text": "a"}, {"input_ids": ids, "answer_ids": [7]}), encode, ROOM)


@pytest.mark.parametrize("end", [[], [2]])
def test_a_model_s_special_tokens_stand_before_a_prompt_alone(tmp_path: Path, end: list[int]) -> None:
    def tokenize(text: str, add_special_tokens: bool = True) -> list[int]:
        return [1, *letters(text), *end] if add_special_tokens else letters(text)

    file = write(tmp_path, {"text": "ab", "answer": "cd"}, {"text": "ab"}, {"text": ""})
    answer, text, nothing = read_sequences(file, encode_with(tokenize), ROOM)
    assert answer == TokenSequence((1, *letters("abcd")), 2), "the answer goes on where the prompt ends"
    assert text == TokenSequence((1, *letters("ab"))) and nothing.tokens[:1] == (1,)


def test_sequences_with_a_step_are_told_by_their_lengths() -> None:
    given = [TokenSequence((1,) * n, answer) for n, answer in ((344, 0), (345, 0), (337, 2), (340, 10), (20, 19))]
    assert with_steps(given, 336) == [1, 3]
    assert [i for i, sequence in enumerate(given) if choose_steps(sequence, 9, 336)] == [1, 3]


def test_steps_follow_their_anchors() -> None:
    text = TokenSequence(tuple(range(10_000)))
    chosen = choose_steps(text, 3, 336)
    assert chosen == choose_steps(text, 3, 336) != choose_steps(text, 4, 336)
    assert [anchor for anchor, _ in chosen] == [336, 4096, 8192]
    for (anchor, steps), stop in zip(chosen, (4096, 8192, 10_000), strict=True):
        assert steps == sorted(set(steps)) and len(steps) == 8 and anchor < steps[0] and steps[-1] < stop


def test_steps_of_an_answer_have_the_prompt_as_anchor() -> None:
    answer = TokenSequence(tuple(range(1_000)), 10)
    *rest, (anchor, steps) = choose_steps(answer, 0, 336)
    assert [anchor for anchor, _ in rest] == [336] and max(rest[0][1]) < 990
    assert anchor == 989 and steps == list(range(990, 999)), "the last token is not decoded from"
    assert choose_steps(TokenSequence(tuple(range(300)), 10), 0, 336) == []


def test_a_table_has_the_labels_of_its_tau(tmp_path: Path) -> None:
    world = World(seed=21)
    world.extend(1, 950)
    q = torch.randn(950, 8, 64, generator=torch.Generator().manual_seed(1))
    recorder, wishes = Recorder(tmp_path, world.pool), {"id": 4, "samples": [[600, [700, 899]]]}
    for layer in range(world.layers):
        # The anchor lies in the same chunk or an earlier one, and there are chunks after the last step.
        for start, stop in ((0, 512), (512, 900), (900, 950)):
            request = ExtendRequest(1, start, stop, 0, world.page_list(1, 950))
            recorder.prefilled(layer, request, wishes, q[start:stop], world.scale)
            assert path(tmp_path, 4, layer).exists() == (stop >= 900)
    tables = {tau: dataset.table(tmp_path, [3, 4], world.layers, tau) for tau in TAUS}
    for tau, table in tables.items():
        assert table.features.shape == (2 * 2 * 8, 41) and set(table.sequence.tolist()) == {4}
        assert torch.equal(table.streaming, table.budgets[:, 0] == 0)
        line = table.bgt0.unsqueeze(1) + table.k.unsqueeze(1) * torch.tensor([4.0, 5, 6, 7])
        assert (line - table.budgets)[~table.streaming].abs().mean() < 0.5, tau
    few, many = tables[0.5], tables[0.02]
    assert (few.budgets <= many.budgets).all() and few.budgets.mean() < many.budgets.mean()
    assert not torch.equal(few.features[:, BUDGETS], many.features[:, BUDGETS])
    assert torch.equal(few.features[:, :35], many.features[:, :35])
    with pytest.raises(DataError, match="no steps were recorded"):
        dataset.table(tmp_path, [0, 1], world.layers, 0.1)
