"""Tables of quality: what policies cost in answers, and what the predictor of the bundled model decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import common
import numpy as np
from decode_tables import PUBLIC_MODEL
from registry import RIVALS
from rendering import Columns, Data, Row, at, columns_of, link, medians, per_file, result_files, source, table, where

from fluxion_quality import stats
from fluxion_quality import table as quality_table
from fluxion_sglang.training.report import calibration_table
from fluxion_sglang.training.tau import verdict

PUBLIC = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}
PUBLIC_MISSING = "Not measured yet: `make checkpoints quality`.\n"
MISSING = "Not measured yet: `python -m benchmark quality`.\n"


# Public checkpoints


def forced(row: Row, full: Row) -> Row:
    """Of forced tokens: perplexity's change to that of `full` with the interval, KL, agreement and what was read."""
    read = f"{row['read_fraction']:.1%}"
    if row is full:
        return {"change": "", "kl": "", "same": "", "read": read}
    delta, *ends = (row[key] / full["score"] for key in ("delta", "delta_low", "delta_high"))
    change = f"{delta:+.1%} [{', '.join(f'{end:+.1%}' for end in ends)}]"
    return {"change": change, "kl": f"{row['kl']:.4f}", "same": f"{row['same']:.1%}", "read": read}


def public_rows(results: Path, name: str) -> tuple[dict[int, dict[str, Row]], str]:
    """Rows of a public checkpoint's runs of all policies by length and policy, and where they come from."""
    found: dict[int, dict[str, Row]] = {}
    sources = []
    for path, data in result_files(results, f"quality_{name}*.json"):
        if data["suite"] == "perplexity" and {"sketch", "streaming"} <= set(data["policies"]):
            for row in data["rows"]:
                found.setdefault(row["length"], {})[row["policy"]] = row
            model = f"model {data['model']['sha256'][:12]}, {data['samples']} windows"
            sources.append(f"{link(path, path.stem)}, {model}. {where(data)}")
    return dict(sorted(found.items())), " ".join(sources)


def public(results: Path) -> str:
    """A table a model, a line a policy, three columns a length."""
    out = []
    for name, shown in PUBLIC.items():
        found, sources = public_rows(results, name)
        if not found:
            continue
        *_, longest = found.values()
        rows = [
            {"policy": policy, **{length: forced(of[policy], of["full"]) for length, of in found.items()}}
            for policy in sorted(longest, key=lambda policy: -longest[policy]["read_fraction"])
        ]
        columns: Columns = {
            "policy": "`{policy}`",
            **{
                f"{what} at {length:,}": at(length, key, form="{}")
                for length in found
                for what, key in (("change", "change"), ("KL", "kl"), ("read", "read"))
            },
        }
        full = ", ".join(f"{of['full']['score']:.2f} at {length:,}" for length, of in found.items())
        head = f"{shown}; perplexity of `full` {full}:"
        out.append(f"{head}\n\n{table(columns, rows)}\nBfloat16. Data: {sources}\n")
    return "\n".join(out) or PUBLIC_MISSING


def answers(results: Path) -> str:
    """What `sketch` and the best fixed budget cost: a line a model and length."""
    policies = ("sketch", "fixed:16:0.25")
    rows, sources = [], []
    for name, shown in PUBLIC.items():
        found, of_model = public_rows(results, name)
        sources += [of_model] if found else []
        for length, of in found.items():
            costs = {policy: forced(of[policy], of["full"]) for policy in policies}
            rows.append({"model": shown, "length": length, "full": of["full"]["score"], **costs})
    columns: Columns = columns_of("model | prompt | perplexity of `full`", "{model} | {length:,} | {full:.2f}") | {
        f"`{p}`{head}": at(p, key, form="{}") for p in policies for head, key in (("", "change"), (" reads", "read"))
    }
    return f"{table(columns, rows)}\nBfloat16. Data: {' '.join(sources)}\n" if rows else PUBLIC_MISSING


def long_answers(results: Path) -> str:
    """Perplexity and KL over answers of thousands of tokens, the KL also by the distance from the prompt."""
    rows, sources = [], []
    for name, shown in PUBLIC.items():
        for path, data in result_files(results, f"quality_{name}_long.json"):
            cells = {(row["task"], row["policy"]): row for row in data["rows"]}
            for (task, policy), row in cells.items():
                if policy == "full":
                    continue
                full = cells[task, "full"]
                windows = len(set(full["documents"]))
                answer = row["kl_steps"] // windows + 1
                place = {"model": shown, "prompt": row["length"] - answer, "answer": answer, "windows": windows}
                ends = {"first": row["kl_by_span"][0], "last": row["kl_by_span"][-1]}
                rows.append({**place, "policy": policy, **forced(row, full), **ends})
            sources.append(f"{link(path, path.stem)}, model {data['model']['sha256'][:12]}. {where(data)}")
    columns = columns_of(
        "model | prompt | answer | windows | policy | perplexity | KL | KL of the first eighth | of the last | "
        "same token | read",
        "{model} | {prompt:,} | {answer:,} | {windows} | `{policy}` | {change} | {kl} | {first:.4f} | {last:.4f} | "
        "{same} | {read}",
    )
    drawn = f"{table(columns, rows, 'lrrrl')}\nBfloat16. Data: {' '.join(sources)}\n"
    return drawn if rows else PUBLIC_MISSING


