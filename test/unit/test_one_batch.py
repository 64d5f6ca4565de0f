"""TPOT by one_batch: its commands, what is decoded, and how policies take turns."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

import common  # noqa: E402
import decode_turns  # noqa: E402
import one_batch  # noqa: E402


@pytest.mark.parametrize("model", one_batch.MODELS)
@pytest.mark.parametrize("policies", [[one_batch.OFF], ["full", "fluxion"]])
def test_one_batch_commands_have_room_for_the_batch_and_the_flag_only_with_a_policy(
    model: str, policies: list[str], tmp_path: Path
) -> None:
    command = one_batch.command({"model": model, "policies": policies, "length": 1024}, tmp_path)
    after = dict(itertools.pairwise(command))
    assert ("--enable-fluxion" in command) == (policies != [one_batch.OFF])
    if policies == [one_batch.OFF]:
        tokens = int(after["--max-total-tokens"])
    else:
        tokens = json.loads(after["--fluxion-config"])["host_tokens"]
    decoded = one_batch.decoded(len(policies))
    assert decoded == len(one_batch.BATCHES) * one_batch.TURNS * one_batch.STEPS * len(policies)
    assert tokens >= max(one_batch.BATCHES) * (1024 + decoded)
    batches = command[command.index("--batch-size") + 1 : command.index("--input-len")]
    assert list(map(int, batches)) == sorted(one_batch.BATCHES, reverse=True)
    if model == "needle":
        prompts = Path(after["--prompt-filename"]).read_text().splitlines()
        assert [len(prompt.split()) for prompt in prompts] == [1024] * max(one_batch.BATCHES)
        streams = json.loads(Path(after["--streams"]).read_text())
        assert [len(stream) for stream in streams] == [decoded] * max(one_batch.BATCHES)


def test_the_longest_prompt_leaves_room_for_what_is_decoded() -> None:
    positions = json.loads((common.NEEDLE / "config.json").read_text())["max_position_embeddings"]
    assert max(one_batch.LENGTHS) + one_batch.decoded(len(one_batch.POLICIES) - 1) <= positions


def test_a_stream_is_answers_each_after_its_question() -> None:
    prompt = one_batch.needle_prompt(600, keys=2)
    first, second = prompt.questions
    stream = one_batch.stream(prompt, 100)
    once = [*first.answer_ids, *second.token_ids, *second.answer_ids]
    assert stream[: len(once)] == once and stream[len(once)] == once[0] and len(stream) == 100


class FakeRunner:
    """Stands for one_batch's runner: a batch is a list, and the model says the next number."""

    def __init__(self) -> None:
        backend = SimpleNamespace(requests=SimpleNamespace(current=None))
        self.torch_runner = SimpleNamespace(attn_backend=backend)
        self.decoded: list[tuple[list[int], object]] = []

    def clear(self) -> None: ...
    def synchronize(self) -> None: ...

    def extend(self, reqs: list[int]) -> tuple[torch.Tensor, None, FakeBatch]:
        return torch.tensor([100 * reqs[0]]), None, FakeBatch(reqs)

    def decode(self, tokens: torch.Tensor, batch: FakeBatch) -> tuple[torch.Tensor, None]:
        assert len(tokens) == len(batch.reqs)
        self.decoded.append((tokens.tolist(), self.torch_runner.attn_backend.requests.current))
        return tokens + 1, None


class FakeBatch:
    def __init__(self, reqs: list[int]) -> None:
        self.reqs = list(reqs)

    def merge_batch(self, other: FakeBatch) -> None:
        self.reqs += other.reqs

    def filter_batch(self, keep_indices: list[int]) -> None:
        self.reqs = [self.reqs[i] for i in keep_indices]


def run_turns(turns: decode_turns.Turns, runner: FakeRunner, batches: list[int]) -> list[dict[str, Any]]:
    nothing: list[Any] = []
    assert turns.run_once("", runner, nothing.append, [9], 1, 64) is None, "the warm-up"
    found = [turns.run_once("", runner, nothing.append, list(range(1, n + 1)), n, 64) for n in batches]
    return [row for row in found if row is not None]


def test_policies_take_turns_on_one_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_turns.Turns, "_policy", lambda _, runner, spec: None if spec == "off" else spec)
    runner = FakeRunner()
    rows = run_turns(decode_turns.Turns(["a", "b"], 2, 3, []), runner, [3, 1])
    assert [row["batch_size"] for row in rows] == [3, 1]
    assert all(len(seconds) == 2 * 2 for row in rows for seconds in row["decode_s"].values())
    assert [set(policies) for _, policies in runner.decoded] == [{"a"}] * 3 + [{"b"}] * 3 + [{"a"}] * 3 + [
        {"b"}
    ] * 3 + [{"a"}] * 3 + [{"b"}] * 3 + [{"a"}] * 3 + [{"b"}] * 3
    assert [tokens for tokens, _ in runner.decoded[:2]] == [[100, 200, 300], [101, 201, 301]]
    assert runner.decoded[12][0] == [112], "the first request of the larger batch goes on"


def test_a_stream_is_decoded_whatever_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_turns.Turns, "_policy", lambda _, runner, spec: None)
    runner = FakeRunner()
    run_turns(decode_turns.Turns(["off"], 1, 2, [[1, 2, 3, 4], [5, 6, 7, 8]]), runner, [2, 1])
    assert [tokens for tokens, _ in runner.decoded] == [[1, 5], [2, 6], [3], [4]]
    assert runner.torch_runner.attn_backend.requests.current is None
