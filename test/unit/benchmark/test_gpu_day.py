"""The order of a GPU day: which steps run, what is saved, where it continues, and the report."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_day.__main__ as day
import pytest
from places import ROOT

WORKS, FAILS = ("-c", "print('so it is')"), ("-c", "print('it broke'); raise SystemExit(3)")
FOR_EVER = (
    "-c",
    "import subprocess, sys, time\n"
    "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\n"
    "time.sleep(600)",
)


def step(name: str, simulated: tuple[str, ...] | None) -> day.Step:
    return day.Step(name, f"does {name} work", ("-c", "raise SystemExit('a GPU is asked for')"), simulated)


@pytest.fixture
def days(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the command with these steps; return the rows of the result file."""
    monkeypatch.setattr(day, "LOGS", tmp_path)
    monkeypatch.setattr(day, "SIMULATED", tmp_path / "simulated")
    monkeypatch.setattr(day.common, "ROOT", tmp_path)

    def run(steps: list[day.Step], *options: str) -> dict[str, dict[str, Any]]:
        monkeypatch.setattr(day, "STEPS", tuple(steps))
        monkeypatch.setattr(sys, "argv", ["gpu_day", "--simulated", *options])
        day.main()
        return rows(tmp_path)

    return run


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["step"]: row for row in json.loads((folder / "simulated" / "gpu_day.json").read_text())["rows"]}


def test_what_passed_is_not_run_again(days: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="these steps failed: second; "):
        days([step("first", WORKS), step("second", FAILS), step("third", WORKS), step("fourth", None)])
    found = rows(tmp_path)
    assert {name: row["passed"] for name, row in found.items()} == {"first": True, "second": False, "third": True}
    assert found["second"]["ended"] == "exit code 3" and found["second"]["says"] == ["it broke"]
    report = (tmp_path / "simulated" / "gpu_day.md").read_text()
    assert "Simulated: everything ran on the CPU" in report
    assert "| second | does second work | exit code 3 |" in report and "it broke" in report
    assert "| fourth | does fourth work | needs a GPU |" in report
    # The failed steps work now. Running the first one again shows that it has changed.
    found = days([step("first", FAILS), step("second", WORKS), step("third", FAILS)])
    assert all(row["passed"] for row in found.values())
    # For another commit, no step has passed.
    monkeypatch.setattr(day.common, "commit", lambda: "another")
    with pytest.raises(SystemExit, match="these steps failed: first; "):
        days([step("first", FAILS), step("second", WORKS)])
    with pytest.raises(SystemExit, match="these steps failed: first; "):
        days([step("first", FAILS), step("second", FAILS)], "--only", "first")


def test_a_step_that_takes_too_long_ends_with_all_that_it_started(days: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="slow"):
        days([step("slow", FOR_EVER), step("next", WORKS)], "--limit", "3")
    found = rows(tmp_path)
    assert found["slow"]["ended"] == "out of time" and found["next"]["passed"]
    child = int((tmp_path / "slow.log").read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def measuring(folder: Path, code: int) -> day.Step:
    """A step that writes results, and exits with a code."""
    text = json.dumps({"rows": [{"policy": "full", "batch": 1, "length": 1024, "tpot_ms": 7.5, "idle_ms": 0.1}]})
    write = f"open({str(folder / 'one_batch_decode_quick.json')!r}, 'w').write({text!r})"
    return day.Step(
        "decode", "how long", (), ("-c", f"{write}; raise SystemExit({code})"), day._steps("_decode*", "Steps")
    )


def test_the_report_shows_what_was_measured(days: Any, tmp_path: Path) -> None:
    folder = tmp_path / "simulated"
    folder.mkdir()
    days([measuring(folder, 0)])
    report = (folder / "gpu_day.md").read_text()
    assert "| policy | batch | length | tpot_ms | idle_ms |" in report and "| full | 1 | 1024 | 7.5 | 0.1 |" in report


def test_what_failed_shows_nothing_that_it_or_an_earlier_run_measured(days: Any, tmp_path: Path) -> None:
    folder = tmp_path / "simulated"
    folder.mkdir()
    days([measuring(folder, 0)])
    with pytest.raises(SystemExit, match="decode"):
        days([measuring(folder, 1)], "--fresh")
    assert "| 7.5 |" not in (folder / "gpu_day.md").read_text()
    days([measuring(folder, 0)])
    with pytest.raises(SystemExit, match="decode"):
        days([step("first", WORKS), dataclasses.replace(measuring(folder, 0), simulated=FAILS)], "--fresh")
    assert not list(folder.glob("one_batch*"))


def test_other_versions_run_again_and_keep_what_is_there(days: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    days([step("first", WORKS), step("second", WORKS)])
    header = day.common.header
    monkeypatch.setattr(day.common, "header", lambda name: {**header(name), "versions": {"torch": "another"}})
    with pytest.raises(SystemExit, match="failed: second"):
        days([step("first", WORKS), step("second", FAILS)])
    found = days([step("second", WORKS)], "--only", "second")
    assert set(found) == {"first", "second"} and all(row["passed"] for row in found.values())


def test_every_step_has_a_command_that_is_there() -> None:
    names = [step.name for step in day.STEPS]
    assert len(set(names)) == len(names)
    for one in day.STEPS:
        for command in filter(None, (one.command, one.simulated)):
            assert command[0] == "-m" or (ROOT / command[0]).is_file(), command
    alone = {one.name for one in day.STEPS if one.simulated is None}
    assert alone == {"flashinfer", "graphs", "memcheck", "near_few", "racecheck"}


def test_without_a_gpu_it_says_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmark.gpu_day"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": str(Path(sys.executable).parent)},
    )
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "ARGS=--simulated" in done.stderr