def yardsticks(results: Path) -> str:
    """What could be left out with foresight, on the public checkpoints."""
    rows, sources = [], []
    for name, shown in PUBLIC.items():
        for path, data in result_files(results, f"quality_{name}_yardsticks.json"):
            (full,) = (row for row in data["rows"] if row["policy"] == "full")
            others = (row for row in data["rows"] if row is not full)
            rows += [{"model": shown, "length": r["length"], "policy": r["policy"], **forced(r, full)} for r in others]
            model = f"model {data['model']['sha256'][:12]}, {data['samples']} windows"
            sources.append(f"{link(path, path.stem)}, {model}. {where(data)}")
    columns = columns_of(
        "model | prompt | policy | perplexity | KL | same token | read",
        "{model} | {length:,} | `{policy}` | {change} | {kl} | {same} | {read}",
    )
    return f"{table(columns, rows)}\nBfloat16. Data: {' '.join(sources)}\n" if rows else PUBLIC_MISSING


def headline(results: Path) -> str:
    """The numbers that README.md opens with: what can be had without training, beside `full`, at the longest prompt."""
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
            f"SmolLM2-135M predicts real text after up to {length:,} tokens while each decode step reads "
            f"**{kept['read_fraction']:.0%}** of what lies between the first 64 and the last 256 tokens. Its "
            f"perplexity is {kept['score']:.2f}, and {whole['score']:.2f} where all of that is read: **{change}**, "
            f"95% interval {low} to {high} ({data['samples']} windows, {link(path, 'data')}). A step with "
            f"{largest['batch']} prompts of {largest['length']:,} tokens takes {largest['sketch']:.0f} ms, and "
            f"{largest['full']:.0f} ms where all is read ({link(times_path, 'data')}). This takes no training. The "
            "model is small, so measure yours.\n"
        )
    return PUBLIC_MISSING


# The bundled model and others


def quality(draw: Callable[[Data], str], name: str) -> Callable[[Path], str]:
    """What `draw` says of quality_NAME.json, and of which model it is."""

    def one(path: Path, data: Data) -> str:
        model = f"Model {data['model']['id']} ({data['model']['sha256'][:12]}), {data['samples']} samples a task"
        note = f"{model}, seed {data['seed']}, dtype {data['dtype']}."
        return f"{draw(data)}\n{source(path, data, note)}"

    return partial(per_file, files=f"quality_{name}.json", draw=one, command=f"python -m benchmark quality_{name}")


def scores(data: Data) -> str:
    return quality_table.scores(data, intervals=False)


def sketch(results: Path) -> str:
    """What sketches of keys cost without any training: a line a run and length, and beside it what `fluxion` costs."""

    def name(data: Data) -> str:
        return Path(data["model"]["id"]).name

    found = result_files(results, "quality_sketch*.json")
    if not found:
        return MISSING
    found.sort(key=lambda one: [name(one[1]), one[1]["suite"] != "ruler", one[1]["dtype"] != "float32"])
    rows = [{"model": name(data), **row} for _, data in found for row in _sketched(data)]
    columns = columns_of(
        "model | suite | prompt | documents | full | delta | read | worst task | delta of fluxion | read ",
        "{model} | {suite} | {length:,} | {documents} | {full:.3f} | {sketch[0]} | {sketch[1]} | {worst} | {fluxion[0]}"
        " | {fluxion[1]}",
    )
    commits = "; ".join(f"{link(path, path.stem)}, commit {data['commit']}" for path, data in found)
    drawn = table(columns, rows, "llrrrrrl")
    return f"{drawn}\n{where(found[0][1]).partition('; commit')[0]}. Data: {commits}.\n"


