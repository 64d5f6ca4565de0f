"""The report in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from fluxion_sglang.commands.trial.results import Results
from fluxion_sglang.commands.trial.view import Section, Table, sections


def show(results: Results, console: Console) -> None:
    """Print every section; the recommendation comes last, where the eye is."""
    found = sections(results)
    last = [section for section in found if section.command]
    for section in [*(section for section in found if not section.command), *last]:
        _show(section, console)


def _show(section: Section, console: Console) -> None:
    console.print()
    console.print(Text(section.title, style="bold"))
    for sentence in section.lead:
        console.print(Padding(Text(sentence), (0, 0, 0, 2)))
    if section.table is not None:
        console.print(Padding(_table(section.table), (0, 0, 0, 2)))
    if section.how:
        console.print(Padding(Text(section.how, style="dim"), (0, 0, 0, 2)))
    if section.command:
        # As it is, whatever the width: a line that was wrapped could not be pasted.
        console.print(f"\n{section.command}\n", markup=False, highlight=False, soft_wrap=True, style="bold")


def _table(table: Table) -> RichTable:
    drawn = RichTable(box=box.SIMPLE_HEAD, show_header=any(table.columns), pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(table.columns):
        drawn.add_column(Text(column), justify="left" if i < table.left else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn
