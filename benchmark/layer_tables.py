"""Tables of linears.py, step_graphs.py, prefill.py and first_token.py: the model's other layers, and prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from rendering import link, nothing, result_files, table, where

SHOWN_ROWS = (1, 4, 8, 32)


def linears(results: Path) -> str:
    """A line a layer and number of rows: our share of the stream, and the time of others over ours."""
    out = []
    for path, data in result_files(results, "linears.json"):
        cells: dict[tuple[int, int, int], dict[str, dict[str, Any]]] = {}
        for row in data["rows"]:
            cells.setdefault((row["outputs"], row["inputs"], row["rows"]), {})[row["peer"]] = row
        others = [peer for peer in dict.fromkeys(row["peer"] for row in data["rows"]) if peer != "ours"]
        lines = [
            [
                f"{outputs:,} x {inputs:,}",
                str(rows),
                f"{found['ours']['gb_per_s']:.0f}",
                f"{found['ours']['of_stream']:.0%}",
                *(f"{found[peer]['over_ours']:.2f}x" if peer in found else "" for peer in others),
            ]
            for (outputs, inputs, rows), found in cells.items()
            if rows in SHOWN_ROWS
        ]
        head = ["weights", "rows", "GB/s", "of the stream", *(f"{peer} / ours" for peer in others)]
        note = f"Medians of {data['rounds']} interleaved rounds, bfloat16. {where(data)} [Data]({link(path)})."
        out.append(f"{table(head, lines, 'lr' + 'r' * (len(head) - 2))}\n{note}\n")
    return "\n".join(out) or nothing("linears.py")


def step_graphs(results: Path) -> str:
    """A line a model and batch: a step with the graph and without."""
    out = []
    for path, data in result_files(results, "step_graphs.json"):
        lines = [
            [
                row["model"],
                str(row["layers"]),
                str(row["batch"]),
                f"{row['python_ms']:.1f}",
                f"{row['graph_ms']:.1f}",
                f"{row['ratio']:.2f}x",
            ]
            for row in data["rows"]
        ]
        head = ["model", "layers", "batch", "without (ms)", "with the graph (ms)", "with / without"]
        depth, many = data["rows"][0]["depth"], f"{data['turns']} turns of {data['steps']} steps"
        note = (
            f"Whole steps at {depth:,} tokens, policy `{data['policy']}`; medians of {many}. "
            f"{where(data)} [Data]({link(path)})."
        )
        out.append(f"{table(head, lines, 'l' + 'r' * (len(head) - 1))}\n{note}\n")
    return "\n".join(out) or nothing("step_graphs.py")


def prompt_attention(results: Path) -> str:
    """A line a prompt: the rate of its attention, beside that of a matrix product, and others' times over ours."""
    out = []
    for path, data in result_files(results, "prefill.json"):
        cells: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
        for row in data["rows"]:
            cells.setdefault((row["tokens"], row["head_dim"]), {})[row["peer"]] = row
        others = [peer for peer in dict.fromkeys(row["peer"] for row in data["rows"]) if peer != "full"]
        lines = [
            [
                f"{tokens:,}",
                str(dim),
                f"{found['full']['gflop_per_s']:.0f}",
                f"{found['full']['of_matrix']:.0%}",
                *(f"{found[peer]['over_full']:.2f}x" for peer in others),
            ]
            for (tokens, dim), found in cells.items()
        ]
        head = ["prompt", "head dimension", "GFLOP/s", "of a matrix product", *(f"{peer} / full" for peer in others)]
        note = (
            f"Medians of {data['rounds']} interleaved rounds, bfloat16, 2 KV heads with 4 query heads each. "
            f"{where(data)} [Data]({link(path)})."
        )
        out.append(f"{table(head, lines, 'r' * len(head))}\n{note}\n")
    return "\n".join(out) or nothing("prefill.py")


def first_token(results: Path) -> str:
    """A line a model and prompt: seconds to its first token, without the flag and by budgets of the prefill."""
    out = []
    for path, data in result_files(results, "first_token.json"):
        cells: dict[tuple[str, int], dict[str, float]] = {}
        for row in data["rows"]:
            cells.setdefault((row["model"], row["tokens"]), {})[row["way"]] = row["seconds"]
        off, exact, *sparse = next(iter(cells.values()))
        lines = [
            [
                model,
                f"{tokens:,}",
                *(f"{seconds:.2f}" for seconds in found.values()),
                f"{found[off] / found[exact]:.1f}x",
                *(f"{found[exact] / found[way]:.1f}x" for way in sparse),
            ]
            for (model, tokens), found in cells.items()
        ]
        head = ["model", "prompt", "without the flag (s)", "exact (s)", *(f"{way} (s)" for way in sparse)]
        head += ["without / exact", *(f"exact / {way}" for way in sparse)]
        note = (
            f"Medians of {data['rounds']} rounds, in which the servers take turns. {where(data)} "
            f"[Data]({link(path)}), `python benchmark/first_token.py`."
        )
        out.append(f"{table(head, lines, 'l' + 'r' * (len(head) - 1))}\n{note}\n")
    return "\n".join(out) or nothing("first_token.py")


def sparse_prefill(results: Path) -> str:
    """A line a task, a column a budget of the prefill: scores of `full`."""
    found: dict[tuple[Path, int], dict[float, dict[str, Any]]] = {}
    for path, data in result_files(results, "quality_prefill_*.json"):
        for length in {row["length"] for row in data["rows"]}:
            found.setdefault((path.parent, length), {})[data["config"]["prefill_budget"]] = data
    out = []
    for (_, length), runs in found.items():
        budgets = sorted(runs, reverse=True)
        of = {b: {row["task"]: row["score"] for row in runs[b]["rows"] if row["length"] == length} for b in budgets}
        lines = [[task, *(f"{of[b][task]:.3f}" for b in budgets)] for task in of[budgets[0]]]
        lines.append(["mean", *(f"{mean(of[b].values()):.3f}" for b in budgets)])
        data = runs[budgets[0]]
        note = f"Prompts of {length:,} tokens, {data['samples']} samples a task. {where(data)}"
        head = ["task", *(f"budget {b:g}" for b in budgets)]
        out.append(f"{table(head, lines, 'l' + 'r' * len(budgets))}\n{note}\n")
    return "\n".join(out) or nothing("__main__.py --only quality")


LAYER_TABLES: dict[str, Callable[[Path], str]] = {
    "linears": linears,
    "step_graphs": step_graphs,
    "prompt_attention": prompt_attention,
    "first_token": first_token,
    "sparse_prefill": sparse_prefill,
}
