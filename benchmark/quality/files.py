"""Finding and reading the files of published benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .base import MissingData


def find(data: Path | None, folders: Iterable[str], name: str, where: str) -> Path:
    """The file `name` in the first of `folders` (below `data`; "" is `data` itself) that has it.

    Args:
        where: where to get the file and what its rows hold; ends the sentence of the error.

    Raises:
        MissingData: it is in none of them.
    """
    if data is None:
        raise MissingData(f"Name a folder with {name} by --data: {where}.")
    places = [data / folder / name for folder in folders]
    for place in places:
        if place.is_file():
            return place
    raise MissingData(f"There is no {' or '.join(map(str, places))}: {where}.")


def read_rows(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a JSONL file (UTF-8, one object a line; empty lines are skipped).

    Raises:
        MissingData: a line is no JSON object with these fields; names the line.
    """
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = None
            if not isinstance(row, dict) or not row.keys() >= set(fields):
                raise MissingData(f"Line {number} of {path} is not a JSON object with {', '.join(fields)}.")
            rows.append(row)
    return rows
