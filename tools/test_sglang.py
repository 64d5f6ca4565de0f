"""Tests another version of SGLang: `make test-sglang VERSION=0.5.24`.

The version is installed into its own environment, .venv-sglang-VERSION, with this package in editable form; .venv has
the native library and the installer. Then `compat.py` reports missing names, and if there are none, the engine tests
run. Only here a version outside of the supported range is accepted.

OVERRIDE="cuda-tile==1.7.0" replaces packages that SGLang pins, because PyPI alone does not have all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV = ROOT / ".venv" / "bin" / "uv"
QUICK = ["test/engine/test_exact.py", "test/engine/test_policies.py"]
"""The default tests."""

FIND = """
from fluxion_sglang.sglang import compat
found = [compat.import_sglang(), *compat.problems()]
print("\\n".join(problem for problem in found if problem))
"""


def run(command: list[object], **more: str) -> int:
    return subprocess.run([str(word) for word in command], cwd=ROOT, env={**os.environ, **more}, check=False).returncode


def install(version: str, venv: Path, others: list[str]) -> int:
    """Install SGLang `version` and the tests' packages. `others` and this version override all other requirements."""
    if not venv.exists() and (code := run([sys.executable, "-m", "venv", venv])):
        return code
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as override:
        override.write("\n".join([f"sglang=={version}", *others]) + "\n")
        override.flush()
        install = [UV, "pip", "install", "-q", "--python", venv / "bin" / "python", "--override", override.name]
        return run([*install, "-e", ".[dev]", "-e", "python/fluxion_lab"], FLUXION_SKIP_NATIVE="1", UV_SYSTEM_CERTS="1")


def main(version: str, others: list[str], tests: list[str]) -> int:
    venv = ROOT / f".venv-sglang-{version}"
    if not Path(UV).exists():
        print(
            "error: this needs uv, which could not be installed with the rest; see .venv/install.log", file=sys.stderr
        )
        return 1
    print(f"Installing SGLang {version} into {venv.name}", flush=True)
    if code := install(version, venv, others):
        return code
    accepted = {"FLUXION_ACCEPT_SGLANG": version}
    python = venv / "bin" / "python"
    found = subprocess.run(
        [python, "-c", FIND], cwd=ROOT, env={**os.environ, **accepted}, stdout=subprocess.PIPE, text=True, check=False
    )
    problems = found.stdout.strip() or ("" if found.returncode == 0 else "compat.py itself failed.")
    print(f"compat.py, of SGLang {version}: {problems or 'every name is there'}", flush=True)
    if problems:
        return 1
    return run([python, "-m", "pytest", "-q", *(tests or QUICK)], **accepted)


if __name__ == "__main__":
    if len(sys.argv) < 2 or not sys.argv[1]:
        sys.exit("error: name a version: make test-sglang VERSION=0.5.24")
    sys.exit(main(sys.argv[1], os.environ.get("OVERRIDE", "").split(), sys.argv[2:]))
