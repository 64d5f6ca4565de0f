"""Draws docs/assets/overview.svg, the picture of README.md: what answers and steps of a public model cost.

python benchmark/overview.py    # needs matplotlib
"""

from __future__ import annotations

from statistics import median
from typing import Any

import common
from plot import pyplot

OUT = common.ROOT / "docs" / "assets" / "overview.svg"
MACHINE = "amd-epyc-2-cores-zen4"
DRAWN = ("quality_smollm2.json", "one_batch_smollm2.json")
"""What policies cost in perplexity on real text, and times of steps."""
INK = "#808890"  # readable on white and on black
SKETCH, FULL, OTHERS = "#3a9d5d", "#e07b39", INK
TOP = 5.5
"""Percent of perplexity that the picture shows; what costs more is named at its top."""


def main() -> None:
    plt = pyplot()
    plt.rcParams.update(dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK))
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.9))
    drawn = answers, steps = [_load(name) for name in DRAWN]
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
    figure.savefig(OUT, metadata={"Date": None, "Description": origin(*drawn)})
    print(OUT.relative_to(common.ROOT))


def origin(*results: dict[str, Any]) -> str:
    """What the picture says of its results: a test tells by it that they are not older than the files."""
    return ", ".join(f"{data['benchmark']} of commit {data['commit']}" for data in results)


def _load(name: str) -> dict[str, Any]:
    found = common.load(common.RESULTS / MACHINE / name)
    if found is None:
        raise SystemExit(
            f"benchmark/results/{MACHINE}/{name} is missing; measure it with `make quality` and `make bench`."
        )
    return found


def _answers(axis: Any, data: dict[str, Any]) -> None:
    """Perplexity of a policy over that of `full`, and what it reads, at the longest prompt."""
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
    axis.text(
        0.98, 0.8, "\n".join(["off the top:", *above]), transform=axis.transAxes, ha="right", va="top", color=OTHERS
    )
    axis.set(title=f"Perplexity over full, {length:,} tokens (%)", xlabel="KV in host memory that is read (%)")
    axis.set(xlim=(0, 104), ylim=(-0.3, TOP))


def _steps(axis: Any, data: dict[str, Any]) -> None:
    """Time of a decode step against prompt length, at the largest batch."""
    top = 0.0
    batch = max(row["batch"] for row in data["rows"])
    for policy, color in (("full", FULL), ("sketch", SKETCH)):
        points: dict[int, list[float]] = {}
        for row in data["rows"]:
            if row["batch"] == batch and row["policy"] == policy:
                points.setdefault(row["length"], []).append(row["tpot_ms"])
        lengths = sorted(points)
        x, y = [n / 1024 for n in lengths], [median(points[n]) for n in lengths]
        top = max(top, *y)
        axis.plot(x, y, "o-", color=color)
        axis.annotate(policy, (x[-1], y[-1]), (-12, 6), textcoords="offset points", ha="right", color=color)
    axis.set(title=f"Time of a decode step, batch {batch} (ms)", xlabel="prompt (1,024 tokens)")
    axis.set(xlim=(0, None), ylim=(0, top * 1.15))


if __name__ == "__main__":
    main()
