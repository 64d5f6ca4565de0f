"""The worked example of docs/extend.md as an installed package: a folder with its modules and metadata."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

from places import ROOT

PAGE = ROOT / "docs" / "extend.md"
EXAMPLES = dict(re.findall(r"<!-- example:(\S+) -->\n```\w+\n(.*?)```", PAGE.read_text(), re.S))


def install(folder: Path) -> Path:
    """Write the example's modules and metadata to `folder`, which is created, and return it."""
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
    """PYTHONPATH with `folder` in addition to this process's."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
