"""`make demo` as a user types it."""

from __future__ import annotations

import subprocess

import pytest
from places import ROOT
from server import PATIENCE_S

pytestmark = pytest.mark.full


def test_make_demo() -> None:
    command = ["make", "--no-print-directory", "demo", "ARGS=--policy full"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3 * PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert len([line for line in done.stdout.splitlines() if line.startswith("= k")]) == 6
    assert done.stderr.rstrip().endswith("6 of 6 answers are right.")
