"""Draws TPOT, and attention time, against prompt length, a panel a model and batch size; and kernels against ceilings.

python benchmark/plot.py          # an svg beside each result file whose plot a page shows; needs matplotlib
python benchmark/plot.py FILE     # beside this one
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from statistics import median
from typing import Any

import common
from one_batch import MODELS
from race_tables import cells

FILES = (*(f"one_batch_{model}.json" for model in MODELS), "attention.json")
DRAWN = {"tpot_ms": "TPOT (ms)", "attention_ms": "attention (ms a layer)"}
"""What of a file's rows is drawn, and the name of its axis."""


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    # No time stamps and stable ids: the same data gives the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "fluxion", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt

    return plt


def draw(data: dict[str, Any], path: Path) -> None:
    plt = pyplot()
    rows = data["rows"]
    value = next(name for name in DRAWN if name in rows[0])
    panels = sorted({(row["model"], row["batch"]) for row in rows})
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(3.1 * len(panels), 3), squeeze=False)
    for axis, (model, batch) in zip(axes[0], panels, strict=True):
        for policy in policies:
            points: dict[int, list[float]] = {}
            for row in rows:
                if (row["model"], row["batch"], row["policy"]) == (model, batch, policy):
                    points.setdefault(row["length"], []).append(row[value])
            lengths = sorted(points)
            axis.plot([n / 1024 for n in lengths], [median(points[n]) for n in lengths], "o-", label=policy)
        axis.set(title=f"{model}, batch {batch}", xlabel="prompt (1,024 tokens)", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(DRAWN[value])
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_roofline(data: dict[str, Any], path: Path) -> None:
    """A bar a row of kernels.json: what it reads in a second, and what is read in a second without computing."""
    plt = pyplot()
    rows = [row for row in data["rows"] if row["gb_per_s"] and "scatter" in row][::-1]
    places = range(len(rows))
    figure, axis = plt.subplots(figsize=(8, 1 + 0.22 * len(rows)))
    colors = {kernel: f"C{i}" for i, kernel in enumerate(dict.fromkeys(row["kernel"] for row in rows[::-1]))}
    axis.barh(places, [row["gb_per_s"] for row in rows], color=[colors[row["kernel"]] for row in rows], height=0.7)
    for kind, mark in (("scatter", "|"), ("stream", "d")):
        axis.plot([row[kind] for row in rows], places, mark, color="black", label=kind, fillstyle="none")
    axis.set(xlabel="GB/s (10^9 bytes)", ylim=(-0.7, len(rows) - 0.3), xlim=(0, None))
    axis.set_yticks(places, [row["key"] for row in rows], fontsize=7)
    axis.grid(alpha=0.3, axis="x")
    axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_race(data: dict[str, Any], path: Path) -> None:
    """A decode step's time against depth, a panel a model of several depths and batch, a line an implementation."""
    plt = pyplot()
    rows = [row for row in data["rows"] if "decode_ms" in row]
    depths_of = {model: {row["depth"] for row in rows if row["model"] == model} for model in data["models"]}
    rows = [row for row in rows if len(depths_of[row["model"]]) > 1]
    panels = list(dict.fromkeys((row["model"], row["batch"]) for row in rows))
    panels.sort(key=lambda panel: panel[1])
    names = list(dict.fromkeys(row["system"] for row in rows))
    across = len({model for model, _ in panels})
    figure, axes = plt.subplots(
        len(panels) // across, across, figsize=(0.6 + 3.4 * across, 1 + 2.6 * len(panels) // across), squeeze=False
    )
    for axis, (model, batch) in zip(axes.flat, panels, strict=True):
        for name, depths in cells(row for row in rows if row["model"] == model).items():
            color = f"C{names.index(name)}"
            points = {
                depth: median(row["decode_ms"] for row in of if row["batch"] == batch)
                for depth, of in sorted(depths.items())
            }
            axis.plot([n / 1024 for n in points], list(points.values()), "o-", color=color, label=name)
        axis.set(title=f"{model}, batch {batch}", xlabel="context (1,024 tokens)", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
        axis.set_ylabel("a decode step (ms)")
    figure.tight_layout()
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, [label.replace("`", "") for label in labels], loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def shown() -> set[Path]:
    """The plots that README.md and the documentation show."""
    pages = [common.ROOT / "README.md", *common.ROOT.glob("docs/*.md")]
    found = {path for page in pages for path in re.findall(r"benchmark/results/[\w./-]+\.svg", page.read_text())}
    return {common.ROOT / path for path in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="result files to draw; default: those that a page shows")
    args = parser.parse_args()
    wanted = {path.resolve().with_suffix(".svg") for path in args.files} or shown()
    drawn = {**dict.fromkeys(FILES, draw), "kernels.json": draw_roofline, "race.json": draw_race}
    for path, how in ((path, how) for name, how in drawn.items() for path in sorted(common.RESULTS.glob(f"*/{name}"))):
        if path.with_suffix(".svg") not in wanted:
            continue
        data = common.load(path)
        if data and data["rows"]:
            how(data, path.with_suffix(".svg"))
            print(path.with_suffix(".svg").relative_to(common.ROOT))


if __name__ == "__main__":
    main()
