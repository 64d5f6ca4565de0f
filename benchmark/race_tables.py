"""Tables of race.py: what a token costs at each depth, what a prompt costs, and who ran with which settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, median
from typing import Any

from rendering import link, nothing, result_files, table, where

OURS = "Fluxion `full`"
"""What the others are compared with."""


def slope(points: dict[int, float]) -> float | None:
    """Least squares through (tokens, milliseconds): milliseconds for 1,024 tokens more; None for one point."""
    if len(points) < 2:
        return None
    at, over = mean(points), mean(points.values())
    spread = sum((x - at) ** 2 for x in points)
    return 1024 * sum((x - at) * (y - over) for x, y in points.items()) / spread


def gb_per_s(ms: float | None, batch: int, kv_bytes: int) -> float | None:
    """GB (10^9 bytes) of KV for each second that a slope adds; None where it adds nothing."""
    return None if ms is None or ms <= 0 else batch * kv_bytes * 1024 / ms / 1e6


Cells = dict[str, dict[int, list[dict[str, Any]]]]
"""Rows by system and depth, in the order in which they ran."""


def cells(rows: Iterable[dict[str, Any]]) -> Cells:
    found: Cells = {}
    for row in rows:
        found.setdefault(row["system"], {}).setdefault(row["depth"], []).append(row)
    return found


def growth(rows: Iterable[dict[str, Any]]) -> float | None:
    """The median of the slopes within rounds, which a drifting machine changes least; None where their signs differ."""
    rounds: dict[int, dict[int, float]] = {}
    for row in rows:
        if "failed" not in row:
            rounds.setdefault(row["round"], {})[row["depth"]] = row["decode_ms"]
    slopes = [each for points in rounds.values() if (each := slope(points)) is not None]
    return median(slopes) if len({each > 0 for each in slopes}) == 1 else None


def shown(rows: list[dict[str, Any]], value: Callable[[dict[str, Any]], float], digits: int) -> str:
    """The median over rounds, or why there is none."""
    values = [value(row) for row in rows if "failed" not in row]
    if values:
        return f"{median(values):,.{digits}f}"
    return rows[-1]["failed"] if rows else ""


def ratio(rows: list[dict[str, Any]], ours: list[dict[str, Any]], value: str) -> str:
    """Over ours: the median of the ratios within rounds, which a drifting machine changes least."""
    base = {row["round"]: row[value] for row in ours if value in row}
    found = [row[value] / base[row["round"]] for row in rows if value in row and row["round"] in base]
    return f"{median(found):.2f}x" if found else ""


def _decode(data: dict[str, Any], model: str, batch: int) -> str:
    of = [row for row in data["rows"] if row["model"] == model and row.get("batch", batch) == batch]
    depths = sorted({row["depth"] for row in of})
    found = cells(of)
    ours = found.get(OURS, {})
    lines = []

    def timed(at: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        return [row for row in at.get(depths[-1], []) if "cpu_median_ms" in row]

    told = any(timed(at) for at in found.values())
    for system, at in found.items():
        grows = growth(row for rows in at.values() for row in rows)
        speed = gb_per_s(grows, batch, data["models"][model]["kv_bytes"])
        lines.append(
            [
                system,
                *(shown(at.get(depth, []), lambda row: row["decode_ms"], 1) for depth in depths),
                ratio(at.get(depths[-1], []), ours.get(depths[-1], []), "decode_ms"),
                *([shown(timed(at), lambda row: row["cpu_median_ms"], 1)] if told else []),
                "" if grows is None else f"{grows:.3f}",
                "" if speed is None else f"{speed:.1f}",
            ]
        )
    last = f"{depths[-1]:,}"
    head = [f"batch {batch}", *(f"at {depth:,} (ms)" for depth in depths), f"at {last} / {OURS}"]
    head += [*(["CPU time there (ms)"] if told else []), "1,024 tokens more (ms)", "KV at that slope (GB/s)"]
    return table(head, lines, "l" + "r" * (len(head) - 1))


def decode(results: Path) -> str:
    """Time of a decode step by depth, its slope, and the bytes of KV that the slope stands for."""
    out = []
    for path, data in result_files(results, "race.json"):
        for model in data["models"]:
            tables = [_decode(data, model, batch) for batch in sorted(data["batches"])]
            out.append(f"{_model(data, model)}\n\n" + "\n".join(tables))
        out.append(f"{_note(data)} [Data]({link(path)}).\n")
        drawn = path.with_suffix(".svg")
        if drawn.is_file():
            out.append(f"![A decode step against context]({link(drawn)})\n")
    return "\n".join(out) or nothing("race.py")


def prefill(results: Path) -> str:
    """Tokens a second of a prompt that runs alone, the time to its first token, and peak memory if rows have it."""
    out = []
    for path, data in result_files(results, "race.json"):
        least = min(data["batches"])
        for model in data["models"]:
            rows = [row for row in data["rows"] if row["model"] == model and row.get("batch", least) == least]
            depths, found = sorted({row["depth"] for row in rows}), cells(rows)
            ours = found.get(OURS, {}).get(depths[-1], [])
            told = any("peak_gb" in row for row in rows)
            lines = [
                [
                    system.removesuffix(" `full`"),
                    *(shown(at.get(depth, []), lambda row: row["depth"] / row["prefill_s"], 0) for depth in depths),
                    shown(at.get(depths[-1], []), lambda row: row["prefill_s"], 1),
                    ratio(at.get(depths[-1], []), ours, "prefill_s"),
                    *([_largest(at)] if told else []),
                ]
                for system, at in found.items()
                if not system.startswith("Fluxion") or system == OURS
            ]
            last = f"{depths[-1]:,}"
            head = ["", *(f"{depth:,} (tokens/s)" for depth in depths), f"first token at {last} (s)", "of Fluxion's"]
            head += ["peak memory (GB)"] if told else []
            grid = table(head, lines, "l" + "r" * (len(head) - 1))
            out.append(f"{_model(data, model)}\n\n{grid}")
        out.append(f"{_note(data)} [Data]({link(path)}).\n")
    return "\n".join(out) or nothing("race.py")


def _largest(at: dict[int, list[dict[str, Any]]]) -> str:
    found = [row["peak_gb"] for rows in at.values() for row in rows if "peak_gb" in row]
    return f"{max(found):.1f}" if found else ""


def systems(results: Path) -> str:
    """Versions and settings, whether the models agree, and why somebody is missing."""
    out = []
    for path, data in result_files(results, "race.json"):
        lines = []
        for name, facts in data["systems"].items():
            versions = ", ".join(f"{of} {version}" for of, version in facts.get("versions", {}).items())
            settings = ", ".join(f"{key} {value}" for key, value in facts.get("settings", {}).items())
            says = ", ".join(f"{model}: {same}" for model, same in facts.get("says", {}).items())
            lines.append([name, versions, settings, says, facts.get("reason", "")])
        head = ["", "versions", "settings", "same greedy tokens", "what failed"]
        out.append(f"{table(head, lines, 'lllll')}\n{where(data)} [Data]({link(path)}).\n")
    return "\n".join(out) or nothing("race.py")


def _model(data: dict[str, Any], model: str) -> str:
    facts = data["models"][model]
    cut = f", cut to {facts['layers']} layers and {facts['cut']['vocab_size']:,} words" if facts["cut"] else ""
    return f"**{model}**{cut}: {facts['parameters'] / 1e6:,.0f}M parameters, {facts['kv_bytes']:,} bytes of KV a token."


def _note(data: dict[str, Any]) -> str:
    cells = Counter(tuple(row.get(key) for key in ("model", "system", "depth", "batch")) for row in data["rows"])
    least, most = min(cells.values()), max(cells.values())
    rounds = f"{most}" if least == most else f"{least} to {most}"
    return f"Medians of {rounds} round(s), each of {data['steps']} steps. {where(data)}"


RACE_TABLES: dict[str, Callable[[Path], str]] = {
    "race_decode": decode,
    "race_prefill": prefill,
    "race_systems": systems,
}
