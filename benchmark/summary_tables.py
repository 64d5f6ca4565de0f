"""The few rows that README.md and the first page of the documentation show: the bundled model's speed and answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import common
from rendering import link, nothing, result_files, table, where

from fluxion_quality import table as quality_table


def headline(results: Path) -> str:
    """The numbers that README.md opens with: what can be had without training, beside `full`, at the longest prompt."""
    timed = {path.parent: (path, data) for path, data in result_files(results, "one_batch_sketch.json")}
    for path, data in result_files(results, "quality_sketch.json"):
        if path.parent not in timed:
            continue
        times_path, times = timed[path.parent]
        rows = {(length, policy): row for length, policy, row in quality_table.averaged(data)}
        length = max(length or 0 for length, _ in rows)
        kept, whole = rows[length, common.SKETCH], rows[length, "full"]
        chance = kept["delta_low"] <= 0 <= kept["delta_high"]
        differ = "The difference is within chance" if chance else f"The difference is {kept['delta']:+.3f}"
        ms = _medians(times)
        batch, prompt, _ = max(ms)
        return (
            f"The bundled test model answers questions about documents of {length:,} tokens while each decode step "
            f"reads **{kept['read_fraction']:.0%}** of what lies between the first 64 and the last 256 tokens. It "
            f"scores **{kept['score']:.3f}**, and {whole['score']:.3f} where all of that is read. {differ} "
            f"({data['dtype']}, {data['samples']} questions of each kind, [data]({link(path)})). In bfloat16, "
            f"where it reads more, a step with {batch} prompts of {prompt:,} tokens takes "
            f"{ms[batch, prompt, common.SKETCH]:.1f} ms, and {ms[batch, prompt, 'full']:.1f} ms where all is read "
            f"([data]({link(times_path)})). This takes no training. The model has 3 million parameters and a language "
            "of its own, so measure yours.\n"
        )
    return "Not measured yet: `fluxion bench quality --suite ruler`.\n"


def _medians(data: dict[str, Any]) -> dict[tuple[int, int, str], float]:
    """TPOT in ms by batch, prompt and policy."""
    cells: dict[tuple[int, int, str], list[float]] = {}
    for row in data["rows"]:
        cells.setdefault((row["batch"], row["length"], row["policy"]), []).append(row["tpot_ms"])
    return {cell: median(times) for cell, times in cells.items()}


def speed(results: Path) -> str:
    """Four rows of `one_batch` on the bundled model: the least and the largest batch, the two longest prompts."""
    out = []
    sparse = ("fluxion", common.SKETCH)
    for path, data in result_files(results, "one_batch_sketch.json"):
        ms = _medians(data)
        batches, lengths = ({key[at] for key in ms} for at in (0, 1))
        rows = []
        for batch in sorted({min(batches), max(batches)}):
            for length in sorted(lengths)[-2:]:
                full, *others = (ms[batch, length, policy] for policy in ("full", *sparse))
                shown = [f"{time:.1f}" for time in (full, *others)] + [f"{full / time:.1f}x" for time in others]
                rows.append([str(batch), f"{length:,}", *shown])
        head = ["batch", "prompt (tokens)", *(f"`{policy}` (ms)" for policy in ("full", *sparse))]
        head += [f"`full` / `{policy}`" for policy in sparse]
        note = f"Medians of {min(row['steps'] for row in data['rows'])} steps, bfloat16. {where(data)}"
        out.append(f"{table(head, rows, 'rrrrrrr')}\n{note} [Data]({link(path)}).{first_token(path.parent)}\n")
    return "\n".join(out) or nothing("one_batch.py")


def first_token(machine: Path) -> str:
    """A sentence about the longest prompt of the bundled model, if the machine has measured it."""
    path = machine / "first_token.json"
    if not path.exists():
        return ""
    rows = [row for row in json.loads(path.read_text())["rows"] if row["model"] == "needle"]
    longest = max(row["tokens"] for row in rows)
    seconds = {row["way"]: row["seconds"] for row in rows if row["tokens"] == longest}
    return (
        f" The first token after a prompt of {longest:,} takes {seconds['budget 1']:.1f} s, without the flag "
        f"{seconds['off']:.0f} s ([data]({link(path)}))."
    )


def answers(results: Path) -> str:
    """With a predictor and without: score and bytes read, a pair of columns a length."""
    out = []
    for path, data in result_files(results, "quality_sketch.json"):
        found = {(length, policy): row for length, policy, row in quality_table.averaged(data)}
        lengths = sorted({length or 0 for length, _ in found})
        rows = []
        for policy in data["policies"]:
            of = [found.get((length, policy)) for length in lengths]
            scores = [f"{row['score']:.3f}" if row else "" for row in of]
            reads = [f"{row['read_fraction']:.0%}" if row else "" for row in of]
            rows.append([f"`{policy}`", *(cell for pair in zip(scores, reads, strict=True) for cell in pair)])
        head = ["policy", *(f"{what} at {length:,}" for length in lengths for what in ("score", "KV read"))]
        note = f"{data['samples']} samples of each of RULER's tasks in the model's language, {data['dtype']}."
        out.append(f"{table(head, rows, 'l' + 'r' * (len(head) - 1))}\n{note} {where(data)} [Data]({link(path)}).\n")
    return "\n".join(out) or "Not measured yet: `fluxion bench quality --suite ruler`.\n"


SUMMARY_TABLES: dict[str, Callable[[Path], str]] = {"headline": headline, "speed": speed, "answers": answers}
