"""TPOT by one_batch: its commands, the decoded tokens, and the turns of policies."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
import decode_turns
import drawn
import one_batch
import plot
import pytest
import torch

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.device.timeline import LayerTimes
from fluxion_sglang.kv.placement import Placement
from fluxion_sglang.policy import DecodeStep, Policy, check_spec
from fluxion_sglang.sglang.memory.pools import FluxionKVPool
from fluxion_sglang.sglang.steps.backend import FluxionAttnBackend


@pytest.mark.parametrize(
    ("model", "device"), [*((model, "cpu") for model in one_batch.MODELS), *((m, "cuda") for m in one_batch.LARGE)]
)
@pytest.mark.parametrize("policies", [[one_batch.OFF], ["full", "fluxion"], ["drawn"]])
@pytest.mark.parametrize("batches", [one_batch.BATCHES, [1, 2]])
def test_one_batch_commands_have_room_for_the_batch_and_the_flag_only_with_a_policy(
    model: str, device: str, policies: list[str], batches: list[int], tmp_path: Path
) -> None:
    cell = {"model": model, "policies": policies, "batches": batches, "length": 1024, "device": device, "config": {}}
    command = one_batch.command(cell, tmp_path)
    after = dict(itertools.pairwise(command))
    assert after["--device"] == device
    assert (after.get("--attention-backend") == "flashinfer") == (device == "cuda" and policies == [one_batch.OFF])
    assert (Path(after["--model-path"]) / "config.json").is_file()
    assert ("--enable-fluxion" in command) == (policies != [one_batch.OFF])
    if policies == [one_batch.OFF]:
        tokens = int(after["--max-total-tokens"])
    else:
        config = json.loads(after["--fluxion-config"])
        check_spec(config["policy"])
        tokens = config["host_tokens"]
    decoded = one_batch.decoded(len(policies), len(batches))
    assert decoded == len(batches) * one_batch.TURNS * one_batch.STEPS * len(policies)
    assert tokens >= max(batches) * (1024 + decoded)
    sizes = command[command.index("--batch-size") + 1 : command.index("--input-len")]
    assert list(map(int, sizes)) == sorted(batches, reverse=True)
    if model == "needle":
        prompts = Path(after["--prompt-filename"]).read_text().splitlines()
        assert [len(prompt.split()) for prompt in prompts] == [1024] * max(batches)
        streams = json.loads(Path(after["--streams"]).read_text())
        assert [len(stream) for stream in streams] == [decoded] * max(batches)


def test_batches_that_do_not_fit_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 prompts of 32K of an 8B model take 66 GiB, and their metadata."""
    for gib, fit in ((8, []), (40, [4]), (200, [4, 16])):
        monkeypatch.setattr(one_batch, "available_host_memory_bytes", lambda gib=gib, **_: gib * 2**30)
        got = one_batch.those_that_fit("llama-3.1-8b", ["full"], 32768, [4, 16], "cpu")
        assert got == fit
        assert capsys.readouterr().out.count("left out: full at") == 2 - len(fit)


def test_plain_sglang_s_batches_have_to_fit_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_batch, "available_host_memory_bytes", lambda **_: 2**40)
    monkeypatch.setattr(one_batch.common, "gpu", lambda: ("H100", 80 * 2**30))
    assert one_batch.those_that_fit("llama-3.1-8b", [one_batch.OFF], 32768, [4, 16], "cuda") == [4]
    assert one_batch.those_that_fit("llama-3.1-8b", ["full"], 32768, [4, 16], "cuda") == [4, 16]


def test_the_longest_prompt_leaves_room_for_what_is_decoded() -> None:
    positions = json.loads((common.NEEDLE / "config.json").read_text())["max_position_embeddings"]
    decoded = one_batch.decoded(len(one_batch.POLICIES) - 1, len(one_batch.BATCHES))
    assert max(one_batch.LENGTHS) + decoded <= positions


def test_a_stream_is_answers_each_after_its_question() -> None:
    prompt = one_batch.needle_prompt(600, keys=2)
    first, second = prompt.questions
    stream = one_batch.stream(prompt, 100)
    once = [*first.answer_ids, *second.token_ids, *second.answer_ids]
    assert stream[: len(once)] == once and stream[len(once)] == once[0] and len(stream) == 100


class FakePolicy:
    """An object without behaviour."""

    prefilled = Policy.prefilled


class FakeHearer(FakePolicy):
    """Has to be told of prefills."""

    def prefilled(self, *args: object) -> None: ...


