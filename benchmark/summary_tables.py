"""The rows that README.md and the first page of the documentation show: steps and answers of public models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from quality_tables import PUBLIC, forced, forced_rows
from rendering import link, nothing, result_files, table, where

MODEL = "smollm2"
"""The public checkpoint whose steps are timed."""


def headline(results: Path) -> str:
    """The numbers that README.md opens with: what can be had without training, beside `full`, at the longest prompt."""
    timed = {path.parent: (path, data) for path, data in result_files(results, f"one_batch_{MODEL}.json")}
    for path, data in result_files(results, f"quality_{MODEL}.json"):
        if path.parent not in timed:
            continue
        times_path, times = timed[path.parent]
        rows = {(row["length"], row["policy"]): row for row in data["rows"]}
        length = max(length for length, _ in rows)
        kept, whole = rows[length, "sketch"], rows[length, "full"]
        change, low, high = (f"{kept[key] / whole['score']:+.1%}" for key in ("delta", "delta_low", "delta_high"))
        ms = _medians(times)
        batch, prompt, _ = max(ms)
        return (
            f"SmolLM2-135M predicts real text after up to {length:,} tokens while each decode step reads "
            f"**{kept['read_fraction']:.0%}** of what lies between the first 64 and the last 256 tokens. Its "
            f"perplexity is {kept['score']:.2f}, and {whole['score']:.2f} where all of that is read: **{change}**, "
            f"95% interval {low} to {high} ({data['samples']} windows, [data]({link(path)})). A step with {batch} "
            f"prompts of {prompt:,} tokens takes {ms[batch, prompt, 'sketch']:.0f} ms, and "
            f"{ms[batch, prompt, 'full']:.0f} ms where all is read ([data]({link(times_path)})). This takes no "
            "training. The model is small, so measure yours.\n"
        )
    return "Not measured yet: `make checkpoints quality`.\n"


def _medians(data: dict[str, Any]) -> dict[tuple[int, int, str], float]:
    """TPOT in ms by batch, prompt and policy."""
    cells: dict[tuple[int, int, str], list[float]] = {}
    for row in data["rows"]:
        cells.setdefault((row["batch"], row["length"], row["policy"]), []).append(row["tpot_ms"])
    return {cell: median(times) for cell, times in cells.items()}


def speed(results: Path) -> str:
    """`one_batch` on a public checkpoint: the least and the largest batch, the two longest prompts."""
    out = []
    for path, data in result_files(results, f"one_batch_{MODEL}.json"):
        ms = _medians(data)
        batches, lengths = ({key[at] for key in ms} for at in (0, 1))
        rows = []
        for batch in sorted({min(batches), max(batches)}):
            for length in sorted(lengths)[-2:]:
                full, sparse = (ms[batch, length, policy] for policy in ("full", "sketch"))
                rows.append([str(batch), f"{length:,}", f"{full:.1f}", f"{sparse:.1f}", f"{full / sparse:.1f}x"])
        head = ["batch", "prompt (tokens)", "`full` (ms)", "`sketch` (ms)", "`full` / `sketch`"]
        note = f"Medians of {min(row['steps'] for row in data['rows'])} steps, bfloat16. {where(data)}"
        out.append(f"{table(head, rows, 'r' * len(head))}\n{note} [Data]({link(path)}).\n")
    return "\n".join(out) or nothing("one_batch.py")


def answers(results: Path) -> str:
    """What `sketch` and the best fixed budget cost on public checkpoints: a line a model and length."""
    lines, sources = [], []
    policies = ("sketch", "fixed:16:0.25")
    for name, shown in PUBLIC.items():
        found, source = forced_rows(results, name)
        for length in sorted({length for length, _ in found}):
            full = found[length, "full"]
            cells = [forced(found[length, policy], full) for policy in policies]
            shares = [cell for _, change, _, _, read in cells for cell in (change, read)]
            lines.append([shown, f"{length:,}", f"{full['score']:.2f}", *shares])
        if found:
            sources.append(source.removeprefix("Bfloat16. Data: "))
    head = ["model", "prompt", "perplexity of `full`", *(f"`{p}`{of}" for p in policies for of in ("", " reads"))]
    if not lines:
        return "Not measured yet: `make checkpoints quality`.\n"
    return f"{table(head, lines, 'lrrrrrr')}\nBfloat16. Data: {' '.join(sources)}\n"


SUMMARY_TABLES: dict[str, Callable[[Path], str]] = {"headline": headline, "speed": speed, "answers": answers}
