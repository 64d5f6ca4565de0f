"""Draws docs/assets/overview.svg, the picture of README.md: what the bundled model's answers and steps cost.

python benchmark/overview.py    # needs matplotlib
"""

from __future__ import annotations

from statistics import median
from typing import Any

import common
from plot import pyplot

from fluxion_quality import table as quality_table

OUT = common.ROOT / "docs" / "assets" / "overview.svg"
MACHINE = "amd-epyc-2-cores"
DRAWN = ("quality_ruler.json", "one_batch_needle.json")
INK = "#808890"  # readable on white and on black
COLORS = {"full": "#e07b39", "fluxion": "#2f8fd8", "fixed": INK}


def main() -> None:
    plt = pyplot()
    plt.rcParams.update(dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK))
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.9))
    answers, steps = (_load(name) for name in DRAWN)
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
    OUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT, metadata={"Date": None, "Description": origin(answers, steps)})
    print(OUT.relative_to(common.ROOT))


def origin(*results: dict[str, Any]) -> str:
    """What the picture says of its results: a test tells by it that they are not older than the files."""
    return ", ".join(f"{data['benchmark']} of commit {data['commit']}" for data in results)


def _load(name: str) -> dict[str, Any]:
    found = common.load(common.RESULTS / MACHINE / name)
    if found is None:
        raise SystemExit(f"benchmark/results/{MACHINE}/{name} is missing; measure it with `make bench`.")
    return found


def _answers(axis: Any, data: dict[str, Any]) -> None:
    """Score against what is read, at the longest prompt."""
    rows = quality_table.averaged(data)
    length = max(length or 0 for length, *_ in rows)
    at = {policy: (row["read_fraction"] * 100, row["score"]) for size, policy, row in rows if size == length}
    fixed = sorted(point for policy, point in at.items() if policy.startswith("fixed:16:"))
    axis.plot(*zip(*fixed, strict=True), "o-", color=COLORS["fixed"], markersize=4)
    axis.annotate("fixed budgets", fixed[-1], (8, -4), textcoords="offset points", ha="left", color=COLORS["fixed"])
    for policy, offset, side in (("full", (0, -14), "right"), ("fluxion", (8, -4), "left")):
        axis.plot(*at[policy], "o", color=COLORS[policy], markersize=8)
        axis.annotate(policy, at[policy], offset, textcoords="offset points", ha=side, color=COLORS[policy])
    axis.set(title=f"Score, prompts of {length:,} tokens", xlabel="KV in host memory that is read (%)")
    axis.set(xlim=(0, 104), ylim=(0.7, 1.0))


def _steps(axis: Any, data: dict[str, Any]) -> None:
    """Time of a decode step against prompt length, at the largest batch."""
    top = 0.0
    batch = max(row["batch"] for row in data["rows"])
    for policy in ("full", "fluxion"):
        points: dict[int, list[float]] = {}
        for row in data["rows"]:
            if row["batch"] == batch and row["policy"] == policy:
                points.setdefault(row["length"], []).append(row["tpot_ms"])
        lengths = sorted(points)
        x, y = [n / 1024 for n in lengths], [median(points[n]) for n in lengths]
        top = max(top, *y)
        axis.plot(x, y, "o-", color=COLORS[policy])
        axis.annotate(policy, (x[-1], y[-1]), (-12, 0), textcoords="offset points", ha="right", color=COLORS[policy])
    axis.set(title=f"Time of a decode step, batch {batch} (ms)", xlabel="prompt (1,024 tokens)", ylim=(0, top * 1.1))


if __name__ == "__main__":
    main()
