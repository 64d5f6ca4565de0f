"""Pictures of the page, as SVG in a string; none without matplotlib."""

from __future__ import annotations

import io
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from fluxion_sglang.commands.trial.results import OFF, Results

_COLOURS = ("#8a8f98", "#1f5fa8", "#c2571a", "#2f7d4f", "#7a4fa3", "#a8323e")


def draw(results: Results) -> dict[str, str]:
    """SVG by the name in `Section.plot`."""
    if find_spec("matplotlib") is None:
        return {}
    import matplotlib

    batches = sorted({row.batch for row in results.decode})
    times = [[(row.policy, row.length, row.ms) for row in results.decode if row.batch == batch] for batch in batches]
    reads = [(row.policy, row.length, row.bytes_per_token / 2**20) for row in results.reads]
    # Keep text as text: it can be searched, and uses the page's font.
    settings: Any = {"svg.hashsalt": "fluxion", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
    pictures = {}
    with matplotlib.rc_context(settings):
        if len({row.length for row in results.decode}) > 1:
            titles = [f"batch {batch}" for batch in batches]
            pictures["speed"] = _picture(results, times, titles, "ms per output token", log=True)
        if len({row.length for row in results.reads}) > 1:
            pictures["reads"] = _picture(results, [reads], [""], "MiB read per output token", log=False)
    return pictures


def _picture(
    results: Results, panels: list[list[tuple[str, int, float]]], titles: Iterable[str], unit: str, log: bool
) -> str:
    """Plot one line a policy over lengths, in panels side by side.

    Args:
        panels: (policy, length, value).
        log: a logarithmic scale; else a linear one from 0.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    figure = Figure(figsize=(4.2 * len(panels), 3.0), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    lengths = results.lengths()
    for axis, title, points in zip(axes, titles, panels, strict=True):
        for i, policy in enumerate((OFF, *results.policies())):
            if mine := sorted((length, value) for name, length, value in points if name == policy):
                colour = _COLOURS[i % len(_COLOURS)]
                axis.plot(*zip(*mine, strict=True), "o-", label=policy, color=colour, linewidth=1.6, markersize=4)
        axis.set(title=title, xlabel="tokens", ylabel=unit)
        if log:
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(ScalarFormatter())
            axis.yaxis.set_minor_formatter(NullFormatter())
        else:
            axis.set_ylim(0, None)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{length / 1024:.0f}k" for length in lengths])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
