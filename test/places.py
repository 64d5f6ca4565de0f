"""Places in the repository, and Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
NEEDLE = str(ROOT / "models" / "needle")
"""The bundled model."""


def python(*words: str, env: Mapping[str, str] | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these words; it can import everything that this process can.

    Args:
        env: environment variables in addition to this process's. more: as for `subprocess.run`.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=900, **more
    )
