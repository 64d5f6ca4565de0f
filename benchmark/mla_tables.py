"""Tables of mla.py: what the prototype of multi-head latent attention reads and computes in a second, and choices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rendering import link, nothing, result_files, table, where


def attention(results: Path) -> str:
    """A line a list, instruction set and number of heads: its rates, and their shares of the two ceilings."""
    out = []
    for path, data in result_files(results, "mla.json"):
        rows = [row for row in data["rows"] if "ms" in row]
        lines = [
            [
                row["list"],
                f"`{row['isa']}`",
                str(row["heads"]),
                f"{row['gb_per_s']:.1f}",
                f"{row['of_stream']:.0%}",
                f"{row['gflop_per_s']:.0f}",
                f"{row['of_matrix']:.0%}",
                f"{row['torch_over_ours']:.1f}x" if "torch_over_ours" in row else "",
                f"{row['error']:.1e}",
            ]
            for row in rows
        ]
        head = ["reads", "instruction set", "heads", "GB/s", "of stream", "GFLOP/s", "of product", "torch", "error"]
        note = (
            f"Medians of {data['rounds']} interleaved rounds, bfloat16. The stream gives {rows[0]['stream']:.0f} GB/s, "
            f"the product of two matrices {rows[0]['matrix']:.0f} GFLOP/s. {where(data)} [Data]({link(path)})."
        )
        out.append(f"{table(head, lines, 'llrrrrrrr')}\n{note}\n")
    return "\n".join(out) or nothing("mla.py")


def metadata(results: Path) -> str:
    """A line a number of heads: the scan of all blocks of 16 tokens beside attention to all of their tokens."""
    out = []
    for path, data in result_files(results, "mla.json"):
        rows = [row for row in data["rows"] if "scan_over_ours" in row]
        lines = [[str(row["heads"]), f"{row['scan_gb_per_s']:.1f}", f"{row['scan_over_ours']:.1%}"] for row in rows]
        head = ["heads", "metadata, GB/s", "time of the scan / of attention to all tokens"]
        out.append(f"{table(head, lines, 'rrr')}\nOf the same run as above. [Data]({link(path)}).\n")
    return "\n".join(out) or nothing("mla.py")


def unions(results: Path) -> str:
    """A line a correlation: what heads read together, and what they find in a choice made for all of them."""
    out = []
    for path, data in result_files(results, "mla.json"):
        cells: dict[float, dict[int, dict[str, Any]]] = {}
        for row in data["rows"]:
            if "union" in row:
                cells.setdefault(row["alike"], {})[row["heads"]] = row
        heads = sorted(next(iter(cells.values())))
        lines = [
            [f"{alike:g}", *(f"{of[h]['union']:.0%}" for h in heads), *(f"{of[h]['shared']:.0%}" for h in heads)]
            for alike, of in cells.items()
        ]
        head = [
            "correlation",
            *(f"{h} heads read" for h in heads),
            *(f"found in one list of {data['budget']:.0%}, {h} heads" for h in heads),
        ]
        note = f"Scores are normal numbers, 2,048 blocks, each head chooses {data['budget']:.0%}. [Data]({link(path)})."
        out.append(f"{table(head, lines, 'r' * len(head))}\n{note}\n")
    return "\n".join(out) or nothing("mla.py")


MLA_TABLES: dict[str, Callable[[Path], str]] = {
    "mla_attention": attention,
    "mla_metadata": metadata,
    "mla_unions": unions,
}
