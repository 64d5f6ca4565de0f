"""Plots and a table of what training saw and what came of it; matplotlib comes with the extra `train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fluxion_sglang.kv.placement import BLOCKS

_METHODS = {
    "predictor": "Predictor",
    "without_margins": "Without margins",
    "head_constant": "Constant a head",
    "anchor": "Anchor's budgets",
}


def metrics_table(metrics: Mapping[float, Mapping[str, Any]]) -> str:
    """A Markdown table for each tau, lowest first: the predictor beside both baselines.

    Args:
        metrics: by tau, those of `train.fit`.
    """
    return "\n".join(_table(tau, metrics[tau]) for tau in sorted(metrics))


def calibration_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of what every tau did to held-out sequences (the rows of `calibration.json`)."""
    head = ["policy", "KL", "answers right", "read", "error", "p99", "beyond tau"]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for row in rows:
        right = "" if row["right"] is None else f"{row['right']:.3f}"
        beyond = "" if row["beyond"] is None else f"{row['beyond']:.2%}"
        errors = f"{row['error_mean']:.4f} | {row['error_p99']:.4f}"
        lines.append(f"| {row['policy']} | {row['kl']:.2e} | {right} | {row['read']:.2%} | {errors} | {beyond} |")
    return "\n".join(lines) + "\n"


def _table(tau: float, metrics: Mapping[str, Any]) -> str:
    methods = {key: title for key, title in _METHODS.items() if key in metrics}
    rows: list[tuple[str, list[Any]]] = []

    def row(title: str, *path: str, percent: bool = False) -> None:
        values = []
        for method in methods:
            value: Any = metrics[method]
            for key in path:
                value = value.get(key) if value is not None else None
            values.append("n/a" if value is None else f"{100 * value:.1f}%" if percent else f"{value:.4f}")
        rows.append((title, values))

    row("Streaming heads, AUC", "streaming_auc")
    row("Streaming heads, F1", "streaming_f1")
    row("Streaming heads found", "streaming_recall", percent=True)
    row("Retrieval heads called streaming", "miss_rate", percent=True)
    for key, name in (("bgt0", "bgt0"), ("k", "k")):
        row(f"{name}, mean absolute error", f"{key}_mae")
        row(f"{name}, R²", f"{key}_r2")
    for blk in map(str, BLOCKS):
        row(f"Budget at {blk}, mean absolute error", "budget_mae", blk)
        row(f"Budget at {blk}, R²", "budget_r2", blk)
        row(f"Budget at {blk}, too small", "under_predicted", blk, percent=True)
        row(f"Budget at {blk}, mean (needed {_needed(metrics, blk)})", "mean_budget", blk, percent=True)
    samples, sequences = metrics["samples"]["test"], metrics["sequences"]["test"]
    head = (
        f"### tau {tau:.2f}\n\n{samples:,} samples of {sequences} test sequences, "
        f"{100 * metrics['streaming_share']:.1f}% of them streaming heads. Errors of bgt0, k and budgets are over the "
        "retrieval heads.\n\n"
    )
    lines = ["| | " + " | ".join(methods.values()) + " |", "|---|" + "---:|" * len(methods)]
    lines += [f"| {title} | " + " | ".join(values) + " |" for title, values in rows]
    return head + "\n".join(lines) + "\n"


def _needed(metrics: Mapping[str, Any], blk: str) -> str:
    return f"{100 * metrics['predictor']['mean_label'][blk]:.1f}%"


def plot_budgets_by_head(
    budgets: torch.Tensor, layers: Sequence[int], path: Path, *, titles: Sequence[str] = ("", "")
) -> None:
    """Least budget of every head under two criteria, a panel a layer (as in the paper's Fig. 4).

    Where the bars of the first criterion are high and those of the second low, the head deviates much and matters
    little.

    Args:
        budgets: [layers, Hq, 2], mean least budgets: by the head's own deviation, and by its deviation relative to the
            largest head.
        layers: number of each layer. path: file to write, its suffix says what format.
        titles: names of the two criteria.
    """
    figure, axes = _figure(len(layers))
    heads = torch.arange(budgets.shape[1]).numpy()
    for axis, layer, values in zip(axes, layers, budgets, strict=True):
        for j, (offset, colour) in enumerate(((-0.2, "tab:gray"), (0.2, "tab:blue"))):
            axis.bar(heads + offset, values[:, j].numpy(), 0.4, color=colour, label=titles[j] or None)
        axis.set(title=f"Layer {layer}", xlabel="Query head", ylim=(0, 1))
    axes[0].set_ylabel("Least budget")
    if any(titles):
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    _write(figure, path)


def plot_streaming_share(streaming: torch.Tensor, path: Path) -> None:
    """Share of samples in which each head streams, a heat map of layers and heads.

    Args:
        streaming: [layers, Hq] in [0, 1], NaN where there is no sample.
    """
    figure, (axis,) = _figure(1)
    image = axis.imshow(streaming.numpy(), vmin=0, vmax=1, aspect="auto", origin="lower", cmap="viridis")
    axis.set(xlabel="Query head", ylabel="Layer", title="Share of steps in which sinks and window suffice")
    figure.colorbar(image, ax=axis)
    _write(figure, path)


def plot_budget_by_block(budgets: torch.Tensor, blocks: Sequence[int], layers: Sequence[int], path: Path) -> None:
    """Least budget against block size, a line a head and a panel a layer (as in the paper's Fig. 5).

    Args:
        budgets: [layers, Hq, len(blocks)], mean least budgets; a head of zeros streams. NaN: no line.
        blocks: block sizes in tokens, ascending, such as 1, 16, 32, 64, 128.
    """
    figure, axes = _figure(len(layers))
    for axis, layer, values in zip(axes, layers, budgets, strict=True):
        for head, line in enumerate(values):
            axis.plot(list(blocks), line.numpy(), marker=".", linewidth=1, color=_colour(head, len(values)))
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(blocks), [str(blk) for blk in blocks])
        axis.set(title=f"Layer {layer}", xlabel="Block size (tokens)", ylim=(0, None))
    axes[0].set_ylabel("Least budget")
    _write(figure, path)


def _figure(panels: int) -> tuple[Any, Any]:
    # The object-oriented interface: no backend, no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4.5 * panels, 3.6), layout="constrained")
    return figure, figure.subplots(1, panels, sharey=True, squeeze=False)[0]


def _colour(index: int, count: int) -> Any:
    from matplotlib import colormaps

    return colormaps["turbo"]((index + 0.5) / count)


def _write(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
