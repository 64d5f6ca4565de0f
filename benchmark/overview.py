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
DRAWN = ("quality_sketch.json", "quality_ruler.json", "one_batch_sketch.json")
"""Answers of the policies that serve and of fixed budgets, and times of steps."""
INK = "#808890"  # readable on white and on black
COLORS = {"full": "#e07b39", "fluxion": "#2f8fd8", common.SKETCH: "#3a9d5d", "fixed": INK}


def main() -> None:
    plt = pyplot()
    plt.rcParams.update(dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK))
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.9))
    drawn = answers, fixed, steps = [_load(name) for name in DRAWN]
    _answers(left, answers, fixed)
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
    figure.savefig(OUT, metadata={"Date": None, "Description": origin(*drawn)})
    print(OUT.relative_to(common.ROOT))


def origin(*results: dict[str, Any]) -> str:
    """What the picture says of its results: a test tells by it that they are not older than the files."""
    return ", ".join(f"{data['benchmark']} of commit {data['commit']}" for data in results)


def _load(name: str) -> dict[str, Any]:
    found = common.load(common.RESULTS / MACHINE / name)
    if found is None:
        raise SystemExit(f"benchmark/results/{MACHINE}/{name} is missing; measure it with `make bench`.")
    return found


def _answers(axis: Any, data: dict[str, Any], fixed: dict[str, Any]) -> None:
    """What a policy loses against `full`, of the same documents, and what it reads, at the longest prompt of `data`."""
    length = max(row["length"] for row in data["rows"])
    at, cut = (
        {
            policy: (row["read_fraction"] * 100, row["delta"] * 100)
            for size, policy, row in quality_table.averaged(found)
            if size == length
        }
        for found in (data, fixed)
    )
    line = sorted(point for policy, point in cut.items() if policy.startswith("fixed:16:"))
    axis.plot(*zip(*line, strict=True), "o-", color=COLORS["fixed"], markersize=4)
    axis.annotate(
        "fixed budgets (fewer documents)",
        line[-1],
        (8, -4),
        textcoords="offset points",
        ha="left",
        color=COLORS["fixed"],
    )
    labels = {"full": ((0, 8), "right"), "fluxion": ((8, -10), "left"), common.SKETCH: ((-8, 4), "right")}
    for policy, (offset, side) in labels.items():
        axis.plot(*at[policy], "o", color=COLORS[policy], markersize=8)
        axis.annotate(policy, at[policy], offset, textcoords="offset points", ha=side, color=COLORS[policy])
    axis.set(title=f"Points of 100 against full, {length:,} tokens", xlabel="KV in host memory that is read (%)")
    axis.set(xlim=(0, 104), ylim=(min(y for _, y in line) - 2, 3))


def _steps(axis: Any, data: dict[str, Any]) -> None:
    """Time of a decode step against prompt length, at the largest batch."""
    top = 0.0
    batch = max(row["batch"] for row in data["rows"])
    for policy in ("full", "fluxion", common.SKETCH):
        points: dict[int, list[float]] = {}
        for row in data["rows"]:
            if row["batch"] == batch and row["policy"] == policy:
                points.setdefault(row["length"], []).append(row["tpot_ms"])
        lengths = sorted(points)
        x, y = [n / 1024 for n in lengths], [median(points[n]) for n in lengths]
        top = max(top, *y)
        axis.plot(x, y, "o-", color=COLORS[policy])
        offset = (-12, -14 if policy == "fluxion" else 0)
        axis.annotate(policy, (x[-1], y[-1]), offset, textcoords="offset points", ha="right", color=COLORS[policy])
    axis.set(title=f"Time of a decode step, batch {batch} (ms)", xlabel="prompt (1,024 tokens)", ylim=(0, top * 1.1))


if __name__ == "__main__":
    main()
