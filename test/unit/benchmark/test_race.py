"""The race: what is pure of it. Its drivers need the packages of others."""

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
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT
from racers.driver import Plan, timed_steps
from racers.entries import ENTRIES, PEERS, Entry

RACE_TABLES = [speed_tables.SPEED_TABLES[f"race_{name}"] for name in ("decode", "prefill", "systems")]


@given(st.floats(0, 100), st.floats(0.001, 10), st.sets(st.integers(1, 128), min_size=2))
def test_a_slope_is_the_cost_of_1024_tokens(base: float, each: float, depths: set[int]) -> None:
    points = {1024 * depth: base + each * depth for depth in depths}
    assert speed_tables.slope(points) == pytest.approx(each)


def test_one_depth_has_no_slope_and_no_bytes_a_second() -> None:
    assert speed_tables.slope({4096: 1.0}) is None
    assert speed_tables.gb_per_s(None, 1, 4096) is None
    assert speed_tables.gb_per_s(-1.0, 1, 4096) is None


def test_bytes_a_second_are_those_of_the_whole_batch() -> None:
    # 4 requests x 1,024 tokens x 4,096 bytes in 1 ms
    assert speed_tables.gb_per_s(1.0, 4, 4096) == pytest.approx(16.777216)


def test_ratios_are_taken_within_rounds() -> None:
    ours = [{"round": 0, "decode_ms": 1.0}, {"round": 1, "decode_ms": 10.0}]
    theirs = [{"round": 0, "decode_ms": 2.0}, {"round": 1, "decode_ms": 20.0}, {"round": 2, "failed": "over the limit"}]
    assert speed_tables.ratio(theirs, ours, "decode_ms") == "2.00x"


def test_slopes_are_taken_within_rounds() -> None:
    def rows(*rounds: dict[int, float]) -> list[dict[str, Any]]:
        return [
            {"round": turn, "depth": 1024 * depth, "decode_ms": ms}
            for turn, points in enumerate(rounds)
            for depth, ms in points.items()
        ]

    assert speed_tables.growth(rows({4: 1.0, 8: 5.0}, {4: 10.0, 8: 18.0}, {4: 90.0})) == pytest.approx(1.5)
    assert speed_tables.growth(rows({4: 1.0, 8: 5.0}, {4: 10.0, 8: 9.0})) is None, "up or down?"
    assert speed_tables.growth(rows({4: 1.0}, {8: 5.0})) is None, "no round has two"


def test_tables_show_who_failed_and_why(tmp_path: Path) -> None:
    said = {"model": "llama-111m", "round": 0}
    entry = Entry("other", "x")
    rows = race.cell_rows(Entry("Fluxion", "sglang", policies=("full",)), _cell(4096, "full"), said)
    rows += race.cell_rows(Entry("Fluxion", "sglang", policies=("full",)), _cell(8192, "full"), said)
    rows += race.cell_rows(entry, _cell(4096, ""), said) + race.failed_rows(entry, [8192], "over the limit", said)
    machine = {"cpu": "X", "cores": 2, "flags": ["avx2"], "gpu": None}
    data = {
        "commit": "abc",
        "date": "2026-01-01",
        "machine": machine,
        "versions": {"sglang": "1", "torch": "2"},
        "batches": [4, 1],
        "steps": 3,
        "rows": rows,
        "systems": {"other": {"reason": "not installed: no wheel"}},
        "models": {"llama-111m": {"cut": {}, "parameters": 10**8, "layers": 4, "kv_bytes": 4096}},
    }
    common.save(tmp_path / "box" / "race.json", data)
    decode, prefill, systems = (table(tmp_path) for table in RACE_TABLES)
    assert "| Fluxion `full` | 4.0 | 8.0 | 1.00x | 10.0 | 1.000 | 4.2 |" in decode
    assert "| other | 4.0 | over the limit |  |  |  |  |" in decode
    assert "| Fluxion | 2,048 | 2,048 | 4.0 | 1.00x | 1.5 |" in prefill
    assert "not installed: no wheel" in systems
    # Rows of another meaning have other names, and are not shown.
    for row in rows:
        row["rss_gb"], row["step_cpu_ms"] = row.pop("peak_gb", 0), row.pop("cpu_median_ms", 0)
    common.save(tmp_path / "box" / "race.json", data)
    decode, prefill, _ = (table(tmp_path) for table in RACE_TABLES)
    assert "| Fluxion `full` | 4.0 | 8.0 | 1.00x | 1.000 | 4.2 |" in decode
    assert "| Fluxion | 2,048 | 2,048 | 4.0 | 1.00x |\n" in prefill


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
