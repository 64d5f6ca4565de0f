"""Five minutes of a soak, and a check that its judgement can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from places import ROOT
from soak.watch import grown, slope

SECONDS = np.arange(0, 600, 25.0)


def test_a_leak_is_established() -> None:
    """A leak of 60 MiB per hour is established within ten minutes, under noise of half a MiB."""
    noise = np.random.default_rng(0).normal(0, 0.5, len(SECONDS))
    found = slope(SECONDS, 1000 + SECONDS / 60 + noise)
    assert found.low < 60 < found.high and found.exceeds(30)


def test_noise_is_no_leak() -> None:
    found = slope(SECONDS, 1000 + np.random.default_rng(1).normal(0, 5, len(SECONDS)))
    assert found.low < 0 < found.high and not found.exceeds(30)
    still = slope(SECONDS, [12.5] * len(SECONDS))
    assert (still.fit, still.low, still.high) == (0, 0, 0)


def test_counts_that_go_up_are_seen() -> None:
    assert grown([40, 41, 40, 41, 41, 42]) and not grown([40, 42, 41, 42, 40, 42])


@pytest.mark.full
def test_five_minutes(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    path = os.pathsep.join([str(ROOT / "test"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    # Permanent allocations of the first hundreds of requests come in steps, the last after minutes on a slow machine. A
    # bound that only hours can distinguish from these would be noise here.
    command = [sys.executable, "-m", "soak", "--minutes", "5", "--storm", "15", "--bound", "1200", "--out", str(out)]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["leaked_tokens"] == 0 and not found["wrong"] and found["happened"]["retracted requests"] > 0
