"""Pictures of the page, as SVG in a string; none where matplotlib is not installed."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import Any

from fluxion_sglang.commands.trial.results import OFF, Results

_COLOURS = ("#8a8f98", "#1f5fa8", "#c2571a", "#2f7d4f", "#7a4fa3", "#a8323e")


def draw(results: Results) -> dict[str, str]:
    """SVG by the name that `view.Section.plot` uses."""
    if find_spec("matplotlib") is None:
        return {}
    import matplotlib

    # Text stays text: it can be searched, and takes the page's font.
    settings: Any = {"svg.hashsalt": "fluxion", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
    pictures = {}
    with matplotlib.rc_context(settings):
        if len({row.length for row in results.decode}) > 1:
            pictures["speed"] = _speed(results)
        if len({row.length for row in results.reads}) > 1:
            pictures["reads"] = _reads(results)
    return pictures


def _speed(results: Results) -> str:
    batches = sorted({row.batch for row in results.decode})
    figure, axes = _panels(len(batches))
    for axis, batch in zip(axes, batches, strict=True):
        for policy in (OFF, *results.policies()):
            rows = [r for r in results.decode if (r.batch, r.policy) == (batch, policy)]
            _line(axis, results, policy, [(row.length, row.ms) for row in rows])
        axis.set(title=f"batch {batch}", yscale="log")
        _numbers(axis.yaxis)
        axis.set_ylabel("ms per output token")
    return _svg(figure, axes, results)


def _reads(results: Results) -> str:
    figure, axes = _panels(1)
    for policy in results.policies():
        rows = [row for row in results.reads if row.policy == policy]
        _line(axes[0], results, policy, [(row.length, row.bytes_per_token / 2**20) for row in rows])
    axes[0].set(ylim=(0, None))
    axes[0].set_ylabel("MiB read per output token")
    return _svg(figure, axes, results)


def _panels(count: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * count, 3.0))
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _line(axis: Any, results: Results, policy: str, points: list[tuple[int, float]]) -> None:
    if points:
        colour = _COLOURS[[OFF, *results.policies()].index(policy) % len(_COLOURS)]
        xs, ys = zip(*sorted(points), strict=True)
        axis.plot(xs, ys, "o-", label=policy, color=colour, linewidth=1.6, markersize=4)


def _numbers(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    formatter = ScalarFormatter()
    formatter.set_scientific(False)
    axis.set_major_formatter(formatter)
    axis.set_minor_formatter(NullFormatter())


def _svg(figure: Any, axes: list[Any], results: Results) -> str:
    for axis in axes:
        lengths = results.lengths()
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{length / 1024:.0f}k" for length in lengths])
        axis.set_xlabel("tokens")
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
