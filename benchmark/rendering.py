"""How tables and the lines below them are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import common

from fluxion_quality.table import where

__all__ = ["link", "nothing", "result_files", "table", "where"]


def table(head: list[str], rows: list[list[str]], align: str) -> str:
    """A Markdown table; `align` has one of l, r a column."""
    rule = [{"l": "---", "r": "---:"}[a] for a in align]
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, rule, *rows])


def result_files(results: Path, name: str, part: str = "rows") -> list[tuple[Path, dict[str, Any]]]:
    files = [path for path in sorted(results.glob(f"*/{name}")) if not path.stem.endswith("_quick")]
    loaded = [(path, common.load(path)) for path in files]
    return [(path, data) for path, data in loaded if data is not None and data.get(part)]


def link(path: Path) -> str:
    return f"benchmark/results/{path.parent.name}/{path.name}"


def nothing(script: str) -> str:
    return f"Not measured yet: `python benchmark/{script}`.\n"
