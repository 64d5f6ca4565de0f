"""Render tables of result files: columns are data, and a line below each table names its sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import common

from fluxion_quality.table import grid

Row = dict[str, Any]
Data = dict[str, Any]
"""Contents of a result file."""
Cell = str | Callable[[Row], str]
"""How a column shows a row: a format of the row's fields, or a function. If a field is missing the cell is empty."""
Columns = Mapping[str, Cell]
"""Cells by heading; trailing spaces distinguish columns of the same heading."""


def columns_of(heads: str, row: str) -> dict[str, Cell]:
    """Columns from two lines of text, each split at " | "."""
    return dict(zip(heads.split(" | "), row.split(" | "), strict=True))


def table(columns: Columns, rows: Iterable[Row], align: str = "l") -> str:
    """A Markdown table; align: see `grid`."""
    lines = ([_shown(cell, row) for cell in columns.values()] for row in rows)
    return grid([head.rstrip() for head in columns], lines, align)


def _shown(cell: Cell, row: Row) -> str:
    try:
        return cell.format_map(row) if isinstance(cell, str) else cell(row)
    except (KeyError, TypeError):
        return ""


def at(*path: Any, form: str = "") -> Callable[[Row], str]:
    """A cell with the value at this path of keys."""

    def show(row: Row) -> str:
        value: Any = row
        for key in path:
            value = value[key]
        return form.format(value)

    return show


def over(one: Any, other: Any, form: str = "{:.1f}x") -> Callable[[Row], str]:
    """A cell with the ratio of two values."""
    return lambda row: form.format(row[one] / row[other])


def medians(rows: Iterable[Row], keys: Sequence[str], by: str, value: str) -> list[Row]:
    """Merge rows with equal `keys`: medians of `value`, by the rows' values of `by`."""
    found: dict[tuple[Any, ...], dict[Any, list[float]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), {}).setdefault(row[by], []).append(row[value])
    return [
        dict(zip(keys, place, strict=True)) | {name: median(values) for name, values in of.items()}
        for place, of in found.items()
    ]


def outer(rows: Iterable[Row], *keys: str) -> list[Row]:
    """The rows with the smallest or the largest value of each of these keys."""
    found = list(rows)
    for key in keys:
        values = [row[key] for row in found]
        found = [row for row in found if row[key] in (min(values), max(values))]
    return found


def result_files(results: Path, name: str) -> list[tuple[Path, Data]]:
    """Result files of a glob pattern that have rows, without those of --quick."""
    files = [path for path in sorted(results.glob(f"*/{name}")) if not path.stem.endswith("_quick")]
    loaded = [(path, common.load(path)) for path in files]
    return [(path, data) for path, data in loaded if data is not None and data.get("rows")]


def link(path: Path, text: str = "Data") -> str:
    return f"[{text}](benchmark/results/{path.parent.name}/{path.name})"


def machine(data: Data) -> str:
    """Short description of the machine of a result file."""
    of = data["machine"]
    name = of["cpu"] + (f" ({of['generation']})" if of.get("generation") else "")
    return f"{name}, {of['cores']} cores" + (f", {of['gpu']}" if of["gpu"] else "")


def sources(files: Iterable[tuple[Path, Data]]) -> str:
    """Sources of several files: each machine once, with links to its files."""
    found: dict[str, list[str]] = {}
    for path, data in files:
        found.setdefault(machine(data), []).append(link(path, path.stem))
    return " ".join(f"{name}. Data: {', '.join(of)}." for name, of in found.items())


def source(path: Path, data: Data, note: str = "") -> str:
    """The line below a table: `note`, machine, date, and a link to the file."""
    return f"{note} {machine(data)}, {data['date']}. {link(path)}.\n".lstrip()


def per_file(results: Path, files: str, draw: Callable[[Path, Data], str], command: str) -> str:
    """Output of `draw` for each file of a glob pattern; if there is none, the command that measures it."""
    return (
        "\n".join(draw(path, data) for path, data in result_files(results, files))
        or f"Not measured yet: `{command}`.\n"
    )


@dataclass(frozen=True)
class Table:
    """The same table for each result file of a name.

    Attributes:
        files: glob pattern of their name.
        columns, note: functions of a file, or constants. A note is a format of the file's fields, or a function.
        rows: function of a file.
        align: see `table`.
        command: how to measure it; default: the program of the file's name.
    """

    files: str
    columns: Columns | Callable[[Data], Columns]
    note: str | Callable[[Data], str] = ""
    rows: Callable[[Data], Iterable[Row]] = lambda data: data["rows"]
    align: str = "l"
    command: str = ""

    def __call__(self, results: Path) -> str:
        return per_file(results, self.files, self._draw, self._command)

    @property
    def _command(self) -> str:
        return self.command or f"python benchmark/{self.files.removesuffix('.json')}.py"

    def _draw(self, path: Path, data: Data) -> str:
        columns = self.columns(data) if callable(self.columns) else self.columns
        note = self.note(data) if callable(self.note) else self.note.format_map(data)
        return f"{table(columns, self.rows(data), self.align)}\n{source(path, data, note)}"
