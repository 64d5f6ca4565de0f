"""Fills the tables of README.md and docs/ from the result files and the code, so that no number is typed.

`python benchmark/tables.py` rewrites what lies between <!-- table:NAME --> and <!-- /table:NAME -->; with
--check it changes nothing, and its exit code is 1 if it would.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import common
from hgca_tables import HGCA_TABLES
from layer_tables import LAYER_TABLES
from one_batch import BEST_FIXED, LARGE, MODELS
from race_tables import RACE_TABLES
from rendering import link, nothing, result_files, table, where
from rivals import rivals
from roofline_tables import ROOFLINE_TABLES
from summary_tables import SUMMARY_TABLES

from fluxion_quality import table as quality_table
from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.executor.metrics import described
from fluxion_sglang.training.report import calibration_table, metrics_table
from fluxion_sglang.training.tau import verdict

_MARKED = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table:\2 -->)", re.S)


def options(_: Path) -> str:
    out = []
    for group, options in itertools.groupby(FluxionConfig.options(), lambda option: option.group):
        rows = [[f"`{o.key}`", o.type, f"`{o.default}`", o.doc, f"`{o.example}`"] for o in options]
        out.append(f"### {group}\n\n{table(['key', 'type', 'default', 'what it does', 'example'], rows, 'lllll')}")
    return "\n".join(out)


def metrics(_: Path) -> str:
    return table(["metric", "what it says"], [[f"`{name}`", text] for name, text in described().items()], "ll")


def one_batch(results: Path) -> str:
    """TPOT by model, batch and length; a column a policy, and gains."""
    out = []
    for path, data in [found for model in MODELS for found in result_files(results, f"one_batch_{model}.json")]:
        reads = data.get("memory_read_gb_per_s", [])
        note = f"TPOT, medians of {_steps(data)} steps in {_rounds(data)} run(s). {where(data)}"
        if reads:
            note += f" Memory read by a plain stream during the run: {min(reads):.0f} to {max(reads):.0f} GB/s."
        out.append(f"{_compared(data['rows'], 'tpot_ms', 'off', 1)}\n{note} [Data]({link(path)}).\n")
    return "\n".join(out) or nothing("one_batch.py")


def gpu_idle(results: Path) -> str:
    """What a GPU waits for the CPU in a layer, and its share of TPOT, in the shape of Fluxion's Table 5."""
    out = []
    for path, data in [found for model in LARGE for found in result_files(results, f"one_batch_{model}.json")]:
        cells: dict[tuple[str, int, int, str], list[dict[str, Any]]] = {}
        for row in data["rows"]:
            if "idle_ms" in row:
                cells.setdefault((row["model"], row["batch"], row["length"], row["policy"]), []).append(row)
        rows = [
            [
                *(model, str(batch), f"{length:,}", f"`{policy}`"),
                f"{median(row['tpot_ms'] for row in found):.1f}",
                f"{median(row['idle_ms'] for row in found):.3f}",
                f"{median(row['idle_ratio'] for row in found):.1%}",
            ]
            for (model, batch, length, policy), found in sorted(cells.items())
        ]
        if rows:
            head = ["model", "batch", "prompt", "policy", "TPOT (ms)", "idle (ms a layer)", "idle ratio"]
            note = f"TPOT: medians, idle: means of {_steps(data)} steps in {_rounds(data)} run(s). {where(data)}"
            out.append(f"{table(head, rows, 'lrrlrrr')}\n{note} [Data]({link(path)}).\n")
    return "\n".join(out) or nothing("one_batch.py --device cuda")


def schedulers(results: Path) -> str:
    """Time of a layer by lengths, executors and scheduler; ratios are taken within a round, where the batch is one."""
    out = []
    for path, data in result_files(results, "schedulers.json"):
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
        note = f"Medians of {_rounds(data)} batches of {len(data['rows'][0]['lengths'])} requests. {where(data)}"
        note += f" Memory read by a plain stream during the run: {min(reads):.0f} to {max(reads):.0f} GB/s."
        out.append(table(head, rows, "lllrrrr") + f"\n{note} [Data]({link(path)}).\n")
    return "\n".join(out) or nothing("schedulers.py")


def attention(results: Path) -> str:
    """Attention time of a layer by model, batch and length; a column a policy, and gains."""
    return _attention(results, lambda rows, _: _compared(rows, "attention_ms", "full", 2))


