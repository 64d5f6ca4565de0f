"""Tables of decode steps: whole models, and the executor on each machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import common
from one_batch import MODELS
from rendering import (
    Data,
    Row,
    Table,
    at,
    columns_of,
    link,
    machine,
    medians,
    outer,
    over,
    result_files,
    sources,
    table,
)

from fluxion_sglang.config import GONE

PUBLIC_MODEL = "smollm2"
"""Public checkpoint whose steps are timed."""


# Time per output token


def rounds(data: Data) -> int:
    return 1 + max(row["round"] for row in data["rows"])


def steps(data: Data) -> int:
    return min(row.get("steps", 32) for row in data["rows"])


def policy_rows(data: Data) -> list[Row]:
    """Median TPOT by policy, one row per model, batch and length."""
    place = ("model", "batch", "length")
    return sorted(medians(data["rows"], place, "policy", "tpot_ms"), key=lambda row: [row[key] for key in place])


@dataclass(frozen=True)
class Steps:
    """Time per output token from several files in one table, for the smallest and largest batches and prompts.

    Attributes:
        names: files, without the prefix one_batch_. shown: policies with a column; rows without the first of them are
            dropped.
        pairs: of policies; a column holds the time of the first over the second.
    """

    names: Sequence[str]
    shown: Sequence[str]
    pairs: Sequence[tuple[str, str]]

    def __call__(self, results: Path) -> str:
        files = [one for name in self.names for one in result_files(results, f"one_batch_{name}.json")]
        if not files:
            return "Not measured yet: `python benchmark/one_batch.py`.\n"
        columns = (
            columns_of("model | batch | prompt", "{model} | {batch} | {length:,}")
            | {f"`{policy}` (ms)": at(policy, form="{:.1f}") for policy in self.shown}
            | {f"`{a}` / `{b}`": over(a, b) for a, b in self.pairs}
        )
        rows = []
        for _, data in files:
            rows += outer((row for row in policy_rows(data) if self.shown[0] in row), "batch", "length")
        least, most = (of(steps(data) for _, data in files) for of in (min, max))
        count = f"{least}" if least == most else f"{least} to {most}"
        return f"{table(columns, rows)}\nMedians of {count} steps. {sources(files)}\n"


def public_rows(data: Data) -> list[Row]:
    """The two longest prompts of the smallest and the largest batch."""
    lengths = sorted({row["length"] for row in data["rows"]})
    return [row for row in outer(policy_rows(data), "batch") if row["length"] in lengths[-2:]]


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


def gpu_idle(results: Path) -> str:
    """Time that a GPU waits for the CPU per layer, and its share of TPOT, in the format of Fluxion's Table 5.

    The table also shows plain SGLang, which does not wait, and the share of the middle that the GPU read. One table per
    machine.
    """
    tables: dict[str, list[Row]] = {}
    links: dict[str, list[str]] = {}
    for path, data in result_files(results, "one_batch_*.json"):
        if data.get("device") != "cuda":
            continue
        note = f"{steps(data)} steps in {rounds(data)} run(s). {machine(data)}, {data['date']}"
        links.setdefault(note, []).append(link(path, "data"))
        cells: dict[tuple[Any, ...], list[Row]] = {}
        for row in data["rows"]:
            cells.setdefault(tuple(row[key] for key in ("model", "batch", "length", "policy")), []).append(row)
        for (model, batch, length, policy), found in cells.items():
            # Drop options that the current version has removed, so that the printed config still starts a server.
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


# Executor: one column per machine

MACHINES = {
    "amd-epyc-2-cores": "Zen 5",
    "amd-epyc-2-cores-avx2": "Zen 3",
    "amd-epyc-2-cores-zen4": "Zen 4",
    "intel-r-xeon-r-processor-2-cores": "Xeon",
    "intel-r-xeon-r-processor-2-cores-amx": "Xeon with AMX",
}
"""Short names of result folders; other folders keep their own name."""


def machine_name(path: Path) -> str:
    return MACHINES.get(path.parent.name, path.parent.name)


def met(row: Row) -> list[bool]:
    """For every bar of a row, whether the row meets it."""
    known = {**row, row["what"]: row["value"]}
    bars = (bar.split() for bar in row["bars"])
    return [known[name] >= float(end) if sign == ">=" else known[name] <= float(end) for name, sign, end in bars]


def machines(results: Path) -> str:
    """One line per machine: bandwidth of its memory, and how close the executor comes to it."""

    def first(data: Data, **wanted: Any) -> Row:
        """The first row with these values: the plain case comes first among the rows of a kernel."""
        return next((row for row in data["rows"] if wanted.items() <= row.items()), {})

    rows = []
    for path, data in result_files(results, "kernels.json"):
        held = [holds for row in data["rows"] for holds in met(row)]
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


def peers(results: Path) -> str:
    """Times of dense attention by other implementations, and their ratio to ours. torch in float32 is left out."""
    order = {name: i for i, name in enumerate(MACHINES)}
    files = sorted(result_files(results, "peers.json"), key=lambda one: order.get(one[0].parent.name, len(order)))
    if not files:
        return "Not measured yet: `python benchmark/peers.py`.\n"
    rows: dict[tuple[int, str], Row] = {}
    for path, data in files:
        name = machine_name(path)
        for row in data["rows"]:
            if row["budget"] == 1 and not row["peer"].startswith("sdpa f32"):
                cells = {"Fluxion": f"{row['ours_ms']:.1f}", row["peer"]: f"{row['ms']:.1f} ({row['over_ours']:.1f}x)"}
                for by, cell in cells.items():
                    place = {"context": row["context"] // 1024, "by": by}
                    rows.setdefault((row["context"], by), place)[name] = cell
    names = {machine_name(path): link(path, machine_name(path)) for path, _ in files}
    columns = columns_of("context | by", "{context}K | {by}") | {name: at(name, form="{}") for name in names}
    of = " to ".join(str(n) for n in sorted({data["rounds"] for _, data in files}))
    note = f"Milliseconds (times Fluxion's). Medians of {of} rounds. Data: {', '.join(names.values())}."
    return f"{table(columns, rows.values(), 'll')}\n{note}\n"


DECODE_TABLES: dict[str, Callable[[Path], str]] = {
    "one_batch_public": Steps([PUBLIC_MODEL], ["full", "sketch", common.SKETCH], [("full", "sketch")]),
    "one_batch": Steps(MODELS, ["off", "full"], [("off", "full")]),
    "one_batch_sketch": Steps(
        ["sketch", "sketch_other"],
        ["full", "fluxion", common.SKETCH],
        [("full", "fluxion"), ("full", common.SKETCH)],
    ),
    "speed": public_speed,
    "gpu_idle": gpu_idle,
    "machines": machines,
    "peers": peers,
}
