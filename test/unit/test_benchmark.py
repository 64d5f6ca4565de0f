"""Tables come from result files: what they show, and that the pages in the repository are up to date."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

import common  # noqa: E402
import one_batch  # noqa: E402
import tables  # noqa: E402

HEADER = {
    "commit": "abc",
    "date": "2026-01-01",
    "machine": {"cpu": "X", "cores": 2, "flags": ["avx2"]},
    "versions": {"sglang": "1", "torch": "2"},
    "memory_read_gb_per_s": [20.4, 30.2],
}


def write(results: Path, name: str, rows: list[dict[str, Any]]) -> None:
    common.save(results / "box" / name, {**HEADER, "rows": rows})


def row(policy: str, tpot: float, turn: int = 0) -> dict[str, Any]:
    return {"model": "m", "policy": policy, "length": 8192, "batch": 4, "round": turn, "tpot_ms": tpot}


def test_one_batch_table_shows_medians_over_rounds_and_the_gain(tmp_path: Path) -> None:
    rows = [row("off", 30.0), row("fixed:16:0.05", 9.0)]
    rows += [
        row("off", 50.0, 1),
        row("fixed:16:0.05", 11.0, 1),
        row("off", 40.0, 2),
        row("fixed:16:0.05", 10.0, 2),
    ]
    write(tmp_path, "one_batch.json", rows)
    text = tables.one_batch(tmp_path)
    assert "| m | 4 | 8,192 | 40.0 | 10.0 | 4.0x |" in text
    assert "median of 3 run(s)" in text
    assert "20 to 30 GB/s" in text


def scheduled(scheduler: str, ms: float, torch_tasks: float, turn: int) -> dict[str, Any]:
    cell = {"workload": "4K to 16K", "executors": "cpu+torch", "scheduler": scheduler, "round": turn}
    return {**cell, "lengths": [5000] * 8, "layer_ms": ms, "torch_tasks": torch_tasks}


def test_schedulers_table_compares_within_a_round(tmp_path: Path) -> None:
    """The batches of two rounds differ; what they say of a scheduler need not."""
    rows = [scheduled("priority", 4.0, 0.25, 0), scheduled("uniform", 8.0, 0.5, 0)]
    rows += [scheduled("priority", 40.0, 0.75, 1), scheduled("uniform", 120.0, 0.5, 1)]
    write(tmp_path, "schedulers.json", rows)
    text = tables.schedulers(tmp_path)
    assert "| 4K to 16K | cpu+torch | priority | 22.00 | 1.00x | 1.00 to 1.00 | 50% |" in text
    assert "| 4K to 16K | cpu+torch | uniform | 64.00 | 2.50x | 2.00 to 3.00 | 50% |" in text
    assert "2 batches of 8 requests" in text
    assert "python benchmark/schedulers.py" in tables.schedulers(tmp_path / "box")


def test_a_page_without_results_says_how_to_get_them(tmp_path: Path) -> None:
    page = "a\n<!-- table:one_batch -->\nold\n<!-- /table:one_batch -->\nb\n"
    filled = tables.fill(page, tmp_path)
    assert "Not measured yet: `python benchmark/one_batch.py`." in filled
    assert "old" not in filled
    assert tables.fill(filled, tmp_path) == filled


def test_an_unknown_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no table 'speed'"):
        tables.fill("<!-- table:speed -->\n<!-- /table:speed -->", tmp_path)


def test_the_pages_of_the_repository_are_up_to_date() -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "benchmark" / "tables.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_saved_results_are_json_with_a_row_a_line(tmp_path: Path) -> None:
    write(tmp_path, "r.json", [row("off", 1.0), row("full", 2.0)])
    path = tmp_path / "box" / "r.json"
    assert json.loads(path.read_text())["rows"] == [row("off", 1.0), row("full", 2.0)]
    assert sum('"tpot_ms"' in line for line in path.read_text().splitlines()) == 2


def test_a_result_file_is_continued_only_when_it_measured_the_same(tmp_path: Path) -> None:
    write(tmp_path, "r.json", [row("off", 1.0)])
    path = tmp_path / "box" / "r.json"
    assert common.resume(path, HEADER, ("commit", "machine"))["rows"] == [row("off", 1.0)]
    assert common.resume(path, {**HEADER, "commit": "def"}, ("commit", "machine"))["rows"] == []


@pytest.mark.parametrize("model", one_batch.MODELS)
@pytest.mark.parametrize("policy", one_batch.POLICIES)
def test_one_batch_commands_have_room_for_the_batch_and_the_flag_only_with_a_policy(
    model: str, policy: str, tmp_path: Path
) -> None:
    command = one_batch.command({"model": model, "policy": policy, "length": 1024}, tmp_path)
    assert ("--enable-fluxion" in command) == (policy != "off")
    if policy == "off":
        tokens = int(command[command.index("--max-total-tokens") + 1])
    else:
        config = json.loads(command[command.index("--fluxion-config") + 1])
        assert config["policy"] == policy
        tokens = config["host_tokens"]
    assert tokens >= max(one_batch.BATCHES) * (1024 + one_batch.STEPS)
    if model == "needle":
        prompts = Path(command[command.index("--prompt-filename") + 1]).read_text().splitlines()
        assert [len(prompt.split()) for prompt in prompts] == [1024] * max(one_batch.BATCHES)
