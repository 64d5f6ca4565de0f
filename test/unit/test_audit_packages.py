"""Known vulnerabilities of what this package pulls in, by pip-audit and PyPI's advisories. Needs the network."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

WAIT_S = 600


def test_no_package_has_a_known_vulnerability() -> None:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed; `make test-all` installs it")
    command = [uv, "tool", "run", "pip-audit", "--progress-spinner", "off", "--format", "json"]
    command += ["--path", sysconfig.get_paths()["purelib"]]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip-audit took more than {WAIT_S} s; is there a network?")
    if not run.stdout.strip():
        pytest.skip(f"pip-audit did not run: {run.stderr.strip()[-200:]}")
    packages = json.loads(run.stdout)["dependencies"]
    # Without advisories pip-audit says of every package that it is not on PyPI, and ends well.
    audited = [package for package in packages if "skip_reason" not in package]
    if len(audited) < len(packages) / 2:
        pytest.skip(f"PyPI's advisories cannot be reached: {len(audited)} of {len(packages)} packages were audited")
    found = [f"{package['name']} {package['version']}: {v['id']}" for package in audited for v in package["vulns"]]
    assert not found, "\n".join(found)