def attention_reads(results: Path) -> str:
    """What each policy reads, how fast, and how far its outputs are from exact; of the largest batch."""

    def draw(rows: list[dict[str, Any]], _: Path) -> str:
        batch = max(row["batch"] for row in rows)
        lines = [
            [
                *(row["model"], f"{row['length']:,}", row["policy"]),
                *(f"{row['read']:.1%}", f"{row['tile_bytes'] / 1e6:.2f}", f"{row['metadata_bytes'] / 1e6:.2f}"),
                *(f"{row['gb_per_s']:.1f}", f"{row['gb_per_s'] / row['memory_read_gb_per_s']:.0%}"),
                *(f"{row['error_mean']:.1e}", f"{row['error_max']:.1e}"),
            ]
            for row in sorted(rows, key=lambda row: (row["model"], row["length"]))
            if row["batch"] == batch
        ]
        head = ["model", "prompt", "policy", "tokens read", "tiles (MB)", "metadata (MB)", "GB/s", "of a stream"]
        return f"Batch {batch}.\n\n" + table([*head, "error", "largest"], lines, "lrlrrrrrrr")

    return _attention(results, draw)


def overhead(results: Path) -> str:
    """What `fluxion` spends on deciding: a layer's milliseconds, and its share of a layer's attention and of TPOT."""

    def draw(rows: list[dict[str, Any]], path: Path) -> str:
        served = common.load(path.with_name("one_batch_needle.json")) or {"rows": []}
        lines = []
        for row in sorted(rows, key=lambda row: (row["batch"], row["length"])):
            if row["policy"] != "fluxion":
                continue
            spent = row["features_ms"] + row["plan_ms"]
            cell = {key: row[key] for key in ("model", "policy", "length", "batch")}
            tpot = [other["tpot_ms"] for other in served["rows"] if cell.items() <= other.items()]
            lines.append(
                [
                    *(str(row["batch"]), f"{row['length']:,}"),
                    *(f"{row[f'{phase}_ms']:.3f}" for phase in common.PHASES),
                    f"{spent / row['attention_ms']:.1%}",
                    f"{spent * row['layers'] / median(tpot):.1%}" if tpot else "",
                    f"{row['anchor_ms']:.2f}",
                ]
            )
        head = ["batch", "prompt", "attention (ms)", *common.PHASES[1:], "of attention", "of TPOT", "anchor, once (ms)"]
        return table(head, lines, "r" * len(head))

    return _attention(results, draw)


def _attention(results: Path, draw: Callable[[list[dict[str, Any]], Path], str]) -> str:
    out = []
    for path, data in result_files(results, "attention.json"):
        reads = [row["memory_read_gb_per_s"] for row in data["rows"]]
        note = f"Of {data['turns']} turns. {where(data)}"
        note += f" Memory read by a plain stream during the run: {min(reads):.0f} to {max(reads):.0f} GB/s."
        out.append(f"{draw(data['rows'], path)}\n{note} [Data]({link(path)}).\n")
    return "\n".join(out) or nothing("attention.py")


def _compared(rows: list[dict[str, Any]], value: str, base: str, digits: int) -> str:
    """A line a model, batch and length, a column a policy with the median of its `value`, and where there is something
    to compare: what `base` and `full` take over `fluxion`, `base` over a fixed policy, and that over `fluxion`; without
    `fluxion`, `base` over the others."""
    found: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    for row in rows:
        cell = found.setdefault((row["model"], row["batch"], row["length"]), {})
        cell.setdefault(row["policy"], []).append(row[value])
    cells = {key: {policy: median(of) for policy, of in cell.items()} for key, cell in sorted(found.items())}
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    fixed = [policy for policy in policies if policy.startswith("fixed")]
    if "fluxion" in policies:
        near = BEST_FIXED if BEST_FIXED in fixed else (fixed or [""])[-1]
        pairs = list(dict.fromkeys([(base, "fluxion"), ("full", "fluxion"), (base, near), (near, "fluxion")]))
    else:
        pairs = [(base, policy) for policy in ["full", *fixed[:1]] if policy != base]
    pairs = [(a, b) for a, b in pairs if any(a in cell and b in cell for cell in cells.values())]
    lines = [
        [model, str(batch), f"{length:,}"]
        + [f"{cell[policy]:.{digits}f}" if policy in cell else "" for policy in policies]
        + [f"{cell[a] / cell[b]:.1f}x" if a in cell and b in cell else "" for a, b in pairs]
        for (model, batch, length), cell in cells.items()
    ]
    head = ["model", "batch", "prompt", *(f"{p} (ms)" for p in policies), *(f"{a} / {b}" for a, b in pairs)]
    return table(head, lines, "lrr" + "r" * (len(policies) + len(pairs)))


