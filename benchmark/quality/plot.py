"""Draws quality against the share of KV read: `python -m fluxion_quality.plot FILE` writes an SVG beside it.

Needs matplotlib: pip install 'fluxion-sglang[bench]'.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .plan import FULL
from .table import averaged, render


def draw(data: dict[str, Any], path: Path) -> None:
    """A panel a length: mean score over tasks by fraction of host KV read, a point a policy, and a line at `full`.

    Args:
        path: of the image, an SVG.
    """
    import matplotlib

    matplotlib.use("svg")
    # No time stamps and stable ids: the same data gives the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "fluxion", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt

    rows = averaged(data)
    lengths = list(dict.fromkeys(length for length, _, _ in rows))
    figure, axes = plt.subplots(1, max(len(lengths), 1), figsize=(3.4 * max(len(lengths), 1), 3.2), squeeze=False)
    for axis, length in zip(axes[0], lengths, strict=False):
        for _, policy, row in (row for row in rows if row[0] == length):
            if policy == FULL:
                axis.axhline(row["score"], color="black", linewidth=0.8, linestyle="--", label=FULL)
            elif row["read_fraction"] is not None:
                low, high = row["delta_low"], row["delta_high"]
                spread = None if low is None else [[max(row["delta"] - low, 0)], [max(high - row["delta"], 0)]]
                axis.errorbar(row["read_fraction"] * 100, row["score"], yerr=spread, fmt="o", capsize=2, label=policy)
        axis.set(title="" if length is None else f"{length:,} tokens", xlabel="host KV read (%)")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("mean over tasks")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    render(lambda data, path: draw(data, path.with_suffix(".svg")), sys.argv[1:])
