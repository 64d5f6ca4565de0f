"""Draw quality against the share of KV read: `python -m fluxion_quality.plot FILE` writes an SVG beside it.

Needs matplotlib: pip install 'fluxion-sglang[bench]'.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .plan import FULL
from .table import Row, averaged, family, pareto_front, render, yardstick

MARKERS = "osD^vP*X<>ph"


def draw(data: dict[str, Any], path: Path) -> None:
    """A panel per length: mean score over tasks against the share of the middle's bytes that is read, a point per
    policy. Points of one family, such as `fixed:16`, share a colour, a marker and a line. `full`, and policies that
    read nothing, are horizontal lines. A grey line shows the Pareto front of policies that can serve, except for
    perplexities. Yardsticks, which read everything to decide, are hollow.

    Args:
        path: of the image, an SVG.
    """
    import matplotlib

    matplotlib.use("svg")
    # No time stamps and stable ids, so that equal data gives equal files.
    matplotlib.rcParams.update({"svg.hashsalt": "fluxion", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    rows = averaged(data)
    lengths = list(dict.fromkeys(length for length, _, _ in rows))
    families = dict.fromkeys(family(policy) for _, policy, _ in rows if policy != FULL)
    more_is_better = all(row["measure"] == "score" for row in data["rows"])
    panels = max(len(lengths), 1)
    figure, axes = plt.subplots(1, panels, figsize=(3.4 * panels + 1, 3.2), squeeze=False, layout="constrained")
    for axis, length in zip(axes[0], lengths, strict=False):
        here = [(row["read_fraction"], policy, row) for at, policy, row in rows if at == length and _known(row)]
        here.sort(key=lambda point: point[0])
        for read, policy, row in here:
            if policy == FULL or not read:
                dashes = "--" if policy == FULL else ":"
                axis.axhline(row["score"], color="black", linewidth=0.8, linestyle=dashes, label=policy)
        if more_is_better:
            _draw_front(axis, {policy: row for read, policy, row in here if read and not yardstick(policy)})
        for number, kind in enumerate(families):
            found = [(read * 100, row) for read, policy, row in here if read and family(policy) == kind]
            if found:
                at = [read for read, _ in found], [row["score"] for _, row in found]
                spread = list(zip(*(_spread(row) for _, row in found), strict=True))
                points: dict[str, Any] = {"linewidth": 0.6, "capsize": 2, "color": f"C{number}", "markersize": 5}
                points["fmt"] = f"{MARKERS[number % len(MARKERS)]}-"
                points["fillstyle"] = "none" if yardstick(kind) else "full"
                axis.errorbar(*at, yerr=spread, label=kind, **points)
        axis.set(title="" if length is None else f"{length:,} tokens", xlabel="host KV read (%)", xscale="log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("mean over tasks")
    named = {name: line for axis in axes[0] for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), fontsize=7, loc="outside right upper")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _draw_front(axis: Any, rows: dict[str, Row]) -> None:
    front = pareto_front(rows, rows, "read_fraction")
    points = sorted((rows[policy]["read_fraction"] * 100, rows[policy]["score"]) for policy in front)
    if points:
        steps: dict[str, Any] = {"color": "grey", "linewidth": 5, "alpha": 0.25, "solid_capstyle": "butt"}
        axis.step(*zip(*points, strict=True), where="post", label="Pareto front", zorder=0, **steps)


def _known(row: Row) -> bool:
    return row["read_fraction"] is not None and row["score"] is not None


def _spread(row: Row) -> tuple[float, float]:
    """Distances from the score to the lower and upper end of the interval."""
    if row["delta_low"] is None:
        return 0.0, 0.0
    return max(row["delta"] - row["delta_low"], 0.0), max(row["delta_high"] - row["delta"], 0.0)


if __name__ == "__main__":
    render(lambda data, path: draw(data, path.with_suffix(".svg")), sys.argv[1:])
