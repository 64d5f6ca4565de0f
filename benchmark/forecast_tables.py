"""Tables of the forecast: how near it came to this machine's own steps, and what it says of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

from forecast.hardware import BOUND
from rendering import link, nothing, result_files, table, where


def check(results: Path) -> str:
    """A line a step: measured, foretold."""
    out = []
    for path, data in result_files(results, "forecast.json"):
        rows = [
            [
                *(row["model"], f"{row['depth']:,}", str(row["batch"]), f"`{row['spec']}`"),
                *(f"{row['ms']:.2f}", f"{row['forecast_ms']:.2f}", f"{row['error']:+.0%}"),
            ]
            for row in data["rows"]
        ]
        head = ["model", "tokens", "requests", "policy", "measured (ms)", "forecast (ms)", "error"]
        errors = [abs(row["error"]) for row in data["rows"]]
        within = sum(error <= BOUND for error in errors)
        note = (
            f"Time per output token; {within} of {len(errors)} steps within {BOUND:.0%}, the errors' median is "
            f"{median(errors):.0%}, the largest {max(errors):.0%}. Random weights; llama-3.1-8b is cut to 2 layers and "
            f"32,000 words. {where(data)} [Data]({link(path)}), `python benchmark/forecast measure`."
        )
        out.append(f"{table(head, rows, 'lrrlrrr')}\n{note}\n")
    return "\n".join(out) or nothing("forecast measure")


def machines(results: Path) -> str:
    """A line a machine and load: time per output token and its parts, for each number of ranks."""
    out = []
    for path, data in result_files(results, "forecast_machines.json"):
        cells = {
            (row["machine"], row["batch"], row["context"], row["policy"], row["ranks"]): row for row in data["rows"]
        }
        lines = []
        for load in dict.fromkeys(key[:4] for key in cells):
            machine, batch, context, policy = load
            mine = {ranks: row for (*key, ranks), row in cells.items() if tuple(key) == load}
            best = min(mine.values(), key=lambda row: row["ms"])
            lines.append(
                [
                    *(machine, f"{batch:,} x {context:,}", f"{best['pool_gib']:,.0f}", f"`{policy}`"),
                    *(f"{mine[ranks]['ms']:,.0f}" for ranks in sorted(mine)),
                    *(f"{best['batch'] / best['ms'] * 1e3:,.0f}", f"{best['gb_per_s']:,.0f}"),
                    f"{best['attention_ms'] / best['ms']:.0%}",
                ]
            )
        head = ["machine", "requests x tokens", "KV (GiB)", "policy", "one process (ms)", "a rank a socket (ms)"]
        head += ["tokens/s", "GB/s", "attention"]
        note = (
            f"{data['model']} in bfloat16, 192 cores. The last three columns are those of the faster of the two. "
            f"{where(data)} [Data]({link(path)}), `python benchmark/forecast machines`."
        )
        out.append(f"{table(head, lines, 'llrlrrrrr')}\n{note}\n")
    return "\n".join(out) or nothing("forecast machines")


FORECAST_TABLES: dict[str, Callable[[Path], str]] = {"forecast_check": check, "forecast_machines": machines}
