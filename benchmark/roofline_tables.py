"""Tables of kernels.py, peers.py and forks.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rendering import link, nothing, result_files, table, where

WORDS = {
    "of_scatter": "of scatter",
    "of_stream": "of stream",
    "share": "of scan, select and attend",
    "over_ceiling": "x the time of its bytes",
    "microseconds": "us",
    "busiest_over_mean": "x the mean worker",
    "over_one": "x one branch",
    "sdpa_over_ours": "x as fast",
}
"""Names of what is held to a bar, as a table says them."""


SHARES = ("of_scatter", "of_stream", "share")


def said(name: str, value: float) -> str:
    return f"{value:.0%} {WORDS[name]}" if name in SHARES else f"{value:.3g} {WORDS[name]}"


def measured(name: str, value: float) -> str:
    """With the digit that decides and the unit."""
    return f"{value:.1%}" if name in SHARES else f"{value:.3g} {WORDS[name].split(' ')[0]}"


def shape(row: dict[str, Any]) -> str:
    blocks = f"blk {row['blk']}, {row['budget']:.0%} of" if row["blk"] else "dense,"
    tokens = f"{row['context'] // 1024}K" + (", shuffled" if row.get("shuffled") else "")
    if row["kernel"] in ("append", "empty"):
        return ""
    return f"up to {tokens}" if row["kernel"] == "imbalance" else f"{blocks} {tokens}"


def variant(row: dict[str, Any]) -> str:
    threads = f", {row['threads']} thread" if row["threads"] else ""
    return f"G={row['group']}, D={row['head_dim']}, {row['dtype']}, {row['isa']}{threads}"


def bars(results: Path) -> str:
    """Rows that are held to something, what that is, and whether they meet it."""

    def draw(data: dict[str, Any]) -> str:
        rows = []
        for row in data["rows"]:
            known = {**row, row["what"]: row["value"]}
            for bar in row["bars"]:
                name, sign, bound = bar.split()
                holds = known[name] >= float(bound) if sign == ">=" else known[name] <= float(bound)
                limit = f"{'at least' if sign == '>=' else 'at most'} {said(name, float(bound))}"
                met = "met" if holds else "**not met**"
                rows.append([row["kernel"], shape(row), variant(row), limit, measured(name, known[name]), met])
        return table(["what", "of", "variant", "bar", "measured", ""], rows, "llllrl")

    return _drawn(results, "kernels", draw)


def kernels(results: Path) -> str:
    """Rates of the kernels beside those of plain reads, and errors."""

    def draw(data: dict[str, Any]) -> str:
        rows = [
            [
                *(row["kernel"], shape(row), variant(row), f"{row['bytes'] / 1e6:.0f}", f"{row['gb_per_s']:.1f}"),
                *(f"{row[kind]:.1f}" if kind in row else "" for kind in ("stream", "scatter", "cached")),
                *(f"{row[kind]:.0%}" if kind in row else "" for kind in ("of_stream", "of_scatter")),
                "" if row["error"] is None else f"{row['error']:.1e}",
            ]
            for row in data["rows"]
            if row["gb_per_s"]
        ]
        head = ["kernel", "of", "variant", "MB", "GB/s", "stream", "scatter", "cached"]
        head += ["of stream", "of scatter", "error"]
        return table(head, rows, "lll" + "r" * 8)

    return _drawn(results, "kernels", draw)


def peers(results: Path) -> str:
    """Times of other implementations over ours."""

    def draw(data: dict[str, Any]) -> str:
        rows = [
            [
                *(row["work"], row["peer"], f"{row['ms']:.2f}", f"{row['ours_ms']:.2f}", f"{row['over_ours']:.1f}x"),
                *(f"{row['error']:.1e}", f"{row['error_ours']:.1e}"),
            ]
            for row in data["rows"]
        ]
        return table(["work", "by", "ms", "ours (ms)", "of ours", "error", "ours"], rows, "llrrrrr")

    return _drawn(results, "peers", draw)


def forks(results: Path) -> str:
    """Steps of several branches of a document over that of one."""

    def draw(data: dict[str, Any]) -> str:
        rows = [
            [
                *(row["policy"], f"{row['document'] // 1024}K", str(row["branches"]), row["queries"], row["sharing"]),
                *(f"{row['one_ms']:.2f}", f"{row['step_ms']:.2f}", f"{row['over_one']:.2f}x", f"{row['error']:.1e}"),
            ]
            for row in data["rows"]
        ]
        head = ["policy", "document", "branches", "queries", "sharing", "one (ms)", "all (ms)", "of one", "error"]
        return table(head, rows, "lrrllrrrr")

    return _drawn(results, "forks", draw)


def _drawn(results: Path, name: str, draw: Callable[[dict[str, Any]], str]) -> str:
    out = []
    for path, data in result_files(results, f"{name}.json"):
        note = f"Medians of {data['rounds']} rounds. {where(data)}"
        out.append(f"{draw(data)}\n{note} [Data]({link(path)}).\n")
    return "\n".join(out) or nothing(f"{name}.py")


ROOFLINE_TABLES: dict[str, Callable[[Path], str]] = {
    "bars": bars,
    "kernels": kernels,
    "peers": peers,
    "forks": forks,
}
