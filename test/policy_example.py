"""The worked example of docs/extend.md as other processes find it: a folder with what its installation leaves there."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

from places import ROOT

PAGE = ROOT / "docs" / "extend.md"
EXAMPLES = dict(re.findall(r"<!-- example:(\S+) -->\n```\w+\n(.*?)```", PAGE.read_text(), re.S))


def install(folder: Path) -> Path:
    """Write the example's modules and metadata to `folder`, which is made, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in EXAMPLES.items():
        (folder / name).write_text(text)
    project = tomllib.loads(EXAMPLES["pyproject.toml"])["project"]
    metadata = folder / f"{project['name']}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    )
    (metadata / "entry_points.txt").write_text(groups)
    return folder


def search_path(folder: Path) -> str:
    """PYTHONPATH of a process that is to find what is in `folder`, beside what this one finds."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
