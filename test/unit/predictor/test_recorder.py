"""Recordings that requests ask for: legal ones, the remains of requests that end early, and a full disk."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from world import World

from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.training import recorder as module
from fluxion_sglang.training.dataset import TokenSequence, choose_steps
from fluxion_sglang.training.recorder import Recorder, check_wishes, path, wishes_for

WISHES = {"id": 4, "samples": [[600, [700, 899]]]}
TOKENS = 950


def chunk(world: World, recorder: Recorder, start: int, stop: int, wishes: dict[str, Any] = WISHES) -> None:
    q = torch.randn(TOKENS, 8, 64, generator=torch.Generator().manual_seed(1))
    for layer in range(world.layers):
        request = ExtendRequest(1, start, stop, 0, world.page_list(1, TOKENS))
        recorder.prefilled(layer, request, wishes, q[start:stop], world.scale)


@pytest.fixture
def world() -> World:
    world = World(seed=21)
    world.extend(1, TOKENS)
    return world


def kept(recorder: Recorder) -> int:
    return len(recorder._queries) + len(recorder._done)


def test_nothing_is_left_of_a_request_that_ends_early(tmp_path: Path, world: World) -> None:
    recorder = Recorder(tmp_path, world.pool)
    world.engine.observers.append(recorder)
    chunk(world, recorder, 0, 800)
    assert kept(recorder) == 2 * world.layers
    world.engine.forget(2)
    assert kept(recorder) == 2 * world.layers, "another row"
    world.engine.forget(1)
    assert kept(recorder) == 0 and not list(tmp_path.iterdir())
    chunk(world, recorder, 0, TOKENS)
    assert kept(recorder) == 0 and path(tmp_path, 4, world.layers - 1).exists()


def test_an_anchor_that_came_from_the_tree_is_left_out(tmp_path: Path, world: World) -> None:
    recorder = Recorder(tmp_path, world.pool)
    chunk(world, recorder, 640, TOKENS)
    assert kept(recorder) == 0 and not list(tmp_path.iterdir())
    chunk(world, recorder, 640, TOKENS, {"id": 5, "samples": [[600, [700]], [650, [720]]]})
    assert module.read(tmp_path, 5, 0).step.tolist() == [720]


def test_a_full_disk_ends_the_recording_and_not_the_pass(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path, world.pool)
    recorder.check(WISHES, TOKENS)
    savez = module.np.savez

    def full(file: Any, **fields: Any) -> None:
        with open("/dev/full", "wb", buffering=0) as device:
            savez(device, **fields)

    monkeypatch.setattr(module.np, "savez", full)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            chunk(world, recorder, 0, TOKENS)
    (record,) = caplog.records
    assert "recording ends here" in record.getMessage() and "No space left" in record.getMessage()
    assert kept(recorder) == 0 and not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"Nothing is recorded, because .*No space left.*again\.$"):
        recorder.check(WISHES, TOKENS)


def test_what_is_recorded_stays(tmp_path: Path, world: World) -> None:
    recorder = Recorder(tmp_path, world.pool)
    chunk(world, recorder, 0, TOKENS)
    with pytest.raises(ValueError, match="Sequence 4 is recorded already"):
        recorder.check(WISHES, TOKENS)
    recorder.check({**WISHES, "id": 5}, TOKENS)


@pytest.mark.parametrize(
    "wishes",
    [
        3, [], "x" * 10**6, {}, {"id": 4}, {**WISHES, "more": 1}, {**WISHES, "id": "4"}, {**WISHES, "id": True},
        {**WISHES, "id": -1}, {**WISHES, "id": 10**30}, {**WISHES, "samples": {}}, {**WISHES, "samples": []},
        {**WISHES, "samples": [600]}, {**WISHES, "samples": [[600]]}, {**WISHES, "samples": [[600, 700]]},
        {**WISHES, "samples": [[600, []]]}, {**WISHES, "samples": [[600, [700.0]]]},
        {**WISHES, "samples": [[600, [None]]]}, {**WISHES, "samples": [[600, [599]]]},
        {**WISHES, "samples": [[-1, [700]]]}, {**WISHES, "samples": [[600, [TOKENS]]]},
        {**WISHES, "samples": [[600, [10**30]]]}, {**WISHES, "samples": [[0, [700] * 5000]]},
    ],
)  # fmt: skip
def test_wrong_wishes_are_refused_in_a_sentence(wishes: Any) -> None:
    with pytest.raises(ValueError) as error:
        check_wishes(wishes, TOKENS)
    sentence = str(error.value)
    assert sentence.startswith("fluxion_record is") and sentence.endswith(".")
    assert "\n" not in sentence and len(sentence) < 250


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["id", "samples", "x"]), inner),
    max_leaves=20,
)


@given(json, st.integers(1, 10**6))
def test_whatever_a_client_sends_is_taken_or_refused(wishes: Any, tokens: int) -> None:
    try:
        _, last = check_wishes(wishes, tokens)
    except ValueError:
        return
    assert 0 <= last < tokens


@given(st.data())
def test_what_training_asks_for_is_taken(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(2, 5000))
    position = st.integers(0, tokens - 1)
    samples = []
    for anchor in data.draw(st.lists(position, min_size=1, max_size=4)):
        samples.append((anchor, data.draw(st.lists(st.integers(anchor, tokens - 1), min_size=1, max_size=5))))
    sequence, last = check_wishes(wishes_for(7, samples), tokens)
    assert (sequence, last) == (7, max(max(steps) for _, steps in samples))


@given(st.integers(2, 9000), st.integers(0, 40), st.integers(0, 2**16))
def test_the_steps_that_training_chooses_are_taken(tokens: int, answer: int, seed: int) -> None:
    sequence = TokenSequence(tuple(range(tokens)), min(answer, tokens - 1))
    if chosen := choose_steps(sequence, seed, 336):
        check_wishes(wishes_for(3, chosen), tokens)
