"""Tables of quality: how often answers are right, by policy, and what the predictor of the bundled model decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import common
import numpy as np
from rendering import link, result_files, table, where
from rivals import rivals

from fluxion_quality import stats
from fluxion_quality import table as quality_table
from fluxion_sglang.training.report import calibration_table
from fluxion_sglang.training.tau import verdict

PUBLIC = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}


def public(results: Path) -> str:
    """What policies cost on public checkpoints and real text: a table a model, a line a policy, by length."""
    out = []
    for name, shown in PUBLIC.items():
        found, source = forced_rows(results, name)
        if not found:
            continue
        lengths = sorted({length for length, _ in found})
        longest = {policy: row for (length, policy), row in found.items() if length == lengths[-1]}
        lines = []
        for policy in sorted(longest, key=lambda policy: -longest[policy]["read_fraction"]):
            cells = [forced(found[length, policy], found[length, "full"]) for length in lengths]
            lines.append([f"`{policy}`", *(cell for _, change, kl, _, read in cells for cell in (change, kl, read))])
        head = ["policy", *(f"{what}{n:,}" for n in lengths for what in ("change at ", "KL at ", "read at "))]
        full = ", ".join(f"{found[length, 'full']['score']:.2f} at {length:,}" for length in lengths)
        drawn = table(head, lines, "l" + "r" * (len(head) - 1))
        out.append(f"{shown}; perplexity of `full` {full}:\n\n{drawn}\n{source}\n")
    return "\n".join(out) or "Not measured yet: `make checkpoints quality`.\n"


def forced_rows(results: Path, name: str) -> tuple[dict[tuple[int, str], dict[str, Any]], str]:
    """Rows of all policies on a public checkpoint by length and policy, and where they come from."""
    found, sources = {}, []
    for path, data in result_files(results, f"quality_{name}*.json"):
        if data["suite"] == "perplexity" and {"sketch", "streaming"} <= set(data["policies"]):
            found |= {(row["length"], row["policy"]): row for row in data["rows"]}
            source = f"[{path.stem}]({link(path)}), model {data['model']['sha256'][:12]}, {data['samples']} windows"
            sources.append(f"{source}. {where(data)}")
    return found, f"Bfloat16. Data: {' '.join(sources)}"


def long_answers(results: Path) -> str:
    """Perplexity and KL over answers of thousands of tokens, the KL also by the distance from the prompt."""
    lines, sources = [], []
    for name, shown in PUBLIC.items():
        for path, data in result_files(results, f"quality_{name}_long.json"):
            cells = {(row["task"], row["policy"]): row for row in data["rows"]}
            for (task, policy), row in cells.items():
                if policy == "full":
                    continue
                full = cells[task, "full"]
                windows = len(set(full["documents"]))
                answer = row["kl_steps"] // windows + 1
                at = [shown, f"{row['length'] - answer:,}", f"{answer:,}", str(windows), f"`{policy}`"]
                _, change, divergence, same, read = forced(row, full)
                spans = [f"{value:.4f}" for value in (row["kl_by_span"][0], row["kl_by_span"][-1])]
                lines.append([*at, change, divergence, *spans, same, read])
            sources.append(f"[{path.stem}]({link(path)}), model {data['model']['sha256'][:12]}. {where(data)}")
    if not lines:
        return "Not measured yet: `make checkpoints quality`.\n"
    head = ["model", "prompt", "answer", "windows", "policy", "perplexity", "KL"]
    head += ["KL of the first eighth", "of the last", "same token", "read"]
    return f"{table(head, lines, 'lrrrlrrrrrr')}\nBfloat16. Data: {' '.join(sources)}\n"


def forced(row: dict[str, Any], full: dict[str, Any]) -> list[str]:
    """Perplexity, its change to that of `full` with the interval, KL, agreement and what was read."""
    read = f"{row['read_fraction']:.1%}"
    if row is full:
        return [f"{row['score']:.3f}", "", "", "", read]
    delta, *ends = (row[key] / full["score"] for key in ("delta", "delta_low", "delta_high"))
    change = f"{delta:+.1%} [{', '.join(f'{end:+.1%}' for end in ends)}]"
    return [f"{row['score']:.3f}", change, f"{row['kl']:.4f}", f"{row['same']:.1%}", read]


def large(results: Path) -> str:
    """Fixed budgets beyond the grid."""
    return _quality(results, quality_table.pareto, "quality_large.json")


def other_least(results: Path) -> str:
    """What the heads of that model need."""
    return _quality(results, quality_table.averages, "quality_other.json")


def sketch(results: Path) -> str:
    """What sketches of keys cost without any training: a line a run and length, and beside it what `fluxion` costs."""
    found = result_files(results, "quality_sketch*.json")
    if not found:
        return "Not measured yet: `python -m benchmark --only quality`.\n"
    found.sort(key=lambda one: [_name(one[1]), one[1]["suite"] != "ruler", one[1]["dtype"] != "float32"])
    lines = [[_name(data), *line] for _, data in found for line in _sketched(data)]
    head = ["model", "suite", "prompt", "documents", "full", "delta", "read", "worst task", "delta of fluxion", "read"]
    commits = "; ".join(f"[{path.stem}]({link(path)}), commit {data['commit']}" for path, data in found)
    return f"{table(head, lines, 'llrrrrrlrr')}\n{where(found[0][1]).partition('; commit')[0]}. Data: {commits}.\n"


def _name(data: dict[str, Any]) -> str:
    return Path(data["model"]["id"]).name


def _sketched(data: dict[str, Any]) -> Iterator[list[str]]:
    """Of a run: its suite, the length, documents, score of `full`, and what `sketch` and `fluxion` differ and read."""
    suite = {"ruler": "RULER"}.get(data["suite"], data["suite"]) + ", bfloat16" * (data["dtype"] == "bfloat16")
    if data["suite"] == "perplexity":
        cells = {(row["task"], row["length"], row["policy"]): row for row in data["rows"]}
        for task, length in dict.fromkeys((task, length) for task, length, _ in cells):
            full = cells[task, length, "full"]["score"]
            rows = [cells.get((task, length, policy)) for policy in (common.SKETCH, "fluxion")]
            shown = [
                (f"{row['score'] / full - 1:+.1%}".replace("-0.0", "+0.0"), f"{row['read_fraction']:.1%}")
                if row
                else ("", "")
                for row in rows
            ]
            documents = str(len(set(cells[task, length, "full"]["documents"])))
            yield [f"{suite}, {task}", f"{length:,}", documents, f"{full:.3f}", *shown[0], "", *shown[1]]
        return
    if len(tasks := {row["task"] for row in data["rows"]}) == 1:
        suite += f", {min(tasks)}"
    means = {(length, policy): row for length, policy, row in quality_table.averaged(data)}
    for length in dict.fromkeys(length for length, _ in means):
        own = [row for row in data["rows"] if row["length"] == length and row["policy"] == common.SKETCH]
        if not own:
            continue
        worst = min(own, key=lambda row: row["delta"])
        lost = f"{worst['task']} {worst['delta']:+.3f}" if worst["delta"] < 0 else "none"
        lost = lost if len(tasks) > 1 else ""
        rows = [means.get((length, policy)) for policy in (common.SKETCH, "fluxion")]
        shown = [(quality_table.delta(row), f"{row['read_fraction']:.1%}") if row else ("", "") for row in rows]
        full = means[length, "full"]
        yield [suite, f"{length:,}", str(full["documents"]), f"{full['score']:.3f}", *shown[0], lost, *shown[1]]


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
    out = []
    for path, data in result_files(results, name):
        model = f"Model {data['model']['id']} ({data['model']['sha256'][:12]}), {data['samples']} samples a task"
        source = f"seed {data['seed']}, dtype {data['dtype']}. {where(data)} [Data]({link(path)})."
        out.append(f"{draw(data)}\n{model}, {source}\n")
    suite = name.removeprefix("quality_").removesuffix(".json")
    return "\n".join(out) or f"Not measured yet: `fluxion bench quality --suite {suite}`.\n"


QUALITY_TABLES: dict[str, Callable[[Path], str]] = {
    "public": public,
    "long_answers": long_answers,
    "large": large,
    "other_least": other_least,
    "sketch": sketch,
    "psa": psa,
    "far": far,
    "kv_quality": kv_dtype,
    "perplexity": perplexity,
    "needle_heads": needle_heads,
    "calibration": calibration,
    "rivals": rivals,
}