def quality(results: Path) -> str:
    """Means over RULER's tasks, by length and policy, of few fixed policies; `pareto` has all of them."""
    return _quality(results, lambda data: quality_table.averages(_few(data)))


def pareto(results: Path) -> str:
    """RULER's scores against bytes, and the cheapest fixed policy of equal quality."""
    return _quality(results, quality_table.pareto)


def quality_tasks(results: Path) -> str:
    """RULER's scores by task and length; a column a policy, and of the fixed ones those of the paper's baselines."""
    return _quality(results, lambda data: quality_table.scores(_few(data), intervals=False))


def _few(data: dict[str, Any]) -> dict[str, Any]:
    """Without the fixed policies that are not the baselines of the paper's tables."""

    def shown(policy: str) -> bool:
        kind, *args = policy.split(":")
        return kind != "fixed" or (args[0] in ("16", "32") and args[1] in ("0.02", "0.05"))

    rows = [row for row in data["rows"] if shown(row["policy"])]
    return {**data, "policies": [policy for policy in data["policies"] if shown(policy)], "rows": rows}


def large(results: Path) -> str:
    """Fixed budgets beyond the grid."""
    return _quality(results, quality_table.pareto, "quality_large.json")


def adaptive(results: Path) -> str:
    """What can be had without training, beside what a predictor gives."""
    return _quality(results, quality_table.averages, "quality_adaptive.json")


def ablations(results: Path) -> str:
    """Criteria and choices of the selector, in the shape of the paper's Fig. 9."""
    return _quality(results, lambda data: quality_table.averages(data), "quality_ablations.json")


def guard(results: Path) -> str:
    """What the guard rail buys and costs: policies by guard, without one first."""
    files = result_files(results, "quality_guard_*.json")
    out = []
    for base, whole in result_files(results, "quality_ruler.json"):
        guarded = [(path, data) for path, data in files if path.parent == base.parent]
        if not guarded:
            continue
        rows = []
        for _, data in [(base, whole), *guarded]:
            value = data["config"].get("guard")
            for length, policy, row in quality_table.averaged(data):
                if policy not in guarded[0][1]["policies"] or policy == "full":
                    continue
                cells = [f"{row['score']:.3f}", f"{row['read_fraction']:.2%}", f"{row['error_mean']:.4f}"]
                cells += [f"{row['error_p99']:.4f}", f"{row['kl']:.2e}"]
                rows.append((length or 0, policy, -(value or 9), [f"{length:,}", policy, f"{value or 'off'}", *cells]))
        head = ["prompt", "policy", "guard", "score", "read", "error", "p99", "KL"]
        lines = [line for *_, line in sorted(rows, key=lambda row: row[:3])]
        sources = [f"[commit {data['commit']}]({link(path)})" for path, data in [(base, whole), *guarded]]
        note = f"Of {', '.join(sources)}. {where(guarded[0][1])}"
        out.append(f"{table(head, lines, 'rllrrrrr')}\n{note}\n")
    return "\n".join(out) or "Not measured yet: `python -m benchmark --only quality`.\n"


def psa(results: Path) -> str:
    """PSA's Fig. 5: the least that each family reads at 98% of full quality, and at equal error; then all of them."""

    def draw(data: dict[str, Any]) -> str:
        views = (quality_table.least_reads(data, 0.98), quality_table.reads_at_equal_error(data))
        return "\n".join([*views, quality_table.averages(data)])

    return _quality(results, draw, "quality_psa.json")


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
    found = json.loads((common.PREDICTOR / "predictor.json").read_text())
    key = found["calibrated"]
    return metrics_table({float(key): found["taus"][key]["metrics"]})


def calibration(_: Path) -> str:
    """What every tau did to held-out sequences, and what followed."""
    found = json.loads((common.PREDICTOR / "calibration.json").read_text())
    return f"{calibration_table(found['rows'])}\n{verdict(found)}\n"


