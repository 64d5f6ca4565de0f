"""The contents of docs/extend.md work unchanged: the example, its tests, and its name in another process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import policy_example
import pytest


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    return policy_example.install(tmp_path)


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": policy_example.search_path(folder)}
    return subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True)


def test_the_example_passes_its_tests(installed: Path) -> None:
    run = python(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_taper.py")
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\b1[0-9] passed", run.stdout), run.stdout


def test_another_process_knows_its_name(installed: Path) -> None:
    """A configuration may name it and pass arguments. Refusals of its class are reported, and a broken package gives
    one sentence."""
    broken = {
        "lost = nothing_of_this_name:Policy": "cannot be made .*ModuleNotFoundError",
        "number = taper:BLK": "makes no fluxion_sglang.policy.Policy",
        "dict = builtins:dict": "makes no fluxion_sglang.policy.Policy",
    }
    names = next(installed.glob("*.dist-info")) / "entry_points.txt"
    names.write_text(names.read_text().rstrip("\n") + "\n" + "\n".join(broken) + "\n")
    code = """
from types import SimpleNamespace
from fluxion_sglang.config import ConfigError
from fluxion_sglang.policy import parse_spec
from fluxion_sglang.sglang.start.options import options_of
config = options_of(SimpleNamespace(fluxion_config='{"policy": "taper:0.4:0.1"}'))
policy = parse_spec(config.policy)
print(type(policy).__name__, policy.spec, policy.first, policy.last)
for spec in ("taper:2", "taper:1:1:1:1", "taper:x"):
    try:
        options_of(SimpleNamespace(fluxion_config='{"policy": "%s"}' % spec))
    except ConfigError as error:
        print(error)
for name in ("lost", "number", "dict"):
    try:
        parse_spec(name)
    except ValueError as error:
        print(error)
"""
    run = python(installed, "-c", code)
    assert run.returncode == 0, run.stderr
    first, *errors = run.stdout.splitlines()
    assert first == "TaperPolicy taper:0.4:0.1 0.4 0.1"
    assert len(errors) == 6 and all(error.endswith('"auto".') for error in errors[:3])
    assert "takes FIRST:LAST:HALF_LIFE" in errors[0]
    assert "cannot be made with ['1', '1', '1', '1'] (TypeError" in errors[1]
    for line, sentence in zip(errors[3:], broken.values(), strict=True):
        assert re.search(sentence, line) and line.endswith(".")
