"""Results of a run under a sanitizer: every test and every report counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tables
from places import ROOT

TESTS = """<testsuites><testsuite name="pytest" time="125.4">
<testcase classname="test.unit.test_queue" name="a"/>
<testcase classname="test.unit.test_queue" name="b"><skipped message="no AVX-512"/></testcase>
<testcase classname="test.unit.test_engine.TestOne" name="a"><failure message="no"/></testcase>
<testcase classname="test.unit.test_engine" name="b"/>
<testcase classname="test.unit.test_engine" name="c"/>
</testsuite></testsuites>"""


def record(sanitizer: str, folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    path = f"{ROOT / 'test'}:{ROOT}"
    command = [sys.executable, str(ROOT / "tools" / "sanitized.py"), sanitizer, str(folder), "--out", str(out)]
    return subprocess.run(
        command, env={"PYTHONPATH": path, "PATH": ""}, cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture
def build(tmp_path: Path) -> Path:
    (tmp_path / "tests.xml").write_text(TESTS)
    for pid in (7, 8):
        (tmp_path / f"report.{pid}").write_text("WARNING: ThreadSanitizer: data race")
    return tmp_path


def test_what_ran_is_recorded(build: Path) -> None:
    out = build / "box" / "sanitizers.json"
    for sanitizer in ("thread", "address", "thread"):
        assert record(sanitizer, build, out).returncode == 0
    data: dict[str, Any] = json.loads(out.read_text())
    first, second = data["rows"]
    assert (first["sanitizer"], second["sanitizer"]) == ("AddressSanitizer, UBSan", "ThreadSanitizer")
    counts = {"passed": 3, "skipped": 1, "failed": 1, "reports": 2, "seconds": 125}
    assert second.items() >= counts.items() and second["tests"] == {"test_engine": 2, "test_queue": 1}
    assert data["effort"] == 1 and data["commit"]
    assert "| ThreadSanitizer | 2 | 3 | 1 | 1 | 2 | 2 |" in tables.TABLES["sanitizers"](build)


def test_a_run_of_other_code_takes_nothing_over(build: Path) -> None:
    out = build / "sanitizers.json"
    record("address", build, out)
    out.write_text(out.read_text().replace('"commit": "', '"commit": "0'))
    record("thread", build, out)
    assert [one["sanitizer"] for one in json.loads(out.read_text())["rows"]] == ["ThreadSanitizer"]


def test_a_run_without_tests_is_none(build: Path) -> None:
    (build / "tests.xml").write_text('<testsuites><testsuite name="pytest" time="1"/></testsuites>')
    run = record("thread", build, build / "sanitizers.json")
    assert run.returncode and "nothing ran under ThreadSanitizer" in run.stderr
    assert not (build / "sanitizers.json").exists()
