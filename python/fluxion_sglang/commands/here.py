"""Formats commands and paths of this environment relative to the user's folder, ready to paste."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def program(name: str) -> str:
    """The command of this environment's `python` or `fluxion`."""
    own = Path(sys.executable) if name == "python" else Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if found is not None and Path(found).parent == own.parent:
        return name
    return shown(own) if own.exists() else f"{program('python')} -m fluxion_sglang"


def shown(path: Path) -> str:
    """A path, relative to the current folder if it is inside, quoted for a shell."""
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def shell(command: Sequence[str]) -> str:
    """A command line, in which this Python's path is shortened as the first word."""
    if command[0] != sys.executable:
        return shlex.join(command)
    return f"{program('python')} {shlex.join(command[1:])}"