def block_scores(results: Path) -> str:
    """Recall of the attention mass by block score; a column a block size and budget."""
    out = []
    for path, data in result_files(results, "block_scores.json"):
        shown = [(16, 0.02), (16, 0.05), (16, 0.1), (32, 0.05), (64, 0.05)]
        recall = {(row["score"], row["blk"], row["budget"]): row["recall"] for row in data["rows"]}
        cost = {row["score"]: row["metadata"] for row in data["rows"]}
        rows = [
            [name, "" if cost[name] is None else f"{cost[name]:g}", *(f"{recall[name, *at]:.3f}" for at in shown)]
            for name in cost
        ]
        head = ["score", "vectors a block", *(f"{blk}, {budget:.0%}" for blk, budget in shown)]
        note = (
            f"Model {data['model']['id']} ({data['model']['sha256'][:12]}), {data['length']:,} tokens, "
            f"{data['samples']} document(s) a task. {where(data)}"
        )
        out.append(table(head, rows, "lr" + "r" * len(shown)) + f"\n{note} [Data]({link(path)}).\n")
    return "\n".join(out) or nothing("block_scores.py")


def lfps_overlap(results: Path) -> str:
    """What LFPS finds of the exact top k, by alpha, with and without neighbours; Quest beside it."""
    out = []
    for path, data in result_files(results, "lfps_selection.json"):
        head = [
            "alpha",
            "neighbours",
            "candidates",
            "overlap",
            "needed",
            "Quest's overlap",
            "needed",
            "as the step before",
        ]
        columns = ("candidates", "lfps_overlap", "lfps_overlap_needed", "quest_overlap", "quest_overlap_needed")
        rows = [
            [f"{row['alpha']}", "yes" if row["expand"] else "no"]
            + [f"{row[name]:.1%}" for name in (*columns, "same_as_before")]
            for row in data["overlap"]
        ]
        note = (
            f"k = {data['budget']:.0%} of the middle, {data['length']:,} tokens, {data['steps']} steps. {where(data)}"
        )
        out.append(f"{table(head, rows, 'llrrrrrr')}\n{note} [Data]({link(path)}).\n")
    return "\n".join(out) or nothing("lfps_selection.py")


def lfps_times(results: Path) -> str:
    """Time of selections by length: exact top-k, Quest, LFPS and its parts; ratios are of the same steps."""
    out = []
    for path, data in result_files(results, "lfps_selection.json"):
        head = ["D", "heads a group", "tokens", "exact (ms)", "Quest (ms)", "LFPS (ms)", "scan, score, learn"]
        rows = [
            [
                *(f"{row['head_dim']}", f"{row['group']}", f"{row['length']:,}"),
                *(f"{row[f'{name}_ms']:.2f}" for name in ("exact", "quest", "lfps")),
                ", ".join(f"{row[f'{name}_ms']:.2f}" for name in ("scan", "score", "learn")),
                f"{row['candidates']:.1%}",
                *(f"{row[f'{name}_ms'] / row['lfps_ms']:.1f}x" for name in ("exact", "quest")),
            ]
            for row in sorted(data["rows"], key=lambda row: (row["head_dim"], -row["group"], row["length"]))
        ]
        note = f"Medians of {data['steps']} steps. {where(data)}"
        lines = table([*head, "candidates", "exact / LFPS", "Quest / LFPS"], rows, "r" * 10)
        out.append(f"{lines}\n{note} [Data]({link(path)}).\n")
    return "\n".join(out) or nothing("lfps_selection.py")


def soak(results: Path) -> str:
    """What each process of a server held after a soak, and how its memory went; and what had happened by then."""
    out = []
    for path, data in result_files(results, "soak*.json"):
        rows = [
            [
                *(f"{one['process']}", f"{one['rss_mib']:,.0f}"),
                *(f"{one['mib_per_hour']:+.1f}", f"{one['low']:+.1f} to {one['high']:+.1f}"),
                *(f"{one['fds']}", f"{one['threads']}"),
            ]
            for one in data["processes"]
        ]
        head = ["process", "memory (MiB)", "growth (MiB an hour)", "95% interval", "file descriptors", "threads"]
        seen = data["happened"]
        note = (
            f"After {data['minutes']:.0f} minutes, {data['tp']} rank(s), {data['rows'][-1]['done']:,} requests and "
            f"interferences, {seen['retracted requests']} retractions, {seen['evicted tokens']:,} evicted tokens: "
            f"{data['leaked_tokens']} leaked tokens, {len(data['wrong'])} wrong or lost answers, the same from the "
            f"canary all {data['canaries'].split()[0]} times. {where(data)}"
        )
        out.append(f"{table(head, rows, 'lrrrrr')}\n{note} [Data]({link(path)}).\n")
    return "\n".join(out) or "Not measured yet: `make soak`.\n"


