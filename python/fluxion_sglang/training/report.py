"""Reports training results: a page in Markdown, and plots if matplotlib is installed (the extra `train`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.predictor.features import INDEX
from fluxion_sglang.training import tau as calibration
from fluxion_sglang.training.scores import Samples

_METHODS = {
    "predictor": "Predictor",
    "without_margins": "Without margins",
    "head_constant": "Constant a head",
    "anchor": "Anchor's budgets",
}


def write(
    folder: Path,
    layers: int,
    metrics: Mapping[float, Mapping[str, Any]],
    calibrated: dict[str, Any],
    samples: Samples,
    lse_errors: torch.Tensor,
) -> None:
    """Write `report.md`, and plots like the paper's figures 4 and 5.

    Args:
        layers: of the model. metrics: by tau. calibrated: from `calibration.outcome`.
        samples: samples whose labels are plotted. lse_errors: from `dataset.lse_errors`.
    """
    absolute = lse_errors.abs().numpy()
    lines = ["# Predictor", "", metrics_table(metrics), "", calibration_table(calibrated["rows"])]
    lines += [
        calibration.verdict(calibrated),
        "",
        f"The moment approximation of the LSE over the middle, less the exact one: mean {lse_errors.mean():+.2f}, "
        # torch's quantile refuses more than 16M numbers.
        f"mean absolute {absolute.mean():.2f}, 99th percentile of the absolute {np.quantile(absolute, 0.99):.2f}.",
    ]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    if find_spec("matplotlib") is None:
        print("No plots without matplotlib; install it with: pip install 'fluxion-sglang[train]'.")
        return
    layer, head = (samples.features[:, INDEX[name]].long() for name in ("layer", "head"))
    heads = int(head.max()) + 1
    at = layer * heads + head

    def mean(values: torch.Tensor) -> torch.Tensor:
        """The mean by head, [layers, heads, ...], of [S, ...]."""
        values = values.float().view(len(values), -1)
        sums = torch.zeros(layers * heads, values.shape[1]).index_add_(0, at, values)
        return (sums / torch.bincount(at, minlength=layers * heads).clamp(min=1).unsqueeze(1)).view(layers, heads, -1)

    by_block = mean(samples.budgets)
    plot_streaming_share(mean(samples.streaming)[..., 0], folder / "streaming.svg")
    plot_budgets_by_head(by_block[..., [0, -1]], range(layers), folder / "budgets.svg", titles=("16", "128"))
    plot_budget_by_block(by_block, BLOCKS, range(layers), folder / "blocks.svg")


def metrics_table(metrics: Mapping[float, Mapping[str, Any]]) -> str:
    """A Markdown table for each tau, lowest first: the predictor and the baselines.

    Args:
        metrics: by tau, from `train.fit`.
    """
    return "\n".join(_table(tau, metrics[tau]) for tau in sorted(metrics))


def calibration_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of the rows of `calibration.json`: the effect of every tau on held-out sequences."""
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
    lines = [f"| | {' | '.join(methods.values())} |", "|---|" + "---:|" * len(methods)]

    def row(title: str, name: str, blk: str = "", percent: bool = False) -> None:
        found = (metrics[method][name] for method in methods)
        values = [value[blk] if blk else value for value in found]
        said = ["n/a" if value is None else f"{100 * value:.1f}%" if percent else f"{value:.4f}" for value in values]
        lines.append(f"| {title} | {' | '.join(said)} |")

    row("Streaming heads, AUC", "streaming_auc")
    row("Streaming heads, F1", "streaming_f1")
    row("Streaming heads found", "streaming_recall", percent=True)
    row("Retrieval heads called streaming", "miss_rate", percent=True)
    for name in ("bgt0", "k"):
        row(f"{name}, mean absolute error", f"{name}_mae")
        row(f"{name}, R²", f"{name}_r2")
    for blk in map(str, BLOCKS):
        needed = f"{100 * metrics['predictor']['mean_label'][blk]:.1f}%"
        row(f"Budget at {blk}, mean absolute error", "budget_mae", blk)
        row(f"Budget at {blk}, R²", "budget_r2", blk)
        row(f"Budget at {blk}, too small", "under_predicted", blk, percent=True)
        row(f"Budget at {blk}, mean (needed {needed})", "mean_budget", blk, percent=True)
    samples, sequences = metrics["samples"]["test"], metrics["sequences"]["test"]
    head = (
        f"### tau {tau:.2f}\n\n{samples:,} samples of {sequences} test sequences, "
        f"{100 * metrics['streaming_share']:.1f}% of them streaming heads. Errors of bgt0, k and budgets are over the "
        "retrieval heads.\n\n"
    )
    return head + "\n".join(lines) + "\n"


def plot_budgets_by_head(
    budgets: torch.Tensor, layers: Sequence[int], path: Path, *, titles: Sequence[str] = ("", "")
) -> None:
    """Plot the least budget of every head under two criteria, one panel a layer (as in the paper's Fig. 4).

    A head with a high first bar and a low second one deviates much but contributes little.

    Args:
        budgets: [layers, Hq, 2], mean least budgets: by the head's own deviation, and by its deviation relative to the
            largest head.
        layers: number of each layer. path: file to write; its suffix selects the format.
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
    """Plot the share of samples in which each head streams, as a heat map of layers and heads.

    Args:
        streaming: [layers, Hq] in [0, 1], NaN for no samples.
    """
    figure, (axis,) = _figure(1)
    image = axis.imshow(streaming.numpy(), vmin=0, vmax=1, aspect="auto", origin="lower", cmap="viridis")
    axis.set(xlabel="Query head", ylabel="Layer", title="Share of steps in which sinks and window suffice")
    figure.colorbar(image, ax=axis)
    _write(figure, path)


def plot_budget_by_block(budgets: torch.Tensor, blocks: Sequence[int], layers: Sequence[int], path: Path) -> None:
    """Plot the least budget against block size, one line a head and one panel a layer (as in the paper's Fig. 5).

    Args:
        budgets: [layers, Hq, len(blocks)], mean least budgets; a head of zeros streams. NaN: no line.
        blocks: block sizes in tokens, ascending, such as 1, 16, 32, 64, 128.
    """
    from matplotlib import colormaps

    figure, axes = _figure(len(layers))
    shades = colormaps["turbo"]((np.arange(budgets.shape[1]) + 0.5) / budgets.shape[1])
    for axis, layer, values in zip(axes, layers, budgets, strict=True):
        for head, line in enumerate(values):
            axis.plot(list(blocks), line.numpy(), marker=".", linewidth=1, color=shades[head])
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(blocks), [str(blk) for blk in blocks])
        axis.set(title=f"Layer {layer}", xlabel="Block size (tokens)", ylim=(0, None))
    axes[0].set_ylabel("Least budget")
    _write(figure, path)


def _figure(panels: int) -> tuple[Any, Any]:
    # The object-oriented interface needs no backend and no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4.5 * panels, 3.6), layout="constrained")
    return figure, figure.subplots(1, panels, sharey=True, squeeze=False)[0]


def _write(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
