"""Tables of quality: the cost of policies in answers, and decisions of the bundled model's predictor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean

import common
from decode_tables import PUBLIC_MODEL
from registry import RIVALS
from rendering import (
    Columns,
    Data,
    Row,
    at,
    columns_of,
    link,
    machine,
    medians,
    per_file,
    result_files,
    source,
    sources,
    table,
)

from fluxion_quality import table as quality_table
from fluxion_sglang.training.report import calibration_table
from fluxion_sglang.training.tau import verdict

PUBLIC = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}
PUBLIC_MISSING = "Not measured yet: `make checkpoints quality`.\n"
MISSING = "Not measured yet: `python -m benchmark quality`.\n"
FURTHER = ("sketch:0.20", "sketch:0.30")
"""Measured policies that are left out of the table of public checkpoints."""


# Public checkpoints


def forced(row: Row, full: Row) -> Row:
    """Perplexity on forced tokens relative to `full` with its interval, KL divergence, agreement, and share read."""
    read = f"{row['read_fraction']:.1%}"
    if row is full:
        return {"change": "", "kl": "", "same": "", "read": read}
    delta, *ends = (row[key] / full["score"] for key in ("delta", "delta_low", "delta_high"))
    change = f"{delta:+.1%} [{', '.join(f'{end:+.1%}' for end in ends)}]"
    return {"change": change, "kl": f"{row['kl']:.4f}", "same": f"{row['same']:.1%}", "read": read}


def public_files(results: Path, name: str) -> list[tuple[Path, Data]]:
    """Result files of a public checkpoint that cover all policies."""
    return [
        (path, data)
        for path, data in result_files(results, f"quality_{name}*.json")
        if data["suite"] == "perplexity" and {"sketch", "streaming"} <= set(data["policies"])
    ]


def public_rows(results: Path, name: str) -> dict[int, dict[str, Row]]:
    """Rows of these files by length and policy."""
    found: dict[int, dict[str, Row]] = {}
    for _, data in public_files(results, name):
        for row in data["rows"]:
            found.setdefault(row["length"], {})[row["policy"]] = row
    return dict(sorted(found.items()))


def public(results: Path) -> str:
    """A table per model, a line per policy, with two columns each for the shortest and the longest length."""
    out = []
    for name, shown in PUBLIC.items():
        lengths = list(public_rows(results, name).items())
        if not lengths:
            continue
        found = dict([lengths[0], lengths[-1]])
        *_, longest = found.values()
        rows = [
            {"policy": policy, **{length: forced(of[policy], of["full"]) for length, of in found.items()}}
            for policy in sorted(longest, key=lambda policy: -longest[policy]["read_fraction"])
            if policy not in ("full", *FURTHER)
        ]
        columns: Columns = {
            "policy": "`{policy}`",
            **{
                head.format(f"{length:,}"): at(length, key, form="{}")
                for length in found
                for head, key in (("perplexity at {}", "change"), ("reads at {}", "read"))
            },
        }
        full = ", ".join(f"{of['full']['score']:.2f} at {length:,}" for length, of in found.items())
        files = public_files(results, name)
        windows = " to ".join(str(n) for n in sorted({data["samples"] for _, data in files}))
        head = f"{shown}; perplexity of `full` {full} tokens:"
        out.append(f"{head}\n\n{table(columns, rows)}\nBfloat16, {windows} windows. {sources(files)}\n")
    return "\n".join(out) or PUBLIC_MISSING


def answers(results: Path) -> str:
    """Cost of `sketch` and of the best fixed budget, a line per model and length."""
    policies = ("sketch", "fixed:16:0.25")
    rows, files = [], []
    for name, shown in PUBLIC.items():
        files += public_files(results, name)
        for length, of in public_rows(results, name).items():
            costs = {policy: forced(of[policy], of["full"]) for policy in policies}
            rows.append({"model": shown, "length": length, "full": of["full"]["score"], **costs})
    columns: Columns = columns_of("model | prompt | perplexity of `full`", "{model} | {length:,} | {full:.2f}") | {
        f"`{p}`{head}": at(p, key, form="{}") for p in policies for head, key in (("", "change"), (" reads", "read"))
    }
    if not rows:
        return PUBLIC_MISSING
    windows = " to ".join(str(n) for n in sorted({data["samples"] for _, data in files}))
    return f"{table(columns, rows)}\nBfloat16, {windows} windows. {sources(files)}\n"


def headline(results: Path) -> str:
    """The opening numbers of README.md: `sketch`, which needs no training, against `full` at the longest prompt."""
    timed = {path.parent: (path, data) for path, data in result_files(results, f"one_batch_{PUBLIC_MODEL}.json")}
    for path, data in result_files(results, f"quality_{PUBLIC_MODEL}.json"):
        if path.parent not in timed:
            continue
        times_path, times = timed[path.parent]
        rows = {(row["length"], row["policy"]): row for row in data["rows"]}
        length = max(length for length, _ in rows)
        kept, whole = rows[length, "sketch"], rows[length, "full"]
        change, low, high = (f"{kept[key] / whole['score']:+.1%}" for key in ("delta", "delta_low", "delta_high"))
        ms = medians(times["rows"], ("batch", "length"), "policy", "tpot_ms")
        largest = max(ms, key=lambda row: (row["batch"], row["length"]))
        return (
            f"On SmolLM2-135M, the policy `sketch` reads **{kept['read_fraction']:.0%}** of the KV between the first "
            f"64 and the last 256 of {length:,} tokens. Perplexity on real text is {kept['score']:.2f} instead of "
            f"{whole['score']:.2f}: **{change}**, 95% interval {low} to {high} ({data['samples']} windows, "
            f"{link(path, 'data')}). A decode step with {largest['batch']} prompts of {largest['length']:,} tokens "
            f"takes {largest['sketch']:.0f} ms instead of {largest['full']:.0f} ms ({machine(data)}; "
            f"{link(times_path, 'data')}). `sketch` needs no training. The model is small: measure yours.\n"
        )
    return PUBLIC_MISSING


# The bundled model and others


def sketch(results: Path) -> str:
    """Cost of sketches of keys without training, beside `fluxion`; a line per run and length."""

    def name(data: Data) -> str:
        return Path(data["model"]["id"]).name

    found = [(path, data) for path, data in result_files(results, "quality_sketch*.json") if _many_tasks(data)]
    if not found:
        return MISSING
    found.sort(key=lambda one: [name(one[1]), one[1]["suite"] != "ruler"])
    rows = [{"model": name(data), **row} for _, data in found for row in _sketched(data)]
    columns = columns_of(
        "model | suite | prompt | documents | `full` | `sketch:0.10` | reads | `fluxion` | reads ",
        "{model} | {suite} | {length:,} | {documents} | {full:.3f} | {sketch[0]} | {sketch[1]} | {fluxion[0]} | "
        "{fluxion[1]}",
    )
    return f"{table(columns, rows, 'llrrrr')}\nFloat32. {sources(found)}\n"


def _many_tasks(data: Data) -> bool:
    """Whether a run has means over several tasks, in float32, where differences come from the policies only."""
    return data["suite"] != "perplexity" and data["dtype"] == "float32" and len({r["task"] for r in data["rows"]}) > 1


def _sketched(data: Data) -> Iterator[Row]:
    """Rows of a run: suite, length, documents, score of `full`, and differences and reads of `sketch` and `fluxion`."""
    suite = {"ruler": "RULER"}.get(data["suite"], data["suite"])
    means = {(length, policy): row for length, policy, row in quality_table.averaged(data)}
    for length in dict.fromkeys(length for length, _ in means):
        full = means[length, "full"]
        of = {"sketch": means.get((length, common.SKETCH)), "fluxion": means.get((length, "fluxion"))}
        shown = {name: (quality_table.delta(row), f"{row['read_fraction']:.1%}") for name, row in of.items() if row}
        yield {"suite": suite, "length": length, "documents": full["documents"], "full": full["score"], **shown}


def needle_heads(_: Path) -> str:
    """Behaviour of the bundled model's heads, beside claims of Fluxion's paper and common observations on large
    models."""
    found = json.loads((common.NEEDLE / "heads.json").read_text())
    columns: Columns = (
        columns_of("length | steps | streaming", "{length:,} | {steps} | {streaming:.0%}")
        | {f"budget at {b}": at("budget_of_retrieval_heads", b, form="{:.1%}") for b in ("16", "32", "64", "128")}
        | columns_of(
            "it grows | most mass on `<bos>` | value of `<bos>` | shared in a group",
            "{budget_grows:.0%} | {bos:.2f} | {least:.2f} to {most:.2f} | {shared:.2f}",
        )
    )
    rows = []
    for row in found["results"]:
        values = [value for layer in row["sink_value"] for value in layer]
        ends = {"least": min(values), "most": max(values), "shared": mean(row["overlap_in_group"])}
        rows.append({**row, **ends, "bos": max(head["bos"] for head in row["heads"])})
    return table(columns, rows, "")


def calibration(_: Path) -> str:
    """Results of every tau on held-out sequences, and the conclusion."""
    found = json.loads((common.PREDICTOR / "calibration.json").read_text())
    return f"{calibration_table(found['rows'])}\n{verdict(found)}\n"


# All policies under one harness

COMPARED = (
    *("full", "streaming", "oracle:0.05", "fixed:16:0.05", "fixed:16:0.25", "anchor", "fluxion"),
    *("hgca:1", "psa:0.95", "lfps:0.05"),
)
"""Policies of the table; the result file has more."""


def rivals(results: Path) -> str:
    """Scores and reads of COMPARED, a line per policy."""

    def draw(path: Path, data: Data) -> str:
        rows: dict[str, Row] = {}
        for length, policy, row in quality_table.averaged(data):
            cell = {("score", length): row["score"], ("read", length): row["read_fraction"]}
            rows.setdefault(policy, {"policy": policy}).update(cell)
        columns: Columns = {
            "policy": "`{policy}`",
            **{
                f"{head} {length // 1024}K": at((name, length), form=form)
                for head, name, form in (("score", "score", "{:.3f}"), ("reads", "read", "{:.1%}"))
                for length in sorted({row["length"] for row in data["rows"]})
            },
        }
        shown = [rows[policy] for policy in COMPARED if policy in rows]
        note = f"RULER, {data['samples']} documents a task, {data['dtype']}."
        return f"{table(columns, shown)}\n{source(path, data, note)}"

    return per_file(results, f"quality_{RIVALS.name}.json", draw, f"python -m benchmark quality_{RIVALS.name}")


QUALITY_TABLES: dict[str, Callable[[Path], str]] = {
    "headline": headline,
    "answers": answers,
    "public": public,
    "sketch": sketch,
    "needle_heads": needle_heads,
    "calibration": calibration,
    "rivals": rivals,
}