def sanitizers(results: Path) -> str:
    """How the unit tests of the native library ended under each sanitizer, and what it reported."""
    out = []
    for path, data in result_files(results, "sanitizers.json"):
        rows = [
            [
                *(one["sanitizer"], str(len(one["tests"]))),
                *(f"{one[key]:,}" for key in ("passed", "skipped", "failed", "reports")),
                f"{one['seconds'] / 60:.0f}",
            ]
            for one in data["rows"]
        ]
        head = ["sanitizer", "test files", "passed", "skipped", "failed", "reports", "minutes"]
        note = (
            f"Property tests with {data['effort']:g} times their usual number of examples; minutes without the build. "
            f"{where(data)}"
        )
        out.append(f"{table(head, rows, 'lrrrrrr')}\n{note} [Data]({link(path)}).\n")
    return "\n".join(out) or "Not run yet: `make sanitize`.\n"


def restart(results: Path) -> str:
    """A line a prompt: its first token, by where its KV comes from."""
    out = []
    for path, data in result_files(results, "restart.json"):
        ways = ["plain", "cold", "again", "restarted", "disk"]
        head = ["prompt", "files of it", "no `disk`", "computed", "in the host pool", "in files", "files, not cached"]
        lines = [
            [
                f"{row['tokens']:,} tokens",
                f"{row['file_mib']:,.0f} MiB",
                *(f"{row['seconds'][way]:.3f} s" for way in ways),
            ]
            for row in data["rows"]
        ]
        note = (
            "Time to the first token, the bundled model in bfloat16, policy `full`; medians of "
            f"{data['prompts']} prompts. {where(data)} [Data]({link(path)}), `python benchmark/restart.py`."
        )
        out.append(f"{table(head, lines, 'l' + 'r' * (len(head) - 1))}\n{note}\n")
    return "\n".join(out) or nothing("restart.py")


def _quality(results: Path, draw: Callable[[dict[str, Any]], str], name: str = "quality_ruler.json") -> str:
    out = []
    for path, data in result_files(results, name):
        model = f"Model {data['model']['id']} ({data['model']['sha256'][:12]}), {data['samples']} samples a task"
        note = f"{model}, seed {data['seed']}, dtype {data['dtype']}. {where(data)}"
        out.append(f"{draw(data)}\n{note} [Data]({link(path)}).\n")
    suite = name.removeprefix("quality_").removesuffix(".json")
    return "\n".join(out) or f"Not measured yet: `fluxion bench quality --suite {suite}`.\n"


TABLES: dict[str, Callable[[Path], str]] = {
    "options": options,
    "metrics": metrics,
    "one_batch": one_batch,
    "gpu_idle": gpu_idle,
    "schedulers": schedulers,
    "attention": attention,
    "attention_reads": attention_reads,
    "overhead": overhead,
    "quality": quality,
    "pareto": pareto,
    "quality_tasks": quality_tasks,
    "guard": guard,
    "psa": psa,
    "rivals": rivals,
    "far": far,
    "large": large,
    "adaptive": adaptive,
    "ablations": ablations,
    "extraction": extraction,
    "perplexity": perplexity,
    "needle_heads": needle_heads,
    "predictor": predictor,
    "calibration": calibration,
    "block_scores": block_scores,
    "lfps_overlap": lfps_overlap,
    "lfps_times": lfps_times,
    "soak": soak,
    "restart": restart,
    "sanitizers": sanitizers,
    **SUMMARY_TABLES,
    **ROOFLINE_TABLES,
    **HGCA_TABLES,
    **LAYER_TABLES,
    **RACE_TABLES,
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


def _rounds(data: dict[str, Any]) -> int:
    return 1 + max(row["round"] for row in data["rows"])


def _steps(data: dict[str, Any]) -> int:
    return min(row.get("steps", 32) for row in data["rows"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill the tables of README.md and docs/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if something would change")
    args = parser.parse_args()
    stale = []
    pages = [
        common.ROOT / "README.md",
        *sorted((common.ROOT / "docs").glob("*.md")),
        *common.ROOT.glob("models/*/README.md"),
    ]
    for page in pages:
        name = str(page.relative_to(common.ROOT))
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
