"""The report card: in a terminal, and as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from fluxion_sglang.commands.trial.figures import draw
from fluxion_sglang.commands.trial.results import Results
from fluxion_sglang.commands.trial.sections import Table, made, sections


def render(results: Results, drawn: bool = True) -> str:
    """The page. drawn: with pictures, which take a second to draw."""
    loader = PackageLoader("fluxion_sglang.commands.trial", ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2").render(
        name=Path(results.model.name).name or results.model.name,
        sections=sections(results),
        plots={name: Markup(svg) for name, svg in draw(results).items()} if drawn else {},
        made=made(results),
    )


def show(results: Results, console: Console) -> None:
    """Print every section. The recommendation comes last, so that it is visible at the end."""
    for section in sorted(sections(results), key=lambda section: bool(section.command)):
        shown: list[RenderableType] = [Text(sentence) for sentence in section.lead]
        if section.table is not None:
            shown.append(_table(section.table))
        if section.how:
            shown.append(Text(section.how, style="dim"))
        console.print()
        console.print(Text(section.title, style="bold"))
        for part in shown:
            console.print(Padding(part, (0, 0, 0, 2)))
        if section.command:
            # Not wrapped at any width, because it will be pasted.
            console.print(f"\n{section.command}\n", markup=False, highlight=False, soft_wrap=True, style="bold")


def _table(table: Table) -> RichTable:
    drawn = RichTable(box=box.SIMPLE_HEAD, show_header=any(table.columns), pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(table.columns):
        drawn.add_column(Text(column), justify="left" if i < table.left else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn
