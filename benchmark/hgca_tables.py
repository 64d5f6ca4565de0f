"""Tables in the shape of rivals' own: HGCA's Table 1 (perplexity by share of the text on the device and by beta), and
PSA's Fig. 5 (what is read at 98% of the quality of `full`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rendering import link, nothing, result_files, table, where

from fluxion_quality import table as quality_table

SINKS = 64


def hgca_perplexity(results: Path) -> str:
    """A line a text and share, a column a beta: perplexity, and the bytes read of the middle's."""
    runs: dict[Path, list[tuple[Path, dict[str, Any]]]] = {}
    for path, data in result_files(results, "quality_hgca_*.json"):
        runs.setdefault(path.parent, []).append((path, data))
    out = []
    for found in runs.values():
        lines = []
        for path, data in found:
            cells = {(row["task"], row["length"], row["policy"]): row for row in data["rows"]}
            for task, length in dict.fromkeys((row["task"], row["length"]) for row in data["rows"]):
                share = (SINKS + data["config"]["window"]) / length
                of = [cells[task, length, policy] for policy in data["policies"]]
                shown = [_shown(row, of[0]) for row in of]
                lines.append((task, length, share, [task, f"{length:,}", f"[{share:.2f}]({link(path)})", *shown]))
        policies = [policy.replace("hgca:", "beta ") for policy in found[0][1]["policies"]]
        shown_lines = [line for *_, line in sorted(lines, key=lambda line: line[:3])]
        data = found[0][1]
        note = f"Model {data['model']['id']}, {data['samples']} samples, dtype {data['dtype']}. {where(data)}"
        for _, other in found[1:]:
            if other["commit"] != data["commit"]:
                note += f" With a window of {other['config']['window']:,}: commit {other['commit'][:12]}."
        out.append(
            table(["text", "length", "GPU ratio", *policies], shown_lines, "lrr" + "r" * len(policies)) + f"\n{note}\n"
        )
    return "\n".join(out) or nothing("__main__.py --only quality")


def _shown(row: dict[str, Any], full: dict[str, Any]) -> str:
    score = f"{row['score']:.3f}" if row["score"] < 1e4 else f"{row['score']:.1e}"
    return score if row is full else f"{score} ({row['read_fraction']:.0%})"


def psa_reads(results: Path) -> str:
    """The least that fixed budgets and `psa:EPS:32` read to keep 98% of the score of `full`."""
    out = []
    for path, data in result_files(results, "quality_psa.json"):
        shown = [policy for policy in data["policies"] if not policy.endswith(":quest")]
        rows = [row for row in data["rows"] if row["policy"] in shown]
        lines = quality_table.least_reads({**data, "policies": shown, "rows": rows}, 0.98)
        note = f"Model {data['model']['id']}, {data['samples']} samples a task, dtype {data['dtype']}. {where(data)}"
        out.append(f"{lines}\n{note} [Data]({link(path)}).\n")
    return "\n".join(out) or nothing("__main__.py --only quality")


HGCA_TABLES: dict[str, Callable[[Path], str]] = {"hgca_perplexity": hgca_perplexity, "psa_reads": psa_reads}
