"""Tables of quality: how often answers are right, by policy, and what the predictor of the bundled model decides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import common
import numpy as np
from rendering import link, result_files, table, where
from rivals import rivals

from fluxion_quality import stats
from fluxion_quality import table as quality_table
from fluxion_sglang.training.report import calibration_table, metrics_table
from fluxion_sglang.training.tau import verdict


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


def kv_dtype(results: Path) -> str:
    """What storing KV in 8 bits costs: a line a suite and length, and the interval of the difference."""
    out = []
    stored = dict(result_files(results, "quality_kv*_int8.json"))
    for folder in dict.fromkeys(path.parent for path in stored):
        lines, sources = [], []
        for path, packed in stored.items():
            whole = common.load(path.with_name(path.name.replace("int8", "auto")))
            if path.parent != folder or whole is None:
                continue
            for length in dict.fromkeys(row["length"] for row in packed["rows"]):
                scores, low, high = _between(packed, whole, length)
                delta = f"{scores[0] - scores[1]:+.3f} [{low:+.3f}, {high:+.3f}]"
                cells = [packed["suite"], f"{length:,}", str(packed["samples"])]
                lines.append([*cells, f"{scores[1]:.3f}", f"{scores[0]:.3f}", delta])
            sources.append(f"[{path.stem}]({link(path)}), commit {packed['commit']}")
        head = ["suite", "prompt", "samples a task", "bfloat16", "int8", "delta"]
        out.append(f"{table(head, lines, 'lrrrrr')}\nPolicy `full`. {where(packed)} Data: {'; '.join(sources)}.\n")
    return "\n".join(out) or "Not measured yet: `python -m benchmark --only quality`.\n"


def _between(one: dict[str, Any], other: dict[str, Any], length: int) -> tuple[list[float], float, float]:
    """Mean scores of two runs on the same questions over the tasks, and the interval of their difference."""
    rows = [{row["task"]: row for row in data["rows"] if row["length"] == length} for data in (one, other)]
    assert all(rows[1][task]["prompts"] == row["prompts"] for task, row in rows[0].items()), "other questions"
    deltas = [
        stats.resampled_deltas(row["samples"], rows[1][task]["samples"], row["documents"], row["measure"], seed=i)
        for i, (task, row) in enumerate(rows[0].items())
    ]
    low, high = stats.interval(np.mean(deltas, axis=0))
    return [mean(row["score"] for row in of.values()) for of in rows], low, high


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


def _quality(results: Path, draw: Callable[[dict[str, Any]], str], name: str = "quality_ruler.json") -> str:
    out = []
    for path, data in result_files(results, name):
        model = f"Model {data['model']['id']} ({data['model']['sha256'][:12]}), {data['samples']} samples a task"
        note = f"{model}, seed {data['seed']}, dtype {data['dtype']}. {where(data)}"
        out.append(f"{draw(data)}\n{note} [Data]({link(path)}).\n")
    suite = name.removeprefix("quality_").removesuffix(".json")
    return "\n".join(out) or f"Not measured yet: `fluxion bench quality --suite {suite}`.\n"


QUALITY_TABLES: dict[str, Callable[[Path], str]] = {
    "quality": quality,
    "pareto": pareto,
    "quality_tasks": quality_tasks,
    "large": large,
    "adaptive": adaptive,
    "ablations": ablations,
    "guard": guard,
    "psa": psa,
    "far": far,
    "extraction": extraction,
    "kv_quality": kv_dtype,
    "perplexity": perplexity,
    "needle_heads": needle_heads,
    "predictor": predictor,
    "calibration": calibration,
    "rivals": rivals,
}
