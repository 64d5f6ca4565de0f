"""The command of a GPU day on the simulated device: steps that need no GPU work, and the report has its tables."""

from __future__ import annotations

import json
import subprocess
import sys

import gpu_day.__main__ as day
import pytest
from places import ROOT

pytestmark = pytest.mark.full


def test_every_step_works() -> None:
    command = [sys.executable, "-m", "benchmark.gpu_day", "--simulated", "--fresh"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    folder = ROOT / "build" / "gpu-day" / "simulated"
    rows = {row["step"]: row for row in json.loads((folder / "gpu_day.json").read_text())["rows"]}
    tried = [step for step in day.STEPS if step.simulated is not None]
    assert list(rows) == [step.name for step in tried]
    report = (folder / "gpu_day.md").read_text()
    titles = [shown.title for step in tried for shown in step.shows]
    assert [line.removeprefix("## ") for line in report.splitlines() if line.startswith("## ")] == titles
    answers = json.loads((folder / "gpu_tokens.json").read_text())["rows"]
    assert len(answers) == 3 and all(row["same"] == row["prompts"] for row in answers)
