"""Draw the plots of README.md and docs/ from result files; needs matplotlib.

    python benchmark/plot.py          # an svg beside each result file whose plot a page shows, and the overview
    python benchmark/plot.py FILE...  # an svg beside each of these

one_batch.py and attention.py: time against prompt length, a panel per model and batch. kernels.py: rows beside
ceilings. race.py: steps against depth. Timelines of one_batch.py: the time of decode steps on a device and on the CPU,
layer by layer.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import common
from rendering import Data, Row, medians

from fluxion_sglang.device.timeline import LayerTimes, clock_offset

TIMES = {"tpot_ms": "TPOT (ms)", "attention_ms": "attention (ms a layer)"}
"""Columns that are plotted against length, with their axis labels."""


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    # No time stamps and stable ids, so that equal data gives equal files.
    matplotlib.rcParams.update({"svg.hashsalt": "fluxion", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path, description: str | None = None, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    said = {} if description is None else {"Description": description}
    figure.savefig(path, metadata={"Date": None, **said}, **options)
    pyplot().close(figure)


def line(axis: Any, rows: Iterable[Row], x: str, value: str, **options: Any) -> tuple[list[float], list[float]]:
    """Plot medians of `value` against x in units of 1,024; return the plotted points."""
    of = next(iter(medians(rows, (), x, value)), {})
    places = sorted(of)
    at, values = [n / 1024 for n in places], [of[n] for n in places]
    axis.plot(at, values, "o-", **options)
    return at, values


def draw_lengths(data: Data, path: Path) -> None:
    rows = data["rows"]
    value = next(name for name in TIMES if name in rows[0])
    panels = sorted({(row["model"], row["batch"]) for row in rows})
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    figure, axes = pyplot().subplots(1, len(panels), figsize=(3.1 * len(panels), 3), squeeze=False)
    for axis, (model, batch) in zip(axes[0], panels, strict=True):
        here = [row for row in rows if (row["model"], row["batch"]) == (model, batch)]
        for policy in policies:
            line(axis, [row for row in here if row["policy"] == policy], "length", value, label=policy)
        axis.set(title=f"{model}, batch {batch}", xlabel="prompt (1,024 tokens)", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(TIMES[value])
    axes[0][0].legend()
    figure.tight_layout()
    save(figure, path)


def draw_roofline(data: Data, path: Path) -> None:
    """A bar per row of kernels.json: its bytes per second, beside those of reading without computing."""
    rows = [row for row in data["rows"] if row["gb_per_s"] and "scatter" in row][::-1]
    places = range(len(rows))
    figure, axis = pyplot().subplots(figsize=(8, 1 + 0.22 * len(rows)))
    colors = {kernel: f"C{i}" for i, kernel in enumerate(dict.fromkeys(row["kernel"] for row in rows[::-1]))}
    axis.barh(places, [row["gb_per_s"] for row in rows], color=[colors[row["kernel"]] for row in rows], height=0.7)
    for kind, mark in (("scatter", "|"), ("stream", "d")):
        axis.plot([row[kind] for row in rows], places, mark, color="black", label=kind, fillstyle="none")
    axis.set(xlabel="GB/s (10^9 bytes)", ylim=(-0.7, len(rows) - 0.3), xlim=(0, None))
    axis.set_yticks(places, [row["key"] for row in rows], fontsize=7)
    axis.grid(alpha=0.3, axis="x")
    axis.legend(loc="lower right")
    figure.tight_layout()
    save(figure, path)


def draw_race(data: Data, path: Path) -> None:
    """A panel per model with several depths and per batch, a line per implementation."""
    rows = [row for row in data["rows"] if "decode_ms" in row]
    depths_of = {model: {row["depth"] for row in rows if row["model"] == model} for model in data["models"]}
    rows = [row for row in rows if len(depths_of[row["model"]]) > 1]
    panels = sorted(dict.fromkeys((row["model"], row["batch"]) for row in rows), key=lambda panel: panel[1])
    names = list(dict.fromkeys(row["system"] for row in rows))
    across = len({model for model, _ in panels})
    size = (0.6 + 3.4 * across, 1 + 2.6 * len(panels) // across)
    figure, axes = pyplot().subplots(len(panels) // across, across, figsize=size, squeeze=False)
    for axis, (model, batch) in zip(axes.flat, panels, strict=True):
        here = [row for row in rows if (row["model"], row["batch"]) == (model, batch)]
        for name in dict.fromkeys(row["system"] for row in here):
            own = [row for row in here if row["system"] == name]
            line(axis, own, "depth", "decode_ms", color=f"C{names.index(name)}", label=name)
        axis.set(title=f"{model}, batch {batch}", xlabel="context (1,024 tokens)", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
        axis.set_ylabel("a decode step (ms)")
    figure.tight_layout()
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, [label.replace("`", "") for label in labels], loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path, bbox_inches="tight")


# A timeline of decode steps

LANES = {
    "queries, residents": ("stream", "C0"),
    "wait": ("stream", "C3"),
    "plan": ("CPU", "C1"),
    "middle": ("CPU", "C2"),
}
"""Plotted parts: their lane (the model's stream or the CPU) and colour."""
SHOWN_LAYERS = 12
"""Layers shown from the last step; more would be indistinguishable."""
Bars = list[tuple[float, float]]
"""Begin and length in microseconds."""


def bars(steps: Sequence[Sequence[LayerTimes]]) -> tuple[dict[str, Bars], float]:
    """Bars by part, relative to the first layer's publication, and the error of the clocks in microseconds.

    The device's clock is shifted onto the host's with the accuracy of `clock_offset`.
    """
    layers = [layer for step in steps for layer in step]
    offset, error = clock_offset(layers)
    start = layers[0].published + offset

    def bar(begin: int, end: int, since: int = start) -> tuple[float, float]:
        return (begin - since) / 1e3, (end - begin) / 1e3

    here = start - offset  # the same moment on the device's clock
    found = {
        "queries, residents": [bar(layer.published, layer.wait_begin, here) for layer in layers],
        "wait": [bar(layer.wait_begin, layer.wait_end, here) for layer in layers],
        "plan": [bar(layer.seen, layer.planned) for layer in layers],
        "middle": [bar(layer.planned, layer.answered) for layer in layers],
    }
    return found, error / 1e3


def draw_timeline(data: Data, path: Path) -> None:
    """A panel per row of the file."""
    rows = data["rows"]
    figure, axes = pyplot().subplots(len(rows), 1, figsize=(12, 0.6 + 1.7 * len(rows)), squeeze=False)
    for axis, row in zip(axes[:, 0], rows, strict=True):
        found, error = bars([[LayerTimes._make(layer) for layer in row["steps"][-1][:SHOWN_LAYERS]]])
        lanes = list(dict.fromkeys(lane for lane, _ in LANES.values()))
        for name, some in found.items():
            lane, color = LANES[name]
            axis.broken_barh(some, (lanes.index(lane) - 0.35, 0.7), color=color, label=name)
        axis.set_yticks(range(len(lanes)), lanes)
        axis.invert_yaxis()
        place = f"{row['model']}, {row['length']:,} tokens, batch {row['batch']}, {row['policy']}"
        axis.set_title(f"{place}; clocks to {error:.1f} us", fontsize=9, loc="left")
    axes[0][0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(LANES), fontsize=7, frameon=False)
    axes[-1][0].set_xlabel("us")
    figure.tight_layout()
    save(figure, path)


# Overview of README.md: cost of answers and time of steps with a public model

OVERVIEW = common.ROOT / "docs" / "assets" / "overview.svg"
SHOWN = [common.RESULTS / "amd-epyc-2-cores-zen4" / f"{name}_smollm2.json" for name in ("quality", "one_batch")]
"""Result files of perplexity on real text, and of step times."""
INK = "#808890"  # readable on white and on black
SKETCH, FULL, OTHERS = "#3a9d5d", "#e07b39", INK
TOP = 5.5
"""Percent of perplexity that the plot shows; policies beyond it are listed at its top."""


def draw_overview() -> None:
    answers, steps = (json.loads(path.read_text()) for path in SHOWN)
    plt = pyplot()
    with plt.rc_context(dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)):
        figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.9))
        _answers(left, answers)
        _steps(right, steps)
        for axis in (left, right):
            axis.set_facecolor("none")
            axis.grid(alpha=0.25, color=INK)
            for side, spine in axis.spines.items():
                spine.set_visible(side in ("left", "bottom"))
                spine.set_color(INK)
        figure.patch.set_alpha(0)
        figure.tight_layout()
        save(figure, OVERVIEW, origin(answers, steps))


