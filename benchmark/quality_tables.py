"""Tables of quality: how often answers are right, by policy, and what the predictor of the bundled model decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import common
import numpy as np
from rendering import link, result_files, table, where
from rivals import rivals
from rounds import NAME as ROUNDS

from fluxion_quality import stats
from fluxion_quality import table as quality_table
from fluxion_sglang.training.report import calibration_table
from fluxion_sglang.training.tau import verdict


def large(results: Path) -> str:
    """Fixed budgets beyond the grid."""
    return _quality(results, quality_table.pareto, "quality_large.json")


def adaptive(results: Path) -> str:
    """What can be had without training, beside what a predictor gives."""
    return _quality(results, quality_table.averages, "quality_adaptive.json")


def adaptive_first(results: Path) -> str:
    """What it reads while it learns: the tasks in the order in which they were asked."""

    def draw(data: dict[str, Any]) -> str:
        rows, lengths = data["rows"], _lengths(data)
        by = {(row["task"], row["length"]): row for row in rows}
        lines = []
        for task in dict.fromkeys(row["task"] for row in rows):
            asked = [by[task, length] for length in lengths]
            read = [f"{row['read_fraction']:.0%}" for row in asked]
            lines.append([task, *read, f"{mean(row['delta'] for row in asked):+.3f}"])
        head = ["task", *(f"read at {length:,}" for length in lengths), "delta"]
        return table(head, lines, "l" + "r" * (len(head) - 1))

    found = [(path, data["first"]) for path, data in result_files(results, ROUNDS, "first")]
    return "\n".join(_described(path, data, draw(data)) for path, data in found)


def adaptive_rounds(results: Path) -> str:
    """What it reads of questions that come again and again, each time others of the same kinds."""
    return _rounds(results, ("first", "second", "third", "fourth"))


def adaptive_other(results: Path) -> str:
    """The same of a model of another shape, none of whose answers was looked at before."""
    return _rounds(results, ("other_first", "other_second", "other_third"))


def other_least(results: Path) -> str:
    """What the heads of that model need."""
    return _quality(results, quality_table.averages, "quality_other.json")


def _rounds(results: Path, names: Sequence[str]) -> str:
    out = []
    for path, rounds in result_files(results, ROUNDS, names[0]):
        asked = [rounds[name] for name in names if name in rounds]
        lines, lengths = [], _lengths(asked[-1])
        for number, data in enumerate(asked, 1):
            rows = data["rows"]
            parts = [[row for row in rows if row["length"] == length] for length in lengths]
            read = [f"{mean(row['read_fraction'] for row in part):.1%}" for part in parts]
            delta = [f"{mean(row['delta'] for row in part):+.3f}" for part in parts]
            worst = min(rows, key=lambda row: row["delta"])
            lost = f"{worst['task']} at {worst['length']:,}: {worst['delta']:+.3f}" if worst["delta"] < 0 else "none"
            lines.append([str(number), f"{data['samples'] * len(rows):,}", str(data["seed"]), *read, *delta, lost])
        head = [f"{what} at {length:,}" for what in ("read", "delta") for length in lengths]
        drawn = table(["round", "questions", "seed", *head, "worst task"], lines, "lrr" + "r" * len(head) + "l")
        out.append(_described(path, asked[-1], drawn))
    return "\n".join(out)


def _lengths(data: dict[str, Any]) -> list[int]:
    return list(dict.fromkeys(row["length"] for row in data["rows"]))


def _described(path: Path, data: dict[str, Any], drawn: str) -> str:
    model = f"Model {data['model']['id']} ({data['model']['sha256'][:12]}), {data['samples']} samples a task"
    return f"{drawn}\n{model}, seed {data['seed']}, dtype {data['dtype']}. {where(data)} [Data]({link(path)}).\n"


def adaptive_far(results: Path) -> str:
    """Once it has met prompts of that length."""
    return _quality(results, quality_table.averages, "quality_adaptive_far.json")


def adaptive_extraction(results: Path) -> str:
    """Many facts in one answer."""
    return _quality(results, quality_table.averages, "quality_adaptive_extraction.json")


def adaptive_perplexity(results: Path) -> str:
    """Texts, of which every next word counts."""
    return _quality(
        results, lambda data: quality_table.scores(data, intervals=False), "quality_adaptive_perplexity.json"
    )


def sketch(results: Path) -> str:
    """What sketches of keys give, without any training."""
    return _quality(results, quality_table.averages, "quality_sketch.json")


def sketch_other(results: Path) -> str:
    """The same of a model of another shape."""
    return _quality(results, quality_table.averages, "quality_sketch_other.json")


def sketch_extraction(results: Path) -> str:
    """Many facts in one answer."""
    return _quality(results, quality_table.averages, "quality_sketch_extraction.json")


def sketch_perplexity(results: Path) -> str:
    """Texts, of which every next word counts."""
    return _quality(results, lambda data: quality_table.scores(data, intervals=False), "quality_sketch_perplexity.json")


def sketch_bfloat16(results: Path) -> str:
    """In bfloat16, where sketches are a larger share."""
    return _quality(results, quality_table.averages, "quality_sketch*_bfloat16.json")


def psa(results: Path) -> str:
    """PSA's Fig. 5: the least that each family reads at 98% of full quality, and at equal error; then all of them."""

    def draw(data: dict[str, Any]) -> str:
        views = (quality_table.least_reads(data, 0.98), quality_table.reads_at_equal_error(data))
        return "\n".join([*views, quality_table.averages(data)])

    return _quality(results, draw, "quality_psa.json")


def far(results: Path) -> str:
    """RULER beyond the trained lengths."""
    return _quality(results, lambda data: quality_table.scores(data, intervals=False), "quality_far.json")


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


def calibration(_: Path) -> str:
    """What every tau did to held-out sequences, and what followed."""
    found = json.loads((common.PREDICTOR / "calibration.json").read_text())
    return f"{calibration_table(found['rows'])}\n{verdict(found)}\n"


def _quality(results: Path, draw: Callable[[dict[str, Any]], str], name: str) -> str:
    out = [_described(path, data, draw(data)) for path, data in result_files(results, name)]
    suite = name.removeprefix("quality_").removesuffix(".json")
    return "\n".join(out) or f"Not measured yet: `fluxion bench quality --suite {suite}`.\n"


QUALITY_TABLES: dict[str, Callable[[Path], str]] = {
    "large": large,
    "adaptive": adaptive,
    "adaptive_first": adaptive_first,
    "adaptive_rounds": adaptive_rounds,
    "adaptive_other": adaptive_other,
    "other_least": other_least,
    "adaptive_far": adaptive_far,
    "adaptive_extraction": adaptive_extraction,
    "adaptive_perplexity": adaptive_perplexity,
    "sketch": sketch,
    "sketch_other": sketch_other,
    "sketch_extraction": sketch_extraction,
    "sketch_perplexity": sketch_perplexity,
    "sketch_bfloat16": sketch_bfloat16,
    "psa": psa,
    "far": far,
    "kv_quality": kv_dtype,
    "perplexity": perplexity,
    "needle_heads": needle_heads,
    "calibration": calibration,
    "rivals": rivals,
}
