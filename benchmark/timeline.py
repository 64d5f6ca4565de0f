"""Draws where the time of decode steps goes on a device and beside it, layer by layer.

    python benchmark/timeline.py FILE...   # an svg beside each ..._timeline.json of one_batch.py; needs matplotlib

Lanes: the model's stream (queries out and attention to what is resident; what it then waits), and the CPU (its plan,
the middle). The device's clock is moved onto the host's, as exactly as `fluxion_sglang.device.timeline.clock_offset`
can; the error is in the title.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common

from fluxion_sglang.device.timeline import LayerTimes, clock_offset

Bars = list[tuple[float, float]]
"""Begin and length in microseconds."""
LANES = {
    "queries, residents": ("stream", "C0"),
    "wait": ("stream", "C3"),
    "plan": ("CPU", "C1"),
    "middle": ("CPU", "C2"),
}
"""What is drawn: its lane and color."""


DRAWN = 12
"""Layers, the first of the last step: more cannot be told apart."""


def bars(steps: Sequence[Sequence[LayerTimes]]) -> tuple[dict[str, Bars], float]:
    """What is drawn, from the first layer's publication on, and the error of the clocks in microseconds."""
    layers = [layer for step in steps for layer in step]
    offset, error = clock_offset(layers)
    start = layers[0].published + offset

    def bar(begin: int, end: int, since: int = start) -> tuple[float, float]:
        return (begin - since) / 1e3, (end - begin) / 1e3

    here = start - offset  # the same moment by the device's clock
    found = {
        "queries, residents": [bar(layer.published, layer.wait_begin, here) for layer in layers],
        "wait": [bar(layer.wait_begin, layer.wait_end, here) for layer in layers],
        "plan": [bar(layer.seen, layer.planned) for layer in layers],
        "middle": [bar(layer.planned, layer.answered) for layer in layers],
    }
    return found, error / 1e3


def draw(data: dict[str, Any], path: Path) -> None:
    """A panel a row of the file."""
    from plot import pyplot  # which needs to know the files of one_batch.py, which draws with this

    plt = pyplot()
    rows = data["rows"]
    figure, axes = plt.subplots(len(rows), 1, figsize=(12, 0.6 + 1.7 * len(rows)), squeeze=False)
    for axis, row in zip(axes[:, 0], rows, strict=True):
        layers = [LayerTimes._make(layer) for layer in row["steps"][-1][:DRAWN]]
        found, error = bars([layers])
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
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the timelines that one_batch.py recorded.")
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        data = common.load(path)
        if data and data["rows"]:
            draw(data, path.with_suffix(".svg"))
            print(path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
