"""Draws TPOT against prompt length, a panel a model and batch size, from benchmark/results/*/one_batch.json.

python benchmark/plot.py    # writes one_batch.svg beside each result file; needs matplotlib
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import common


def draw(data: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    # No time stamps and stable ids: the same data gives the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "fluxion", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt

    rows = data["rows"]
    panels = sorted({(row["model"], row["batch"]) for row in rows})
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(3.1 * len(panels), 3), squeeze=False)
    for axis, (model, batch) in zip(axes[0], panels, strict=True):
        for policy in policies:
            points: dict[int, list[float]] = {}
            for row in rows:
                if (row["model"], row["batch"], row["policy"]) == (model, batch, policy):
                    points.setdefault(row["length"], []).append(row["tpot_ms"])
            lengths = sorted(points)
            axis.plot([n / 1024 for n in lengths], [median(points[n]) for n in lengths], "o-", label=policy)
        axis.set(title=f"{model}, batch {batch}", xlabel="prompt (1,024 tokens)", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("TPOT (ms)")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    for path in sorted(common.RESULTS.glob("*/one_batch.json")):
        data = common.load(path)
        if data and data["rows"]:
            draw(data, path.with_suffix(".svg"))
            print(path.with_suffix(".svg").relative_to(common.ROOT))


if __name__ == "__main__":
    main()
