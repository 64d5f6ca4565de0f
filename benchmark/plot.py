"""Draws TPOT, and attention time, against prompt length, a panel a model and batch size.

python benchmark/plot.py    # an svg beside each result file of one_batch.py and attention.py; needs matplotlib
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import common

FILES = ("one_batch_*.json", "attention.json")
DRAWN = {"tpot_ms": "TPOT (ms)", "attention_ms": "attention (ms a layer)"}
"""What of a file's rows is drawn, and the name of its axis."""


def draw(data: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    # No time stamps and stable ids: the same data gives the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "fluxion", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt

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


def main() -> None:
    for path in sorted(path for name in FILES for path in common.RESULTS.glob(f"*/{name}")):
        if path.stem.endswith("_quick"):
            continue
        data = common.load(path)
        if data and data["rows"]:
            draw(data, path.with_suffix(".svg"))
            print(path.with_suffix(".svg").relative_to(common.ROOT))


if __name__ == "__main__":
    main()
