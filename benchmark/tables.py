"""Fills the tables of README.md and docs/ from the result files and the code, so that no number is typed.

`python benchmark/tables.py` rewrites what lies between <!-- table:NAME --> and <!-- /table:NAME -->; with
--check it changes nothing, and its exit code is 1 if it would.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import common

from fluxion_quality import table as quality_table
from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.predictor.report import calibration_table, metrics_table

PAGES = (
    *("README.md", "docs/quality.md", "docs/sglang.md", "docs/tour.md", "docs/predictor.md", "docs/scheduling.md"),
    "models/needle/README.md",
)
PREDICTOR = common.NEEDLE / "fluxion"
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


def schedulers(results: Path) -> str:
    """Time of a layer by lengths, executors and scheduler; ratios are taken within a round, where the batch is one."""
    out = []
    for path, data in _found(results, "schedulers.json"):
        cells: dict[tuple[str, str], dict[str, dict[int, dict[str, Any]]]] = {}
        for row in data["rows"]:
            cell = cells.setdefault((row["workload"], row["executors"]), {})
            cell.setdefault(row["scheduler"], {})[row["round"]] = row
        rows = []
        for (workload, executors), cell in cells.items():
            base = cell["priority"]
            for scheduler, rounds in cell.items():
                ratios = [row["layer_ms"] / base[turn]["layer_ms"] for turn, row in rounds.items()]
                rows.append(
                    [
                        workload,
                        executors,
                        scheduler,
                        f"{median(row['layer_ms'] for row in rounds.values()):.2f}",
                        f"{median(ratios):.2f}x",
                        f"{min(ratios):.2f} to {max(ratios):.2f}",
                        f"{mean(row['torch_tasks'] for row in rounds.values()):.0%}",
                    ]
                )
        head = ["lengths", "executors", "scheduler", "ms a layer", "of priority's", "in a round", "tasks done by torch"]
        reads = data["memory_read_gb_per_s"]
        note = f"Medians of {_rounds(data)} batches of {len(data['rows'][0]['lengths'])} requests. {_where(data)}"
        note += f" Memory read by a plain stream during the run: {min(reads):.0f} to {max(reads):.0f} GB/s."
        out.append(table(head, rows, "lllrrrr") + f"\n{note} [Data]({_link(path)}).\n")
    return "\n".join(out) or _nothing("schedulers.py")


def quality(results: Path) -> str:
    """Means over RULER's tasks, by length and policy."""
    return _quality(results, lambda data: quality_table.averages(data))


def quality_tasks(results: Path) -> str:
    """RULER's scores by task and length; a column a policy, and of the fixed ones those of the paper's baselines."""

    def shown(policy: str) -> bool:
        kind, *args = policy.split(":")
        return kind != "fixed" or (args[0] in ("16", "32") and args[1] in ("0.02", "0.05"))

    def draw(data: dict[str, Any]) -> str:
        kept = {
            "policies": [policy for policy in data["policies"] if shown(policy)],
            "rows": [row for row in data["rows"] if shown(row["policy"])],
        }
        return quality_table.scores({**data, **kept}, intervals=False)

    return _quality(results, draw)


def ablations(results: Path) -> str:
    """Criteria and choices of the selector, in the shape of the paper's Fig. 9."""
    return _quality(results, lambda data: quality_table.averages(data), "quality_ablations.json")


def far(results: Path) -> str:
    """RULER beyond the trained lengths."""
    return _quality(results, lambda data: quality_table.scores(data, intervals=False), "quality_far.json")


def extraction(results: Path) -> str:
    """Scores of the extraction suite."""
    return _quality(results, lambda data: quality_table.averages(data), "quality_extraction.json")


def perplexity(results: Path) -> str:
    """By task: a mean over them would say nothing."""
    return _quality(results, lambda data: quality_table.scores(data, intervals=False), "quality_perplexity.json")


def needle_heads(_: Path) -> str:
    """What the heads of the bundled model do, beside what Fluxion's paper and common observation say of large ones."""
    found = json.loads((common.NEEDLE / "heads.json").read_text())
    blocks = ("16", "32", "64", "128")
    rows = []
    for at in found["results"]:
        values = [value for layer in at["sink_value"] for value in layer]
        rows.append(
            [
                f"{at['length']:,}",
                str(at["steps"]),
                f"{at['streaming']:.0%}",
                *(f"{at['budget_of_retrieval_heads'][blk]:.1%}" for blk in blocks),
                f"{at['budget_grows']:.0%}",
                f"{max(head['bos'] for head in at['heads']):.2f}",
                f"{min(values):.2f} to {max(values):.2f}",
                f"{mean(at['overlap_in_group']):.2f}",
            ]
        )
    head = ["length", "steps", "streaming", *(f"budget at {blk}" for blk in blocks), "it grows", "most mass on `<bos>`"]
    return table([*head, "value of `<bos>`", "shared in a group"], rows, "r" * (len(head) + 2))


def predictor(_: Path) -> str:
    """Metrics of the bundled model's predictor at its calibrated tau, on held-out sequences."""
    found = json.loads((PREDICTOR / "predictor.json").read_text())
    key = found["calibrated"]
    return metrics_table({float(key): found["taus"][key]["metrics"]})


def calibration(_: Path) -> str:
    """What every tau did to held-out sequences."""
    return calibration_table(json.loads((PREDICTOR / "calibration.json").read_text())["rows"])


def block_scores(results: Path) -> str:
    """Recall of the attention mass by block score; a column a block size and budget."""
    out = []
    for path, data in _found(results, "block_scores.json"):
        shown = [(16, 0.02), (16, 0.05), (16, 0.1), (32, 0.05), (64, 0.05)]
        recall = {(row["score"], row["blk"], row["budget"]): row["recall"] for row in data["rows"]}
        cost = {row["score"]: row["metadata"] for row in data["rows"]}
        rows = [
            [name, "" if cost[name] is None else f"{cost[name]:g}", *(f"{recall[name, *at]:.3f}" for at in shown)]
            for name in cost
        ]
        head = ["score", "vectors a block", *(f"{blk}, {budget:.0%}" for blk, budget in shown)]
        note = (
            f"Model {data['model']['id']} ({data['model']['sha256'][:12]}), {data['length']:,} tokens. {_where(data)}"
        )
        out.append(table(head, rows, "lr" + "r" * len(shown)) + f"\n{note} [Data]({_link(path)}).\n")
    return "\n".join(out) or _nothing("block_scores.py")


def _quality(results: Path, draw: Callable[[dict[str, Any]], str], name: str = "quality_ruler.json") -> str:
    out = []
    for path, data in _found(results, name):
        model = f"Model {data['model']['id']} ({data['model']['sha256'][:12]}), {data['samples']} samples a task"
        note = f"{model}, seed {data['seed']}, dtype {data['dtype']}. {_where(data)}"
        out.append(f"{draw(data)}\n{note} [Data]({_link(path)}).\n")
    suite = name.removeprefix("quality_").removesuffix(".json")
    return "\n".join(out) or f"Not measured yet: `fluxion bench quality --suite {suite}`.\n"


TABLES: dict[str, Callable[[Path], str]] = {
    "options": options,
    "one_batch": one_batch,
    "schedulers": schedulers,
    "quality": quality,
    "quality_tasks": quality_tasks,
    "far": far,
    "ablations": ablations,
    "extraction": extraction,
    "perplexity": perplexity,
    "needle_heads": needle_heads,
    "predictor": predictor,
    "calibration": calibration,
    "block_scores": block_scores,
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
