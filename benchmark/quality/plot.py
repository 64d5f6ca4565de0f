"""Draws quality against the share of KV read: `python -m fluxion_quality.plot FILE` writes an SVG beside it.

Needs matplotlib: pip install 'fluxion-sglang[bench]'.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .plan import FULL
from .table import Row, averaged, family, render


def draw(data: dict[str, Any], path: Path) -> None:
    """A panel a length: mean score over tasks by the share of the middle's bytes that is read, a point a policy. Points
    of one family, such as `fixed:16`, share a colour and a line; `full`, and what reads nothing, are level lines.

    Args:
        path: of the image, an SVG.
    """
    import matplotlib

    matplotlib.use("svg")
    # No time stamps and stable ids: the same data gives the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "fluxion", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    rows = averaged(data)
    lengths = list(dict.fromkeys(length for length, _, _ in rows))
    families = dict.fromkeys(family(policy) for _, policy, _ in rows if policy != FULL)
    figure, axes = plt.subplots(1, max(len(lengths), 1), figsize=(3.4 * max(len(lengths), 1), 3.2), squeeze=False)
    for axis, length in zip(axes[0], lengths, strict=False):
        here = [(row["read_fraction"], policy, row) for at, policy, row in rows if at == length and _known(row)]
        here.sort(key=lambda point: point[0])
        for read, policy, row in here:
            if policy == FULL or not read:
                dashes = "--" if policy == FULL else ":"
                axis.axhline(row["score"], color="black", linewidth=0.8, linestyle=dashes, label=policy)
        for number, kind in enumerate(families):
            found = [(read * 100, row) for read, policy, row in here if read and family(policy) == kind]
            if found:
                at = [read for read, _ in found], [row["score"] for _, row in found]
                spread = list(zip(*(_spread(row) for _, row in found), strict=True))
                points: dict[str, Any] = {"fmt": "o-", "linewidth": 0.6, "capsize": 2, "color": f"C{number}"}
                axis.errorbar(*at, yerr=spread, label=kind, **points)
        axis.set(title="" if length is None else f"{length:,} tokens", xlabel="host KV read (%)", xscale="log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("mean over tasks")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _known(row: Row) -> bool:
    return row["read_fraction"] is not None and row["score"] is not None


def _spread(row: Row) -> tuple[float, float]:
    """How far the interval goes down and up from the score."""
    if row["delta_low"] is None:
        return 0.0, 0.0
    return max(row["delta"] - row["delta_low"], 0.0), max(row["delta_high"] - row["delta"], 0.0)


if __name__ == "__main__":
    render(lambda data, path: draw(data, path.with_suffix(".svg")), sys.argv[1:])