def _sketched(data: Data) -> Iterator[Row]:
    """Of a run: its suite, the length, documents, score of `full`, and what `sketch` and `fluxion` differ and read."""
    suite = {"ruler": "RULER"}.get(data["suite"], data["suite"]) + ", bfloat16" * (data["dtype"] == "bfloat16")
    policies = {"sketch": common.SKETCH, "fluxion": "fluxion"}
    tasks = {row["task"] for row in data["rows"]}
    if data["suite"] == "perplexity":
        cells = {(row["task"], row["length"], row["policy"]): row for row in data["rows"]}
        for task, length in dict.fromkeys((task, length) for task, length, _ in cells):
            full = cells[task, length, "full"]
            of = {name: cells.get((task, length, policy)) for name, policy in policies.items()}
            shown = {name: _read(row, _change(row, full)) for name, row in of.items() if row}
            documents = len(set(full["documents"]))
            yield {
                "suite": f"{suite}, {task}",
                "length": length,
                "documents": documents,
                "full": full["score"],
                **shown,
            }
        return
    means = {(length, policy): row for length, policy, row in quality_table.averaged(data)}
    for length in dict.fromkeys(length for length, _ in means):
        own = [row for row in data["rows"] if row["length"] == length and row["policy"] == common.SKETCH]
        if not own:
            continue
        full, worst = means[length, "full"], min(own, key=lambda row: row["delta"])
        of = {name: means.get((length, policy)) for name, policy in policies.items()}
        row = {name: _read(found, quality_table.delta(found)) for name, found in of.items() if found}
        row |= {"length": length, "documents": full["documents"], "full": full["score"]}
        if len(tasks) > 1:
            row["worst"] = f"{worst['task']} {worst['delta']:+.3f}" if worst["delta"] < 0 else "none"
        yield {"suite": suite if len(tasks) > 1 else f"{suite}, {min(tasks)}", **row}


def _change(row: Row, full: Row) -> str:
    return f"{row['score'] / full['score'] - 1:+.1%}".replace("-0.0", "+0.0")


def _read(row: Row, change: str) -> tuple[str, str]:
    return change, f"{row['read_fraction']:.1%}"


def kv_dtype(results: Path) -> str:
    """What storing KV in 8 bits costs: a line a suite and length, and the interval of the difference."""
    out = []
    stored = dict(result_files(results, "quality_kv*_int8.json"))
    for folder in dict.fromkeys(path.parent for path in stored):
        rows, sources = [], []
        for path, packed in stored.items():
            whole = common.load(path.with_name(path.name.replace("int8", "auto")))
            if path.parent != folder or whole is None:
                continue
            for length in dict.fromkeys(row["length"] for row in packed["rows"]):
                (int8, exact), low, high = _between(packed, whole, length)
                cost = {"int8": int8, "exact": exact, "delta": int8 - exact, "low": low, "high": high}
                rows.append({"suite": packed["suite"], "length": length, "samples": packed["samples"], **cost})
            sources.append(f"{link(path, path.stem)}, commit {packed['commit']}")
        columns = columns_of(
            "suite | prompt | samples a task | bfloat16 | int8 | delta",
            "{suite} | {length:,} | {samples} | {exact:.3f} | {int8:.3f} | {delta:+.3f} [{low:+.3f}, {high:+.3f}]",
        )
        out.append(f"{table(columns, rows)}\nPolicy `full`. {where(packed)} Data: {'; '.join(sources)}.\n")
    return "\n".join(out) or MISSING


def _between(one: Data, other: Data, length: int) -> tuple[list[float], float, float]:
    """Mean scores of two runs on the same questions over the tasks, and the interval of their difference."""
    rows = [{row["task"]: row for row in data["rows"] if row["length"] == length} for data in (one, other)]
    assert all(rows[1][task]["prompts"] == row["prompts"] for task, row in rows[0].items()), "other questions"
    deltas = [
        stats.resampled_deltas(row["samples"], rows[1][task]["samples"], row["documents"], row["measure"], seed=i)
        for i, (task, row) in enumerate(rows[0].items())
    ]
    low, high = stats.interval(np.mean(deltas, axis=0))
    return [mean(row["score"] for row in of.values()) for of in rows], low, high


def sparse_prefill(results: Path) -> str:
    """A line a task, a column a budget of the prefill: scores of `full`."""
    found: dict[tuple[Path, int], dict[float, Data]] = {}
    for path, data in result_files(results, "quality_prefill_*.json"):
        for length in {row["length"] for row in data["rows"]}:
            found.setdefault((path.parent, length), {})[data["config"]["prefill_budget"]] = data
    out = []
    for (_, length), runs in found.items():
        budgets = sorted(runs, reverse=True)
        rows: dict[str, Row] = {}
        for budget in budgets:
            for row in runs[budget]["rows"]:
                if row["length"] == length:
                    rows.setdefault(row["task"], {"task": row["task"]})[budget] = row["score"]
        means = {budget: mean(row[budget] for row in rows.values()) for budget in budgets}
        columns: Columns = {"task": "{task}", **{f"budget {b:g}": at(b, form="{:.3f}") for b in budgets}}
        data = runs[budgets[0]]
        note = f"Prompts of {length:,} tokens, {data['samples']} samples a task. {where(data)}"
        out.append(f"{table(columns, [*rows.values(), {'task': 'mean', **means}])}\n{note}\n")
    return "\n".join(out) or MISSING


