"""Compares the packages of this environment with PyPI's advisories, by pip-audit: `make audit`.

The exit status is 1 if a package has a known vulnerability. If the advisories are unavailable, one sentence says so,
and the status is 0, so that a build without a network continues.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

WAIT_S = 600


def found(run: subprocess.CompletedProcess[str]) -> list[dict[str, Any]] | str:
    """pip-audit's results by package, or the reason why there are none."""
    if not run.stdout.strip():
        return (run.stderr.strip() or f"exit status {run.returncode}").splitlines()[-1]
    packages: list[dict[str, Any]] = json.loads(run.stdout)["dependencies"]
    # Without advisories pip-audit reports every package as missing on PyPI, and succeeds.
    compared = [package for package in packages if "skip_reason" not in package]
    if len(compared) < len(packages) / 2:
        return f"PyPI told it of {len(compared)} of {len(packages)} packages"
    return compared


def judged(packages: list[dict[str, Any]] | str) -> tuple[str, int]:
    """The text to print, and the exit status."""
    if isinstance(packages, str):
        return f"Not audited: the advisories of PyPI cannot be had here ({packages}).", 0
    known = [f"{package['name']} {package['version']}: {one['id']}" for package in packages for one in package["vulns"]]
    return "\n".join([*known, f"{len(packages)} packages audited, {len(known)} known vulnerabilities."]), bool(known)


def main() -> int:
    uv = Path(sys.executable).with_name("uv")
    # pip-audit runs in an environment of its own, so that its dependencies are not audited.
    command = [str(uv), "tool", "run", "pip-audit", "--progress-spinner", "off", "--format", "json"]
    command += ["--path", sysconfig.get_paths()["purelib"]]
    try:
        said = found(subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S))
    except subprocess.TimeoutExpired:
        said = f"no answer within {WAIT_S} s"
    except OSError as error:
        said = f"{uv}: {error.strerror}"
    sentence, status = judged(said)
    print(sentence)
    return status


if __name__ == "__main__":
    sys.exit(main())