def origin(*results: Data) -> str:
    """Origin of the results, stored in the plot. A test compares it with the files to find an outdated plot."""
    return ", ".join(f"{data['benchmark']} of commit {data['commit']}" for data in results)


def _answers(axis: Any, data: Data) -> None:
    """Perplexity of policies relative to `full` against the KV that they read, at the longest prompt."""
    length = max(row["length"] for row in data["rows"])
    rows = {row["policy"]: row for row in data["rows"] if row["length"] == length}
    whole = rows["full"]["score"]
    at = {policy: (100 * row["read_fraction"], 100 * (row["score"] / whole - 1)) for policy, row in rows.items()}
    curve = sorted(point for policy, point in at.items() if policy.startswith("sketch") and point[1] <= TOP)
    axis.plot(*zip(*curve, strict=True), "o-", color=SKETCH, markersize=4)
    axis.plot(*at["sketch"], "o", color=SKETCH, markersize=8)
    axis.annotate("sketch (no training)", at["sketch"], (8, 18), textcoords="offset points", color=SKETCH)
    above = []
    for policy, point in at.items():
        if policy.startswith("sketch"):
            continue
        if point[1] > TOP:
            above.append(f"{policy} +{point[1]:.0f}%")
            continue
        full = policy == "full"
        color, offset, side = (FULL, -8, "right") if full else (OTHERS, 7, "left")
        axis.plot(*point, "o", color=color, markersize=8 if full else 5)
        axis.annotate(policy, point, (offset, 6), textcoords="offset points", ha=side, color=color)
    said = "\n".join(["off the top:", *above])
    axis.text(0.98, 0.8, said, transform=axis.transAxes, ha="right", va="top", color=OTHERS)
    axis.set(title=f"Perplexity over full, {length:,} tokens (%)", xlabel="KV in host memory that is read (%)")
    axis.set(xlim=(0, 104), ylim=(-0.3, TOP))


