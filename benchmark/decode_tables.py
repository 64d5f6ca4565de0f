"""Tables of decoding: time a token, attention by policy, schedulers, LFPS."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import common
from one_batch import BEST_FIXED, MODELS
from rendering import link, nothing, result_files, table, where


def one_batch(results: Path) -> str:
    """TPOT by model, batch and length; a column a policy, and gains."""
    return _tpot(results, MODELS, "off")


def one_batch_sketch(results: Path) -> str:
    """The same of what sketches of keys cost, in bfloat16, where they are the largest share."""
    return _tpot(results, ("sketch", "sketch_other"), "full")


def _tpot(results: Path, names: Sequence[str], base: str) -> str:
    out = []
    for path, data in [found for name in names for found in result_files(results, f"one_batch_{name}.json")]:
        reads = data.get("memory_read_gb_per_s", [])
        note = f"TPOT, medians of {_steps(data)} steps in {_rounds(data)} run(s). {where(data)}"
        if reads:
            note += f" Memory read by a plain stream during the run: {min(reads):.0f} to {max(reads):.0f} GB/s."
        out.append(f"{_compared(data['rows'], 'tpot_ms', base, 1)}\n{note} [Data]({link(path)}).\n")
    return "\n".join(out) or nothing("one_batch.py")


def gpu_idle(results: Path) -> str:
    """What a GPU waits for the CPU in a layer, and its share of TPOT, in the shape of Fluxion's Table 5.

    Beside it plain SGLang, which does not wait, and what the GPU read of the middle. A table for each machine.
    """
    tables: dict[str, list[list[str]]] = defaultdict(list)
    links: dict[str, list[str]] = defaultdict(list)
    for path, data in result_files(results, "one_batch_*.json"):
        if data.get("device") != "cuda":
            continue
        cells: dict[tuple[str, int, int, str], list[dict[str, Any]]] = defaultdict(list)
        for row in data["rows"]:
            cells[row["model"], row["batch"], row["length"], row["policy"]].append(row)
        note = f"{_steps(data)} steps in {_rounds(data)} run(s). {where(data)}"
        for (model, batch, length, policy), found in cells.items():
            of: dict[str, str] = {}
            for name, form in (("idle_ms", ".3f"), ("idle_ratio", ".0%"), ("gpu_share", ".0%")):
                if name in found[0]:
                    of[name] = format(median(row[name] for row in found), form)
            options = f"`{json.dumps(data['config'])}`" if data["config"] and policy != "off" else ""
            tpot = f"{median(row['tpot_ms'] for row in found):.1f}"
            shown = [of.get(name, "") for name in ("idle_ms", "idle_ratio", "gpu_share")]
            tables[note].append([f"{model}, {batch} x {length:,}", f"`{policy}`", options, tpot, *shown])
        links[note].append(f"[data]({link(path)})")
    head = ["shape", "policy", "options", "TPOT (ms)", "idle (ms a layer)", "idle ratio", "the GPU reads"]
    return "\n".join(
        f"{table(head, sorted(rows), 'lllrrrr')}\nTPOT: medians, idle: means of {note} ({', '.join(links[note])})\n"
        for note, rows in tables.items()
    ) or nothing("one_batch.py --device cuda")


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
    to compare: what `base` and `full` take over `fluxion`, `base` over a fixed policy, that over `fluxion`; without
    `fluxion`, `base` over the others; and `base` over `sketch`."""
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
    pairs += [(base, common.SKETCH)]
    pairs = [(a, b) for a, b in pairs if any(a in cell and b in cell for cell in cells.values())]
    lines = [
        [model, str(batch), f"{length:,}"]
        + [f"{cell[policy]:.{digits}f}" if policy in cell else "" for policy in policies]
        + [f"{cell[a] / cell[b]:.1f}x" if a in cell and b in cell else "" for a, b in pairs]
        for (model, batch, length), cell in cells.items()
    ]
    head = ["model", "batch", "prompt", *(f"{p} (ms)" for p in policies), *(f"{a} / {b}" for a, b in pairs)]
    return table(head, lines, "lrr" + "r" * (len(policies) + len(pairs)))


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


def _rounds(data: dict[str, Any]) -> int:
    return 1 + max(row["round"] for row in data["rows"])


def _steps(data: dict[str, Any]) -> int:
    return min(row.get("steps", 32) for row in data["rows"])


DECODE_TABLES: dict[str, Callable[[Path], str]] = {
    "one_batch": one_batch,
    "one_batch_sketch": one_batch_sketch,
    "gpu_idle": gpu_idle,
    "schedulers": schedulers,
    "attention": attention,
    "attention_reads": attention_reads,
    "overhead": overhead,
    "lfps_overlap": lfps_overlap,
    "lfps_times": lfps_times,
}
