"""Tables of other times: first tokens, comparison with other systems, long runs and sanitizers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rendering import (
    Columns,
    Data,
    Row,
    Table,
    at,
    columns_of,
    medians,
    outer,
    over,
)

slices = Table(
    "slices.json",
    columns_of(
        "model | weights | layers | ms a layer | ms a token | tokens/s of a prompt",
        "{model} | {weights} | {layers} | {layer_ms:.2f} | {whole_ms:.0f} | {prompt_tokens_per_s:.0f}",
    ),
    "Random weights in the model's shapes. One request with {prompt} tokens of context, policy `full`. A layer: half "
    "the difference of models with 1 and 3 layers. A token and a prompt of the whole model: by arithmetic.",
    align="llrrrr",
)


def first_token_columns(data: Data) -> Columns:
    """One column per way: without the flag, exact, and with the smallest prefill budget."""
    off, exact, *_, least = dict.fromkeys(row["way"] for row in data["rows"])
    heads = {off: "without the flag (s)", exact: "exact (s)", least: f"{least} (s)"}
    return (
        columns_of("model | prompt", "{model} | {tokens:,}")
        | {head: at(way, form="{:.2f}") for way, head in heads.items()}
        | {"without / exact": over(off, exact), f"exact / {least}": over(exact, least)}
    )


first_token = Table(
    "first_token.json",
    first_token_columns,
    "Medians of {rounds} rounds, in which the servers take turns.",
    lambda data: outer(medians(data["rows"], ("model", "tokens"), "way", "seconds"), "tokens"),
)

# Other systems

OURS = "Fluxion `full`"
"""Basis of the comparison."""
LLAMA_CPP = ("llama.cpp", "llama.cpp, flash attention", "llama.cpp, flash attention, KV in q8_0")
"""Settings of llama.cpp; the tables show the fastest."""


def same_file_rows(data: Data) -> list[Row]:
    """The shortest and the longest context of each file: milliseconds of a step, seconds of a prompt."""
    rows = []
    models = sorted({row["model"] for row in data["rows"]})
    found = [row for model in models for row in outer((one for one in data["rows"] if one["model"] == model), "depth")]
    for row in sorted(found, key=lambda row: (row["model"], row["batch"] or math.inf, row["depth"])):
        prompt = not row["batch"]
        each = {name: row["depth"] / value if prompt else value for name, value in row["each"].items()}
        slower = row["ratio"][OURS] if prompt else 1 / row["ratio"][OURS]
        shown = {"full": each[OURS], "other": min(each[name] for name in LLAMA_CPP), "slower": slower}
        shown |= {} if prompt else {"sketch": each["Fluxion `sketch`"]}
        rows.append({**row, "what": "prompt (s)" if prompt else f"step, batch {row['batch']} (ms)", **shown})
    return rows


same_file = Table(
    "same_file.json",
    columns_of(
        "file | what | context | Fluxion `full` | fastest llama.cpp | Fluxion `sketch`",
        "{model} | {what} | {depth:,} | {full:.1f} | {other:.1f} ({slower:.2f}x) | {sketch:.1f}",
    ),
    "In parentheses: over Fluxion `full`. Medians of {steps} steps; rounds: {rounds}.",
    same_file_rows,
    align="ll",
)


def ratio(rows: Iterable[Row], ours: Iterable[Row], value: str) -> str:
    """Ratio to ours: the median of ratios within rounds, where drift of the machine matters least."""
    base = {row["round"]: row[value] for row in ours if value in row}
    found = [row[value] / base[row["round"]] for row in rows if value in row and row["round"] in base]
    return f"{median(found):.2f}x" if found else ""


def median_and_ratio(row: Row, systems: Sequence[str]) -> str:
    """Median over rounds of the fastest of these systems and its ratio to ours, or the reason why there is none."""
    value, ours = row["value"], row["by"].get(OURS, [])
    runs = [row["by"][system] for system in systems if system in row["by"]]
    timed = [[run for run in some if value in run] for some in runs]
    if not any(timed):
        return runs[0][-1]["failed"] if runs else ""
    best = min(filter(None, timed), key=lambda some: median(run[value] for run in some))
    over_ours = f" ({ratio(best, ours, value)})" if OURS not in systems else ""
    return f"{median(run[value] for run in best):,.1f}{over_ours}"


def race_columns(data: Data) -> Columns:
    """One column per system that reads all KV."""
    shown: dict[str, list[str]] = {}
    for system in dict.fromkeys(row["system"] for row in data["rows"]):
        if system == OURS or not system.startswith("Fluxion"):
            shown.setdefault("fastest llama.cpp" if system in LLAMA_CPP else system, []).append(system)
    return columns_of("model | what | context", "{model} | {what} | {depth:,}") | {
        name: partial(median_and_ratio, systems=systems) for name, systems in shown.items()
    }


def race_rows(data: Data) -> list[Row]:
    """One row per model and batch (or prompt) at the shortest and the longest context, with the runs by system."""
    found: dict[tuple[Any, ...], Row] = {}
    least = min(data["batches"])
    for row in data["rows"]:
        batches = [row["batch"]] if "batch" in row else data["batches"]
        cells = [(batch, f"step, batch {batch} (ms)", "decode_ms") for batch in batches]
        cells += [(math.inf, "prompt (s)", "prefill_s")] if least in batches else []
        for order, what, value in cells:
            place = {"model": row["model"], "order": order, "depth": row["depth"]}
            cell = found.setdefault(tuple(place.values()), {**place, "what": what, "value": value, "by": {}})
            cell["by"].setdefault(row["system"], []).append(row)
    rows = [found[key] for key in sorted(found)]
    return [row for model in data["models"] for row in outer((one for one in rows if one["model"] == model), "depth")]


def race_note(data: Data) -> str:
    """Number of rounds behind the medians."""
    counts = Counter(tuple(row.get(key) for key in ("model", "system", "depth", "batch")) for row in data["rows"])
    least, most = min(counts.values()), max(counts.values())
    turns = f"{most}" if least == most else f"{least} to {most}"
    return f"In parentheses: over {OURS}. Medians of {turns} round(s), each of {data['steps']} steps."


race = Table("race.json", race_columns, race_note, race_rows, align="ll")

# Long runs and sanitizers

soak = Table(
    "soak*.json",
    columns_of(
        "process | memory (MiB) | growth (MiB an hour) | 95% interval | file descriptors | threads",
        "{process} | {rss_mib:,.0f} | {mib_per_hour:+.1f} | {low:+.1f} to {high:+.1f} | {fds} | {threads}",
    ),
    lambda data: (
        f"After {data['minutes']:.0f} minutes, {data['tp']} rank(s), {data['rows'][-1]['done']:,} requests and "
        f"interferences, {data['happened']['retracted requests']} retractions, "
        f"{data['happened']['evicted tokens']:,} evicted tokens: {data['leaked_tokens']} leaked tokens, "
        f"{len(data['wrong'])} wrong or lost answers, the same from the canary all {data['canaries'].split()[0]} times."
    ),
    lambda data: data["processes"],
    command="make soak",
)
sanitizers = Table(
    "sanitizers.json",
    (
        {"sanitizer": "{sanitizer}", "test files": lambda row: str(len(row["tests"]))}
        | {key: f"{{{key}:,}}" for key in ("passed", "skipped", "failed", "reports")}
        | {"minutes": lambda row: f"{row['seconds'] / 60:.0f}"}
    ),
    "Property tests with {effort:g} times their usual number of examples; minutes without the build.",
    command="make sanitize",
)

SPEED_TABLES: dict[str, Callable[[Path], str]] = {
    "slices": slices,
    "same_file": same_file,
    "first_token": first_token,
    "soak": soak,
    "sanitizers": sanitizers,
    "race": race,
}
