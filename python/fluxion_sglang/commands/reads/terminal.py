"""Renders a picture in a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fluxion_sglang.commands.reads.colours import ERROR, PARTS, SHARE, colour, ink
from fluxion_sglang.commands.reads.picture import Picture
from fluxion_sglang.commands.reads.sentences import milliseconds, percent, scale_end, sentences

SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_POINTS = 40
_FEWEST_POINTS = 8
_BESIDE = 20
"""Columns of a row of the heat map without its cells and points."""
_BAR = 40
_LEGEND = 24
_ENDLESS = 10_000


def console_of(file: TextIO) -> Console:
    """The console for `rendered`. Without a terminal, lines have any length."""
    return Console(file=file, highlight=False, width=None if file.isatty() else _ENDLESS)


def rendered(picture: Picture, console: Console) -> RenderableType:
    """The whole picture, as wide as the console."""
    parts: list[RenderableType] = [_title(picture), Text()]
    parts += _heat(picture, console)
    if len(picture.timeline) > 1:
        parts += [Text(), *_over_time(picture)]
    if picture.parts:
        parts += [Text(), *_times(picture)]
    if picture.blocks:
        parts += [Text(), _blocks(picture)]
    if len(picture.policies) > 1:
        parts += [Text(), _policies(picture)]
    return Group(*parts, Text(), Text(" ".join(sentences(picture))))


def _title(picture: Picture) -> Text:
    counts = f"{picture.steps:,} decode steps, {picture.tokens:,} tokens"
    return Text.assemble((picture.source, "bold"), f"   {counts}")


# --- layers and heads ---


def _heat(picture: Picture, console: Console) -> Iterator[RenderableType]:
    if picture.errors is not None:
        values, scale, names = picture.errors, ERROR, "query heads"
        yield Text("Mean error of each query head, and the share of the middle that its layer reads")
    else:
        values, scale, names = picture.share, SHARE, "groups"
        yield Text("Share of the middle that each group (KV head) reads, by layer")
    end = scale_end(values)
    write = _error if picture.audited else percent
    cells = [[write(float(value)) for value in row] for row in values]
    width = max(len(cell) for row in cells for cell in row) + 2
    coloured = console.color_system is not None and not console.no_color
    # Show numbers if they fit, or if there are no colours; else only colours.
    if coloured and len(picture.columns) * width + _BESIDE + _FEWEST_POINTS > console.width:
        width, cells = 2, [[""] * len(row) for row in cells]
    room = console.width - len(picture.columns) * width - _BESIDE
    trend = picture.timeline.binned(min(_SPARK_POINTS, max(_FEWEST_POINTS, room))).shares()
    top = scale_end(trend)
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right")
    for _ in range(2 + (len(trend) > 1)):
        table.add_column(no_wrap=True, overflow="ignore")
    table.add_row("layer", _heads(picture.columns, width, names), " reads", "over time" if len(trend) > 1 else "")
    for i, layer in enumerate(picture.layers):
        row = Text()
        for value, cell in zip(values[i], cells[i], strict=True):
            back = colour(scale, float(value), end)
            row.append(cell.center(width), style=f"{ink(back)} on {back}")
        table.add_row(str(layer), row, f"{percent(float(picture.layer_share[i])):>6}", _spark(trend[:, i], top))
    yield table
    if coloured:
        yield _legend(scale, end, write)


def _heads(columns: Sequence[int], width: int, names: str) -> Text:
    if width == 2:
        return Text(f"{names} {columns[0]} to {columns[-1]}")
    return Text("".join(str(column).center(width) for column in columns))


def _legend(scale: Sequence[str], end: float, write: Callable[[float], str]) -> Text:
    legend = Text(f"{write(0.0):>8} ")
    for i in range(_LEGEND):
        legend.append(" ", style=f"on {colour(scale, i, _LEGEND - 1)}")
    return legend.append(f" {write(end)}")


def _error(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}".removeprefix("0")


# --- over time ---


def _over_time(picture: Picture) -> Iterator[RenderableType]:
    line = picture.timeline.binned(_SPARK_POINTS)
    total = line.total()
    there = total[np.isfinite(total)]
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "share read",
        _spark(total, scale_end(total)),
        f"{percent(float(there.min()))} to {percent(float(there.max()))}, last {percent(float(there[-1]))}",
    )
    if len(line.tokens_per_s):
        last = line.tokens_per_s[-1]
        table.add_row("tokens/s", _spark(line.tokens_per_s), f"mean {line.tokens_per_s.mean():,.0f}, last {last:,.0f}")
    yield table


def _spark(values: np.ndarray, end: float | None = None) -> str:
    """One character per value, from 0 to `end` or the largest; a blank for NaN."""
    if len(values) < 2:
        return ""
    known = values[np.isfinite(values)]
    top = end or (float(known.max()) if len(known) else 0.0) or 1.0
    last = len(SPARKS) - 1
    return "".join(" " if math.isnan(v) else SPARKS[min(last, round(v / top * last))] for v in values.tolist())


# --- where time goes ---


def _times(picture: Picture) -> Iterator[RenderableType]:
    whole = sum(picture.parts.values())
    yield Text(f"Where the {milliseconds(whole)} of a decode step go")
    table = Table.grid(padding=(0, 2))
    for part, text in picture.part_names.items():
        seconds = picture.parts.get(part, 0.0)
        bar = Text("█" * round(seconds / whole * _BAR), style=PARTS[part])
        table.add_row(text, bar, Text(milliseconds(seconds), justify="right"), percent(seconds / whole))
    yield table


def _blocks(picture: Picture) -> Text:
    names = {"streaming": "nothing", "sketched": "by sketches", "other": "by another package's rule"}
    said = [f"{names.get(block, f'blocks of {block}')} {percent(share)}" for block, share in picture.blocks.items()]
    return Text("What groups read: " + ", ".join(said))


def _policies(picture: Picture) -> Table:
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "right", "right", "right"):
        table.add_column(justify=justify)
    table.add_row("policy", "reads", "metadata", "mean error", "p99", "records")
    for row in picture.policies:
        table.add_row(
            row.policy,
            percent(row.share),
            percent(row.metadata),
            _error(row.error),
            _error(row.p99),
            f"{row.records:,}",
        )
    return table
