"""Fills the tables of README.md and docs/ from the result files and the code, so that no number is typed.

`python benchmark/tables.py` rewrites what lies between <!-- table:NAME --> and <!-- /table:NAME -->; with
--check it changes nothing, and its exit code is 1 if it would.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import common

from fluxion_sglang.config import FluxionConfig

PAGES = ("README.md", "docs/sglang.md", "docs/tour.md", "models/needle/README.md")
_MARKED = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table:\2 -->)", re.S)


def table(head: list[str], rows: list[list[str]], align: str) -> str:
    """A Markdown table; `align` has one of l, r a column."""
    rule = [{"l": "---", "r": "---:"}[a] for a in align]
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, rule, *rows])


def options(_: Path) -> str:
    rows = [[f"`{o.key}`", o.type, f"`{o.default}`", o.doc, f"`{o.example}`"] for o in FluxionConfig.options()]
    return table(["key", "type", "default", "what it does", "example"], rows, "lllll")


def one_batch(results: Path) -> str:
    """TPOT by model, batch and length; a column a policy, and the gain of the last over the first."""
    out = []
    for path, data in _found(results, "one_batch.json"):
        times: dict[tuple[str, int, int], dict[str, list[float]]] = {}
        for row in data["rows"]:
            cell = times.setdefault((row["model"], row["batch"], row["length"]), {})
            cell.setdefault(row["policy"], []).append(row["tpot_ms"])
        policies = list(dict.fromkeys(row["policy"] for row in data["rows"]))
        sparse = policies[-1]
        rows = []
        for (model, batch, length), cell in sorted(times.items(), key=lambda item: item[0]):
            at = {policy: median(values) for policy, values in cell.items()}
            gain = f"{at['off'] / at[sparse]:.1f}x" if "off" in at and sparse in at and sparse != "off" else ""
            rows.append(
                [model, str(batch), f"{length:,}"]
                + [f"{at[policy]:.1f}" if policy in at else "" for policy in policies]
                + [gain]
            )
        head = ["model", "batch", "prompt", *(f"{p} (ms)" for p in policies), f"off / {sparse}"]
        reads = data.get("memory_read_gb_per_s", [])
        note = f"TPOT, median of {_rounds(data)} run(s) of 32 steps. {_where(data)}"
        if reads:
            note += f" Memory read by a plain stream during the run: {min(reads):.0f} to {max(reads):.0f} GB/s."
        out.append(table(head, rows, "lrr" + "r" * (len(policies) + 1)) + f"\n{note} [Data]({_link(path)}).\n")
    return "\n".join(out) or _nothing("one_batch.py")


def needle_accuracy(results: Path) -> str:
    """Whole answers that are right, by task and length; a column a policy."""
    out = []
    for path, data in _found(results, "needle_accuracy.json"):
        found = {(row["task"], row["length"], row["policy"]): row for row in data["rows"]}
        policies = list(dict.fromkeys(row["policy"] for row in data["rows"]))
        rows = []
        for task, length in dict.fromkeys((task, length) for task, length, _ in found):
            cells = [found.get((task, length, policy)) for policy in policies]
            asked = max(cell["questions"] for cell in cells if cell)
            rows.append([task, f"{length:,}", str(asked), *(f"{c['accuracy']:.2f}" if c else "" for c in cells)])
        rows.sort(key=lambda row: row[0])
        align = "lrr" + "r" * len(policies)
        note = f"Share of answers that are right as a whole. {_where(data)}"
        out.append(
            table(["task", "prompt", "questions", *policies], rows, align) + f"\n{note} [Data]({_link(path)}).\n"
        )
    return "\n".join(out) or _nothing("needle_accuracy.py")


TABLES: dict[str, Callable[[Path], str]] = {
    "options": options,
    "one_batch": one_batch,
    "needle_accuracy": needle_accuracy,
}


def fill(text: str, results: Path, prefix: str = "") -> str:
    """The text with every marked table rendered anew.

    Args:
        prefix: from the page to the root of the repository, for links.

    Raises:
        KeyError: the text marks a table that does not exist.
    """

    def render(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise KeyError(f"there is no table {match[2]!r}; the tables are {', '.join(TABLES)}")
        body = TABLES[match[2]](results).replace("](benchmark/", f"]({prefix}benchmark/")
        return f"{match[1]}{body}{match[3]}"

    return _MARKED.sub(render, text)


def _found(results: Path, name: str) -> list[tuple[Path, dict[str, Any]]]:
    found = [(path, common.load(path)) for path in sorted(results.glob(f"*/{name}"))]
    return [(path, data) for path, data in found if data is not None and data["rows"]]


def _rounds(data: dict[str, Any]) -> int:
    return 1 + max(row["round"] for row in data["rows"])


def _where(data: dict[str, Any]) -> str:
    at, of = data["machine"], data["versions"]
    cpu = f"{at['cpu']}, {at['cores']} cores" + (f" ({', '.join(at['flags'])})" if at["flags"] else "")
    return f"{cpu}, no GPU; sglang {of['sglang']}, torch {of['torch']}; commit {data['commit']}, {data['date']}."


def _link(path: Path) -> str:
    return f"benchmark/results/{path.parent.name}/{path.name}"


def _nothing(script: str) -> str:
    return f"Not measured yet: `python benchmark/{script}`.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill the tables of README.md and docs/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if something would change")
    args = parser.parse_args()
    stale = []
    for name in PAGES:
        page = common.ROOT / name
        if not page.exists():
            continue
        old = page.read_text()
        new = fill(old, common.RESULTS, "../" * name.count("/"))
        if new != old:
            stale.append(name)
            if not args.check:
                page.write_text(new)
    if args.check and stale:
        sys.exit(f"{', '.join(stale)}: tables differ from the results; run python benchmark/tables.py")
    print(f"rewritten: {', '.join(stale)}" if stale else "all tables are up to date")


if __name__ == "__main__":
    main()
