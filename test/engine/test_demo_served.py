"""`make demo` as a user types it, with a shorter document."""

from __future__ import annotations

import subprocess

import pytest
from places import ROOT
from server import PATIENCE_S

pytestmark = pytest.mark.full


def test_make_demo() -> None:
    command = ["make", "--no-print-directory", "demo", "ARGS=--length 4096 --questions 2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3 * PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    first, second = (line.split() for line in done.stdout.splitlines() if line.startswith((" openai ", " generate ")))
    assert "right" in first and "right" in second
    assert "(100%)" in " ".join(second), "the second question finds the document in the tree"
    assert done.stdout.rstrip().endswith("2 of 2 answers are right.")
