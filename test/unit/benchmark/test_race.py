"""The race's pure functions; its drivers need packages of other implementations."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoints
import common
import numpy as np
import pytest
import race
import speed_tables
import step_graphs
import torch
from places import ROOT
from racers.driver import Plan, timed_steps
from racers.entries import ENTRIES, PEERS, Entry


def test_ratios_are_taken_within_rounds() -> None:
    ours = [{"round": 0, "decode_ms": 1.0}, {"round": 1, "decode_ms": 10.0}]
    theirs = [{"round": 0, "decode_ms": 2.0}, {"round": 1, "decode_ms": 20.0}, {"round": 2, "failed": "over the limit"}]
    assert speed_tables.ratio(theirs, ours, "decode_ms") == "2.00x"


def test_a_table_shows_who_failed_and_why_and_the_fastest_llama_cpp(tmp_path: Path) -> None:
    said = {"model": "llama-111m", "round": 0}
    entry, ours = Entry("other", "x"), Entry("Fluxion", "sglang", policies=("full",))
    rows = [row for depth in (4096, 6144, 8192) for row in race.cell_rows(ours, _cell(depth, "full"), said)]
    rows += race.cell_rows(entry, _cell(4096, ""), said) + race.failed_rows(entry, [8192], "over the limit", said)
    fast = race.cell_rows(Entry("llama.cpp", "x"), _cell(8192, ""), said)
    rows += fast + [{**row, "system": "llama.cpp, flash attention", "decode_ms": 2.0} for row in fast]
    data = {
        "commit": "abc",
        "date": "2026-01-01",
        "machine": {"cpu": "X", "cores": 2, "flags": ["avx2"], "gpu": None},
        "versions": {"sglang": "1", "torch": "2"},
        "batches": [4, 1],
        "steps": 3,
        "rows": rows,
        "models": {"llama-111m": {"cut": {}, "parameters": 10**8, "layers": 4, "kv_bytes": 4096}},
    }
    common.save(tmp_path / "box" / "race.json", data)
    text = speed_tables.SPEED_TABLES["race"](tmp_path)
    assert "| model | what | context | Fluxion `full` | other | fastest llama.cpp |" in text
    assert "| llama-111m | step, batch 1 (ms) | 4,096 | 4.0 | 4.0 (1.00x) |  |" in text
    assert "| llama-111m | step, batch 4 (ms) | 8,192 | 8.0 | over the limit | 2.0 (0.25x) |" in text
    assert "| llama-111m | prompt (s) | 8,192 | 4.0 | over the limit | 4.0 (1.00x) |" in text
    assert "6,144" not in text, "the shortest and the longest context are shown"


def test_no_entry_answers_for_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise race.Failed("over the limit")
        yield

    monkeypatch.setattr(race.checkpoints, "made", lambda model, folder: tmp_path)
    monkeypatch.setattr(race, "events", fails)
    args = argparse.Namespace(
        batches=[1], steps=2, fresh=False, retry=False, cache=tmp_path, peers=tmp_path, limit=1, depths=[64]
    )
    found = race.Race(tmp_path / "race.json", args)
    with pytest.raises(SystemExit, match=r"llama-111m in float32: over the limit; see .*reference\.log"):
        found.run(ENTRIES[0], "llama-111m", 0, [64])
    assert found.data["rows"] == []


def test_the_first_steps_are_no_part_of_a_median() -> None:
    timed = timed_steps(lambda: None, 5)
    assert len(timed) == len(timed.cpu_s) == 5
    cell = _cell(4096, "")
    cell["decode"][0]["step_cpu_s"] = [0.001, 0.002, 0.9]
    assert race.cell_rows(Entry("other", "x"), cell, {})[0]["cpu_median_ms"] == 2.0


def test_peak_memory_is_not_that_of_whoever_started_the_process() -> None:
    ask = "import driver; print(driver.peak_gb())"
    out = subprocess.check_output([sys.executable, "-c", ask], cwd=ROOT / "benchmark" / "racers", text=True)
    assert 0 < float(out) < 0.1, "this process, which has loaded torch, has more"


def test_a_process_that_dies_ends_the_measurement() -> None:
    def measure(say: Any, code: int) -> None:
        say.send({"a": 1})
        os._exit(code)

    start = multiprocessing.get_context("fork")
    assert list(step_graphs.rows_of(start, measure, 0)) == [{"a": 1}]
    rows = step_graphs.rows_of(start, measure, 3)
    assert next(rows) == {"a": 1}
    with pytest.raises(SystemExit, match="exit code 3"):
        next(rows)


def _cell(depth: int, variant: str) -> dict[str, Any]:
    seconds = [depth * 1e-6 / 1.024] * 3
    decode = [{"batch": batch, "variant": variant, "decode_s": seconds, "step_cpu_s": [0.01]} for batch in (4, 1)]
    return {"depth": depth, "prefill_s": depth / 2048, "prefill_cpu_s": 1.0, "peak_gb": 1.5, "decode": decode}


def test_prompts_share_no_beginning_and_stay_in_the_vocabulary() -> None:
    plan = Plan("", [16, 64], [4, 1], 16, 2, {}, [3], 1, vocabulary=32000)
    prompts = [prompt for depth in plan.depths for prompt in plan.prompts(depth)]
    assert len({prompt[0] for prompt in prompts}) == len(prompts)
    assert all(3 <= token < 32000 for prompt in prompts for token in prompt)
    assert plan.prompts(64) == plan.prompts(64)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_entries_have_drivers_peers_and_plans(entry: Entry) -> None:
    assert (ROOT / "benchmark" / "racers" / f"run_{entry.driver}.py").is_file()
    assert not entry.peer or entry.peer in PEERS
    args = argparse.Namespace(batches=[1, 4], steps=16)
    plan = Plan(**race.plan("qwen3-4b", Path("/x"), [1024], entry, args))
    assert plan.batches == [4, 1]
    assert plan.room >= 1024 + (3 + 16) * 2 * max(len(entry.policies), 1)


def test_rows_of_queries_are_paired_as_llama_cpp_turns_them() -> None:
    weight = torch.arange(2 * 8).view(-1, 1).float()
    found = checkpoints.paired(weight, heads=2).flatten().tolist()
    assert found == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


@pytest.mark.parametrize("model", checkpoints.CUTS)
def test_every_tensor_has_a_name_in_gguf(model: str) -> None:
    config = checkpoints.config(model)
    names = [checkpoints.gguf_name(name) for name, _ in checkpoints.shapes(config)]
    assert len(set(names)) == len(names)
    assert ("output.weight" in names) != config["tie_word_embeddings"]
    layers = sum(np.prod(shape) for name, shape in checkpoints.shapes(config) if ".layers." in name)
    assert layers < checkpoints.parameters(config) <= layers + (2 * config["vocab_size"] + 1) * config["hidden_size"]