def needle_heads(_: Path) -> str:
    """What the heads of the bundled model do, beside what Fluxion's paper and common observation say of large ones."""
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
    """What every tau did to held-out sequences, and what followed."""
    found = json.loads((common.PREDICTOR / "calibration.json").read_text())
    return f"{calibration_table(found['rows'])}\n{verdict(found)}\n"


# All policies under one harness

TIMES = {"attention": "attention_ms", "one_batch": "tpot_ms"}
"""Benchmarks of times, and what their rows call them."""


def rivals(results: Path) -> str:
    """A line a policy, families together; a dash for what is not measured. The plot below it."""
    machines: dict[Path, dict[str, tuple[Path, Data]]] = {}
    for benchmark in ("quality", *TIMES):
        for path, data in result_files(results, f"{benchmark}_{RIVALS.name}.json"):
            machines.setdefault(path.parent, {})[benchmark] = path, data
    return "\n".join(_rivals(found) for _, found in sorted(machines.items())) or MISSING


def _rivals(found: dict[str, tuple[Path, Data]]) -> str:
    """Scores, reads and times of the largest batch, a column a prompt length each."""
    quality = found["quality"][1] if "quality" in found else {"rows": [], "policies": []}
    batch = max(RIVALS.batches)
    rows: dict[str, Row] = {}
    lengths = set()

    def note(policy: str, length: int, **values: Any) -> None:
        row = rows.setdefault(policy, {"policy": policy})
        row |= {(name, length): value for name, value in values.items()}
        lengths.add(length)

    for length, policy, row in quality_table.averaged(quality):
        note(policy, length or 0, score=row["score"], read=row["read_fraction"])
    for name, value in TIMES.items():
        for row in found[name][1]["rows"] if name in found else []:
            if row["model"] == RIVALS.model:
                cell = rows.get(row["policy"], {}).get((name, row["length"]), [])
                note(row["policy"], row["length"], **{name: [*cell, row[value]] if row["batch"] == batch else cell})
    families = list(dict.fromkeys(map(quality_table.family, rows)))

    def shown(name: str, length: int, form: str) -> Callable[[Row], str]:
        def show(row: Row) -> str:
            value = row.get((name, length))
            value = median(value) if isinstance(value, list) and value else value
            return form.format(value) if value or value == 0 else "-"

        return show

    columns: Columns = {
        "policy": "{policy}",
        **{
            f"{head} {length // 1024}K{unit}": shown(name, length, form)
            for head, name, unit, form in (
                ("score", "score", "", "{:.3f}"),
                ("read", "read", "", "{:.1%}"),
                ("attention", "attention", " (ms)", "{:.2f}"),
                ("TPOT", "one_batch", " (ms)", "{:.1f}"),
            )
            for length in sorted(lengths)
        },
    }
    ordered = sorted(rows.values(), key=lambda row: families.index(quality_table.family(row["policy"])))
    return f"{table(columns, ordered)}\n{_rivals_note(found)}\n{_rivals_plot(found)}"


def _rivals_note(found: dict[str, tuple[Path, Data]]) -> str:
    said = []
    if "quality" in found:
        data = found["quality"][1]
        said.append(
            f"Quality: model {data['model']['id']} ({data['model']['sha256'][:12]}), RULER, {data['samples']} samples "
            f"a task, seed {data['seed']}, dtype {data['dtype']}."
        )
    if any(name in found for name in TIMES):
        said.append(f"Times: the same model in bfloat16, batches of {max(RIVALS.batches)}.")
    said.append(where(next(iter(found.values()))[1]))
    sources = [f"{link(path, name)} of commit {data['commit']}" for name, (path, data) in found.items()]
    return " ".join([*said, f"Data: {', '.join(sources)}."])


def _rivals_plot(found: dict[str, tuple[Path, Data]]) -> str:
    """The image that `fluxion_quality.plot` draws, if it has."""
    if "quality" not in found or not (image := found["quality"][0].with_suffix(".svg")).exists():
        return ""
    return f"\n!{link(image, 'Score of every policy against what it reads, and the Pareto front')}\n"


QUALITY_TABLES: dict[str, Callable[[Path], str]] = {
    "headline": headline,
    "answers": answers,
    "public": public,
    "long_answers": long_answers,
    "yardsticks": yardsticks,
    "large": quality(quality_table.pareto, "large"),
    "other_least": quality(quality_table.averages, "other"),
    "far": quality(scores, "far"),
    "perplexity": quality(scores, "perplexity"),
    "sketch": sketch,
    "kv_quality": kv_dtype,
    "sparse_prefill": sparse_prefill,
    "needle_heads": needle_heads,
    "calibration": calibration,
    "rivals": rivals,
}
