"""Where things of the repository are, and Python in a process of its own."""

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
    """Python with these words, which imports what this process can import.

    Args:
        env: variables beside this process's. more: as of `subprocess.run`.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=900, **more
    )
