"""Tables of decode steps: of whole models, and of the executor on each machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import common
from one_batch import BEST_FIXED, MODELS
from rendering import (
    Columns,
    Data,
    Row,
    Table,
    at,
    columns_of,
    link,
    medians,
    over,
    result_files,
    table,
    where,
)

from fluxion_sglang.config import GONE

PUBLIC_MODEL = "smollm2"
"""The public checkpoint whose steps are timed."""


# Tokens and attention by policy


def rounds(data: Data) -> int:
    return 1 + max(row["round"] for row in data["rows"])


def steps(data: Data) -> int:
    return min(row.get("steps", 32) for row in data["rows"])


def by_policy(value: str, base: str, digits: int, data: Data) -> Columns:
    """A column a policy, and where there is something to compare: what `base` and `full` take over `fluxion`, `base`
    over a fixed policy, that over `fluxion`; without `fluxion`, `base` over the others; and `base` over `sketch`."""
    cells = medians(data["rows"], ("model", "batch", "length"), "policy", value)
    policies = list(dict.fromkeys(row["policy"] for row in data["rows"]))
    fixed = [policy for policy in policies if policy.startswith("fixed")]
    if "fluxion" in policies:
        near = BEST_FIXED if BEST_FIXED in fixed else (fixed or [""])[-1]
        pairs = list(dict.fromkeys([(base, "fluxion"), ("full", "fluxion"), (base, near), (near, "fluxion")]))
    else:
        pairs = [(base, policy) for policy in ["full", *fixed[:1]] if policy != base]
    pairs = [(a, b) for a, b in [*pairs, (base, common.SKETCH)] if any({a, b} <= cell.keys() for cell in cells)]
    return (
        columns_of("model | batch | prompt", "{model} | {batch} | {length:,}")
        | {f"{policy} (ms)": at(policy, form=f"{{:.{digits}f}}") for policy in policies}
        | {f"{a} / {b}": over(a, b) for a, b in pairs}
    )


def policy_rows(value: str, data: Data) -> list[Row]:
    place = ("model", "batch", "length")
    return sorted(medians(data["rows"], place, "policy", value), key=lambda row: [row[key] for key in place])


def memory_read(reads: Iterable[float]) -> str:
    return f" Memory read by a plain stream during the run: {min(reads):.0f} to {max(reads):.0f} GB/s."


def tpot(names: Iterable[str], base: str) -> Table:
    def note(data: Data) -> str:
        reads = data.get("memory_read_gb_per_s")
        said = f"TPOT, medians of {steps(data)} steps in {rounds(data)} run(s). {{where}}"
        return said + (memory_read(reads) if reads else "")

    return Table(
        [f"one_batch_{name}.json" for name in names],
        partial(by_policy, "tpot_ms", base, 1),
        note,
        partial(policy_rows, "tpot_ms"),
        command="python benchmark/one_batch.py",
    )


attention = Table(
    "attention.json",
    partial(by_policy, "attention_ms", "full", 2),
    lambda data: (
        f"Of {data['turns']} turns. {{where}}" + memory_read([row["memory_read_gb_per_s"] for row in data["rows"]])
    ),
    partial(policy_rows, "attention_ms"),
)


def public_rows(data: Data) -> list[Row]:
    """Of the least and the largest batch the two longest prompts."""
    rows = policy_rows("tpot_ms", data)
    batches, lengths = (sorted({row[key] for row in rows}) for key in ("batch", "length"))
    return [row for row in rows if row["batch"] in (batches[0], batches[-1]) and row["length"] in lengths[-2:]]


public_speed = Table(
    f"one_batch_{PUBLIC_MODEL}.json",
    (
        columns_of("batch | prompt (tokens)", "{batch} | {length:,}")
        | {"`full` (ms)": "{full:.1f}", "`sketch` (ms)": "{sketch:.1f}"}
        | {"`full` / `sketch`": over("full", "sketch")}
    ),
    lambda data: f"Medians of {steps(data)} steps, bfloat16.",
    public_rows,
    align="",
    command="python benchmark/one_batch.py",
)


step_graphs = Table(
    "step_graphs.json",
    columns_of(
        "model | layers | batch | without (ms) | with the graph (ms) | with / without",
        "{model} | {layers} | {batch} | {python_ms:.1f} | {graph_ms:.1f} | {ratio:.2f}x",
    ),
    lambda data: (
        f"Whole steps at {data['rows'][0]['depth']:,} tokens, policy `{data['policy']}`; medians of {data['turns']} "
        f"turns of {data['steps']} steps."
    ),
)


def gpu_idle(results: Path) -> str:
    """What a GPU waits for the CPU in a layer, and its share of TPOT, in the shape of Fluxion's Table 5.

    Beside it plain SGLang, which does not wait, and what the GPU read of the middle. A table for each machine.
    """
    tables: dict[str, list[Row]] = {}
    links: dict[str, list[str]] = {}
    for path, data in result_files(results, "one_batch_*.json"):
        if data.get("device") != "cuda":
            continue
        note = f"{steps(data)} steps in {rounds(data)} run(s). {where(data)}"
        links.setdefault(note, []).append(link(path, "data"))
        cells: dict[tuple[Any, ...], list[Row]] = {}
        for row in data["rows"]:
            cells.setdefault(tuple(row[key] for key in ("model", "batch", "length", "policy")), []).append(row)
        for (model, batch, length, policy), found in cells.items():
            # Without keys of earlier versions: a server of today takes the rest.
            config = {key: value for key, value in data["config"].items() if key not in GONE}
            options = f"`{json.dumps(config)}`" if config and policy != "off" else ""
            row = {"shape": f"{model}, {batch} x {length:,}", "policy": f"`{policy}`", "options": options}
            for name in ("tpot_ms", "idle_ms", "idle_ratio", "gpu_share"):
                if name in found[0]:
                    row[name] = median(one[name] for one in found)
            tables.setdefault(note, []).append(row)
    columns = {"shape": "{shape}", "policy": "{policy}", "options": "{options}", "TPOT (ms)": "{tpot_ms:.1f}"}
    columns |= {"idle (ms a layer)": "{idle_ms:.3f}", "idle ratio": "{idle_ratio:.0%}"}
    columns |= {"the GPU reads": "{gpu_share:.0%}"}
    return "\n".join(
        f"{table(columns, sorted(rows, key=itemgetter('shape', 'policy', 'options')), 'lll')}\n"
        f"TPOT: medians, idle: means of {note} ({', '.join(links[note])})\n"
        for note, rows in tables.items()
    )


# The executor: a column a machine

MACHINES = {
    "amd-epyc-2-cores": "Zen 5",
    "amd-epyc-2-cores-avx2": "Zen 3",
    "amd-epyc-2-cores-zen4": "Zen 4",
    "intel-r-xeon-r-processor-2-cores": "Xeon",
    "intel-r-xeon-r-processor-2-cores-amx": "Xeon with AMX",
}
"""Short names of the folders with results; a folder that is not here goes by its own name."""
WORDS = {
    "of_scatter": "of scatter",
    "of_stream": "of stream",
    "share": "of scan, select and attend",
    "over_ceiling": "x the time of its bytes",
    "microseconds": "us",
    "busiest_over_mean": "x the mean worker",
    "over_one": "x one branch",
    "sdpa_over_ours": "x as fast",
}
"""Names of what is held to a bar, as a table says them."""
SHARES = ("of_scatter", "of_stream", "share")

Label = tuple[str, ...]
Cells = dict[Label, dict[str, str]]
"""By line, then by machine."""


def machine_name(path: Path) -> str:
    return MACHINES.get(path.parent.name, path.parent.name)


def said(name: str, value: float) -> str:
    return f"{value:.0%} {WORDS[name]}" if name in SHARES else f"{value:.3g} {WORDS[name]}"


def measured(name: str, value: float) -> str:
    """With the digit that decides and the unit."""
    return f"{value:.1%}" if name in SHARES else f"{value:.3g} {WORDS[name].split(' ')[0]}"


def shape(row: Row) -> str:
    blocks = f"blk {row['blk']}, {row['budget']:.0%} of" if row["blk"] else "dense,"
    tokens = f"{row['context'] // 1024}K" + (", shuffled" if row.get("shuffled") else "")
    if row["kernel"] in ("append", "empty"):
        return ""
    return f"up to {tokens}" if row["kernel"] == "imbalance" else f"{blocks} {tokens}"


def variant(row: Row) -> str:
    """What sets a row apart from bfloat16 with head dimension 128 and all threads."""
    parts = [f"G={row['group']}"]
    parts += [f"D={row['head_dim']}"] if row["head_dim"] != 128 else []
    parts += [row["dtype"]] if row["dtype"] != "bf16" else []
    return ", ".join(parts + ([f"{row['threads']} thread"] if row["threads"] else []))


def held_bars(row: Row) -> Iterator[tuple[str, str, float, bool]]:
    """Of every bar of a row: what is held to it, the bar in words, what was measured, and whether it is met."""
    known = {**row, row["what"]: row["value"]}
    for bar in row["bars"]:
        name, sign, bound = bar.split()
        least, value = sign == ">=", known[name]
        limit = f"{'at least' if least else 'at most'} {said(name, float(bound))}"
        yield name, limit, value, value >= float(bound) if least else value <= float(bound)


def machines(results: Path) -> str:
    """A line a machine: what its memory gives, and how near the executor comes."""

    def first(data: Data, **wanted: Any) -> Row:
        """The first row with these values: rows of a kernel begin with the plain one."""
        return next((row for row in data["rows"] if wanted.items() <= row.items()), {})

    rows = []
    for path, data in result_files(results, "kernels.json"):
        held = [holds for row in data["rows"] for *_, holds in held_bars(row)]
        row = {"machine": machine_name(path), "isa": data["rows"][0]["isa"], "met": f"{sum(held)} of {len(held)}"}
        row |= {"gather": first(data, kernel="attend", blk=16), "dense": first(data, kernel="attend", blk=0)}
        row |= {"scan": first(data, kernel="scan", blk=0), "layer": first(data, kernel="layer", shuffled=False)}
        rows.append({**row, "link": link(path, data["date"])})
    columns = columns_of(
        "machine | kernels | stream (GB/s) | attend, of scatter | dense attend, of stream | scan, of stream | layer, "
        "x the time of its bytes | bars met | measured",
        "{machine} | {isa} | {gather[stream]:.0f} | {gather[of_scatter]:.0%} | {dense[of_stream]:.0%} | "
        "{scan[of_stream]:.0%} | {layer[value]:.2f} | {met} | {link}",
    )
    return table(columns, rows, "llrrrrrrl")


def side_by_side(
    results: Path, name: str, head: Iterable[str], draw: Callable[[list[tuple[str, Data]]], tuple[Cells, str]]
) -> str:
    """A column a result file, in the order of MACHINES; what `draw` adds beyond machines comes last."""
    order = {name: i for i, name in enumerate(MACHINES)}
    files = sorted(result_files(results, f"{name}.json"), key=lambda one: order.get(one[0].parent.name, len(order)))
    if not files:
        return f"Not measured yet: `python benchmark/{name}.py`.\n"
    cells, note = draw([(machine_name(path), data) for path, data in files])
    names = [machine_name(path) for path, _ in files]
    names += dict.fromkeys(more for found in cells.values() for more in found if more not in names)
    head = list(head)
    columns: Columns = {
        **{word: at("label", i, form="{}") for i, word in enumerate(head)},
        **{name: at(name, form="{}") for name in names},
    }
    rows = [{"label": label, **found} for label, found in cells.items()]
    of = " to ".join(str(n) for n in sorted({data["rounds"] for _, data in files}))
    data = ", ".join(link(path, machine_name(path)) for path, _ in files)
    return f"{table(columns, rows, 'l' * len(head))}\n{note} Medians of {of} rounds. Data: {data}.\n"


def bars(files: list[tuple[str, Data]]) -> tuple[Cells, str]:
    """Rows that are held to something, what that is, and whether they meet it."""
    cells: Cells = {}
    isas: dict[Label, set[str]] = {}
    for machine, data in files:
        for row in data["rows"]:
            for name, limit, value, holds in held_bars(row):
                label = (row["kernel"], shape(row), variant(row), limit)
                text = measured(name, value)
                cells.setdefault(label, {})[machine] = text if holds else f"**{text}**"
                isas.setdefault(label, set()).add(row["isa"])
    named = {
        (kernel, of, how + (", avx2" if isas[kernel, of, how, limit] == {"avx2"} else ""), limit): found
        for (kernel, of, how, limit), found in cells.items()
    }
    return named, "Bold: not met. Empty: no such row on that machine."


def peers(files: list[tuple[str, Data]]) -> tuple[Cells, str]:
    """Times of other implementations, and over ours."""
    cells: Cells = {}
    errors: dict[Label, float] = {}
    for machine, data in files:
        for row in data["rows"]:
            share = "all" if row["budget"] == 1 else f"{row['budget']:.0%}"
            work = f"{share} of {row['context'] // 1024}K"
            ours, other = (work, "Fluxion"), (work, row["peer"])
            cells.setdefault(ours, {})[machine] = f"{row['ours_ms']:.1f}"
            cells.setdefault(other, {})[machine] = f"{row['ms']:.1f} ({row['over_ours']:.1f}x)"
            for label, name in ((ours, "error_ours"), (other, "error")):
                errors[label] = max(errors.get(label, 0.0), row[name])
    for label, found in cells.items():
        found["error"] = f"{errors[label]:.1e}"
    return cells, "Milliseconds (times Fluxion's). Error: the largest of the machines."


def forks(files: list[tuple[str, Data]]) -> tuple[Cells, str]:
    """Steps of several branches of a document over that of one."""
    cells: Cells = {}
    rows = [(machine, row) for machine, data in files for row in data["rows"]]
    for machine, row in rows:
        found = cells.setdefault(
            (row["policy"], f"{row['document'] // 1024}K", str(row["branches"]), row["queries"]), {}
        )
        text = f"{row['over_one']:.1f}x"
        found[machine] = f"{found[machine]} / {text}" if machine in found else text
    sides = dict.fromkeys(row["sharing"] for _, row in rows)
    note = f"Time of the step over that of one branch, sharing {' / '.join(sides)}. "
    return cells, f"{note}Largest error: {max(row['error'] for _, row in rows):.1e}."


def fairness(files: list[tuple[str, Data]]) -> tuple[Cells, str]:
    """What a sparse request pays for those beside it."""
    cells: Cells = {}
    for machine, data in files:
        for row in data["rows"]:
            cells.setdefault((f"`{row['policy']}`",), {})[machine] = (
                f"{row['step_ms']:.2f} ms, {row['over_alike']:.1f}x"
            )
    return cells, (
        "Time of one layer's step, and how many times as long that is as beside four under the request's own policy. "
        f"Alone{' on the first machine' * (len(files) > 1)} it takes {files[0][1]['rows'][0]['alone_ms']:.2f} ms."
    )


DECODE_TABLES: dict[str, Callable[[Path], str]] = {
    "one_batch": tpot(MODELS, "off"),
    "one_batch_sketch": tpot(("sketch", "sketch_other"), "full"),
    "speed": public_speed,
    "gpu_idle": gpu_idle,
    "attention": attention,
    "step_graphs": step_graphs,
    "machines": machines,
    "bars": lambda results: side_by_side(results, "kernels", ("what", "of", "variant", "bar"), bars),
    "peers": lambda results: side_by_side(results, "peers", ("attention over", "by"), peers),
    "forks": lambda results: side_by_side(results, "forks", ("policy", "document", "branches", "queries"), forks),
    "fairness": lambda results: side_by_side(results, "fairness", ("policy of the four",), fairness),
}