def _steps(axis: Any, data: Data) -> None:
    """Time of a decode step against prompt length, at the largest batch."""
    top, batch = 0.0, max(row["batch"] for row in data["rows"])
    for policy, color in (("full", FULL), ("sketch", SKETCH)):
        own = [row for row in data["rows"] if row["batch"] == batch and row["policy"] == policy]
        x, y = line(axis, own, "length", "tpot_ms", color=color)
        top = max(top, *y)
        axis.annotate(policy, (x[-1], y[-1]), (-12, 6), textcoords="offset points", ha="right", color=color)
    axis.set(title=f"Time of a decode step, batch {batch} (ms)", xlabel="prompt (1,024 tokens)")
    axis.set(xlim=(0, None), ylim=(0, top * 1.15))


def drawer(path: Path) -> Any:
    """Function that draws a result file; None if there is none."""
    if path.stem.endswith("_timeline"):
        return draw_timeline
    if path.stem.startswith("one_batch_"):
        return draw_lengths
    return {"attention": draw_lengths, "kernels": draw_roofline, "race": draw_race}.get(path.stem)


def shown() -> list[Path]:
    """Result files whose plots README.md and the documentation show."""
    pages = [common.ROOT / "README.md", *common.ROOT.glob("docs/**/*.md")]
    found = {path for page in pages for path in re.findall(r"benchmark/results/[\w./-]+\.svg", page.read_text())}
    return [common.ROOT / path.removesuffix(".svg") for path in sorted(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="result files to draw; default: those that a page shows")
    files = parser.parse_args().files
    for path in (path.with_suffix(".json") for path in files or shown()):
        draw, data = drawer(path), common.load(path)
        if draw and data and data["rows"]:
            draw(data, path.with_suffix(".svg"))
            print(path.with_suffix(".svg"))
    if not files:
        draw_overview()
        print(OVERVIEW)


if __name__ == "__main__":
    main()
