"""`fluxion ask` with a server that it starts, and the bundled model: right answers, a shared prefix, a policy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import NEEDLE

from fluxion_sglang.commands.needle import needle_prompt, to_text

pytestmark = pytest.mark.full


def test_questions_about_a_file(tmp_path: Path) -> None:
    prompt = needle_prompt(4096, 8, seed=5)
    file = tmp_path / "document.txt"
    file.write_text(to_text(prompt.document) + "\n")
    questions = [question.text for question in prompt.questions[:2]]
    done = subprocess.run(
        [sys.executable, "-m", "fluxion_sglang", "ask", str(file), "--model", NEEDLE, "--policy", "full", *questions],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == [question.answer for question in prompt.questions[:2]]
    costs = re.findall(r"([\d,]+) prompt tokens, ([\d,]+) cached .*read ([\d.]+)% of the middle (.*)", done.stderr)
    numbers = [(int(tokens.replace(",", "")), int(cached.replace(",", ""))) for tokens, cached, *_ in costs]
    # The second question prefills at most two pages.
    assert numbers[0] == (4096, 0)
    assert numbers[1][0] == 4096 and numbers[1][1] >= 4096 - 32
    assert [(read, policy) for *_, read, policy in costs] == [("100.0", "(policy full)")] * 2