class FakeRunner:
    """Replaces one_batch's runner: a batch is a list, and the model outputs the next number."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, object]] = []
        self.read = Counter[str]()
        engine = SimpleNamespace(
            prefilled=lambda *args: self.heard.append((args[1], args[-1])), stats=lambda: dict(self.read)
        )
        backend = SimpleNamespace(requests=SimpleNamespace(current=None), engine=engine)
        self.torch_runner = SimpleNamespace(attn_backend=backend)
        self.decoded: list[tuple[list[int], object]] = []

    def clear(self) -> None: ...
    def synchronize(self) -> None: ...

    def extend(self, reqs: list[int]) -> tuple[torch.Tensor, None, FakeBatch]:
        self.torch_runner.attn_backend.engine.prefilled(0, reqs[0], 64, torch.empty(0), None)
        return torch.tensor([100 * reqs[0]]), None, FakeBatch(reqs)

    def decode(self, tokens: torch.Tensor, batch: FakeBatch) -> tuple[torch.Tensor, None]:
        assert len(tokens) == len(batch.reqs)
        self.decoded.append((tokens.tolist(), self.torch_runner.attn_backend.requests.current))
        self.read["tile_bytes"] += 100
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
    policies = {spec: FakePolicy() for spec in ("a", "b")}
    monkeypatch.setattr(decode_turns.Turns, "_policy", lambda _, runner, spec: policies[spec])
    runner = FakeRunner()
    rows = run_turns(decode_turns.Turns(["a", "b"], 2, 3, []), runner, [3, 1])
    assert [row["batch_size"] for row in rows] == [3, 1]
    assert all(len(seconds) == 2 * 2 for row in rows for seconds in row["decode_s"].values())
    turns = [{policy} for _ in range(4) for policy in policies.values() for _ in range(3)]
    assert [set(current) for _, current in runner.decoded] == turns, "the same objects, so that they may remember"
    assert [tokens for tokens, _ in runner.decoded[:2]] == [[100, 200, 300], [101, 201, 301]]
    assert runner.decoded[12][0] == [112], "the first request of the larger batch goes on"
    assert runner.heard == [(1, None), (2, None), (3, None)]


class FakeDevice:
    """Waits 2 ms in every step, and records a step only once it is settled."""

    layers = 4

    def __init__(self) -> None:
        times = [
            LayerTimes(i + 1, i, 10**6 * i, 10**6 * i + 10, 10**6 * i + 500, 40, 60, 90) for i in range(self.layers)
        ]
        self.timeline = SimpleNamespace(kept=[times, times], keep=self._keep)
        self.kept_steps, self.waited = 0, 0

    def _keep(self, steps: int) -> None:
        self.kept_steps = steps

    def settle(self) -> None:
        self.waited += 2_000_000

    def stats(self) -> dict[str, int]:
        return {"device_wait_ns": self.waited}


def test_what_a_device_waits_is_in_the_rows_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_turns.Turns, "_policy", lambda _, runner, spec: FakePolicy())
    monkeypatch.setattr(decode_turns, "device_of", lambda _: FakeDevice())
    recorded = tmp_path / one_batch.TIMELINE
    (row,) = run_turns(decode_turns.Turns(["a", "b"], 2, 3, [], recorded), FakeRunner(), [2])
    assert row["device_wait_s"] == {"a": [pytest.approx(2e-3)] * 4, "b": [pytest.approx(2e-3)] * 4}
    assert row["reads"]["a"]["tile_bytes"] == 2 * 3 * 100
    row["decode_s"] = {"a": [8e-3] * 4}
    assert one_batch.idle(row, "a") == {"idle_ms": 0.5, "idle_ratio": 0.25}
    row["reads"]["a"] = {"tile_bytes": 800, "gpu_tile_bytes": 200}
    assert one_batch.idle(row, "a") == {"gpu_share": 0.25, "idle_ms": 0.5, "idle_ratio": 0.25}
    assert one_batch.idle({"decode_s": {"a": [1.0]}}, "a") == {}, "the CPU is no device"
    monkeypatch.setattr(common, "ROOT", tmp_path)
    one_batch.save_timeline({"model": "needle", "length": 64}, tmp_path, tmp_path / "one_batch_needle.json")
    assert not recorded.exists()
    saved = json.loads((tmp_path / "one_batch_needle_timeline.json").read_text())
    assert [(r["policy"], r["batch"], r["length"], len(r["steps"])) for r in saved["rows"]] == [
        ("a", 2, 64, 2),
        ("b", 2, 64, 2),
    ]
    assert "<svg" in (tmp_path / "one_batch_needle_timeline.svg").read_text()


def test_a_timeline_begins_with_the_first_publication() -> None:
    steps = [[LayerTimes(1, 0, 1000, 3000, 9000, 501_000, 503_000, 508_000)]]
    drawn, error = plot.bars(steps)
    assert error == pytest.approx(0.5, abs=0.01), "between 499 and 500 us apart"
    start = 1.0 + 499.5
    assert drawn["queries, residents"] == [(0.0, 2.0)] and drawn["wait"] == [(2.0, 6.0)]
    for name, begin, length in (("plan", 501, 2), ("middle", 503, 5)):
        assert drawn[name] == [(pytest.approx(begin - start), pytest.approx(length))]


def test_policies_are_made_for_the_pool_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    config = FluxionConfig()
    pool = object.__new__(FluxionKVPool)
    pool.config = config
    backend = object.__new__(FluxionAttnBackend)  # nothing but what it keeps the pool as
    backend.token_to_kv_pool = pool
    monkeypatch.setattr(
        decode_turns.predictors, "context", lambda of, runner: SimpleNamespace(config=of, runner=runner)
    )
    monkeypatch.setattr(decode_turns, "parse_spec", lambda spec, context: (spec, context.config))
    runner: Any = SimpleNamespace(attn_backend=backend)
    assert decode_turns.Turns._policy(runner, "full") == ("full", config)
    assert decode_turns.Turns._policy(runner, decode_turns.OFF) is None


def test_policies_that_remember_hear_of_the_prefill_whosever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    policies = {"full": FakePolicy(), "a": FakeHearer(), "b": FakeHearer()}
    monkeypatch.setattr(decode_turns.Turns, "_policy", lambda _, runner, spec: policies[spec])
    runner = FakeRunner()
    prefilled = runner.torch_runner.attn_backend.engine.prefilled
    run_turns(decode_turns.Turns(list(policies), 1, 2, []), runner, [2, 1])
    assert runner.heard == [(row, policies[spec]) for row in (1, 2) for spec in ("a", "b")]
    assert runner.torch_runner.attn_backend.engine.prefilled is prefilled, "the original hook is back"


class Options(SimpleNamespace):
    """Options of one_batch.py, for `run`."""

    def __init__(self, **others: Any) -> None:
        fixed = {"machine": "box", "quick": True, "fresh": False, "rounds": 1, "lengths": [64], "batches": [1, 2]}
        super().__init__(**fixed | {"device": "cpu", "config": {}} | others)


def test_a_named_list_of_policies_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(cell: dict[str, Any], _: Path) -> list[dict[str, Any]]:
        measured.append((cell["policies"], cell["batches"]))
        place = {key: cell[key] for key in ("model", "length", "round")}
        return [{**place, "policy": policy, "batch": 1} for policy in cell["policies"]]

    measured: list[tuple[list[str], list[int]]] = []
    monkeypatch.setattr(one_batch, "measure", measure)
    monkeypatch.setattr(common, "memory_read_gb_per_s", lambda _: 30.0)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    rivals = Options(name="rivals", policies=["full", "hgca:1"])
    one_batch.run("needle", rivals)
    one_batch.run("needle", Options(name=None, policies=["full"]))
    assert measured == [(["full", "hgca:1"], [1, 2]), (["full"], [1, 2])]
    found = common.load(tmp_path / "box" / "one_batch_rivals_quick.json")
    assert found is not None and [row["policy"] for row in found["rows"]] == ["full", "hgca:1"]
    one_batch.run("needle", rivals)
    assert len(measured) == 2, "it has every cell"
    one_batch.run("needle", Options(name="rivals", policies=["full", "lfps"]))
    assert len(measured) == 3, "another list is measured anew"
    one_batch.run("needle", Options(name="rivals", policies=["full", "lfps"], device="sim"))
    assert len(measured) == 4, "and on another device"
    monkeypatch.setattr(sys, "argv", ["one_batch.py", "--name", "rivals"])
    with pytest.raises(SystemExit):
        one_batch.main()


def test_a_stream_is_decoded_whatever_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_turns.Turns, "_policy", lambda _, runner, spec: None)
    runner = FakeRunner()
    run_turns(decode_turns.Turns(["off"], 1, 2, [[1, 2, 3, 4], [5, 6, 7, 8]]), runner, [2, 1])
    assert [tokens for tokens, _ in runner.decoded] == [[1, 5], [2, 6], [3], [4]]
    assert runner.torch_runner.attn_backend.requests.current is None


@pytest.mark.parametrize("group", [1, 4, 7])
def test_drawn_groups_read_what_recorded_groups_read(group: int) -> None:
    policy = drawn.drawn()
    rows = policy._plans
    step = DecodeStep.build(
        torch.arange(3), torch.tensor([9000, 320, 20000]), Placement(), kv_heads=2, q_heads=2 * group
    )
    policy.begin_step(step)
    seen = set()
    for layer in range(40):
        plan = policy.plan(layer, torch.zeros(3, 2 * group, 8))
        assert plan.blk.shape == (3, 2) and plan.budget.shape == (3, 2 * group) and plan.value.shape == (3, 2)
        assert (plan.blk[1] == 0).all(), "nothing is between sinks and window"
        for b, h in ((0, 0), (0, 1), (2, 0), (2, 1)):
            blk, budgets = int(plan.blk[b, h]), plan.budget[b, h * group : (h + 1) * group]
            like = rows[rows[:, 0] == blk, 1:]
            assert torch.isin(budgets, like).all()
            assert (blk == 0) == bool((like == 0).all())
            seen.add(blk)
    assert seen == {0, 16, 32, 64, 128}
