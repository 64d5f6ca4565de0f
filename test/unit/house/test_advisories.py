"""`make audit` distinguishes a known vulnerability, a clean environment, and unavailable advisories."""

from __future__ import annotations

import json
import runpy
import subprocess
from typing import Any

import pytest
from places import ROOT

audit = runpy.run_path(str(ROOT / "tools" / "audit.py"))

CLEAN = {"name": "torch", "version": "2.14.1", "vulns": []}
KNOWN = {"name": "sglang", "version": "0.5.23", "vulns": [{"id": "PYSEC-1"}, {"id": "PYSEC-2"}]}
UNSEEN = {"name": "numpy", "skip_reason": "Dependency not found on PyPI and could not be audited: numpy"}


def judged(*packages: dict[str, Any], stderr: str = "") -> tuple[str, int]:
    stdout = json.dumps({"dependencies": packages}) if packages else ""
    return audit["judged"](audit["found"](subprocess.CompletedProcess([], 1, stdout, stderr)))


def test_a_known_vulnerability_fails() -> None:
    sentence, status = judged(CLEAN, KNOWN)
    assert status == 1 and "sglang 0.5.23: PYSEC-1\nsglang 0.5.23: PYSEC-2\n" in sentence


def test_a_clean_environment_passes() -> None:
    assert judged(CLEAN, CLEAN, UNSEEN) == ("2 packages audited, 0 known vulnerabilities.", 0)


@pytest.mark.parametrize("packages", [(), (UNSEEN, UNSEEN, CLEAN)])
def test_nothing_known_is_not_called_clean(packages: tuple[dict[str, Any], ...]) -> None:
    sentence, status = judged(*packages, stderr="warning: slow\nerror: no route to pypi.org")
    assert status == 0 and sentence.startswith("Not audited: ") and sentence.count("\n") == 0
    assert ("1 of 3 packages" if packages else "no route to pypi.org") in sentence
