"""The report as one HTML page, which needs no other file."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fluxion_sglang.commands.trial.figures import draw
from fluxion_sglang.commands.trial.results import Results
from fluxion_sglang.commands.trial.view import made, sections


def render(results: Results, drawn: bool = True) -> str:
    """The page; with or without pictures, which take a second to draw."""
    environment = Environment(
        loader=PackageLoader("fluxion_sglang.commands.trial", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plots = {name: Markup(svg) for name, svg in draw(results).items()} if drawn else {}
    return environment.get_template("report.html.j2").render(
        name=Path(results.model.name).name or results.model.name,
        sections=sections(results),
        plots=plots,
        made=made(results),
    )
