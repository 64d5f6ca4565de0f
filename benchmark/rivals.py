"""All policies under one harness: what is measured of them, and the table of it."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from rendering import link, nothing, result_files, table, where

from fluxion_quality import table as quality_table

NAME = "rivals"
MODEL = "needle"
LENGTHS = (4096, 8192)
BATCHES = (1, 8)
POLICIES = (
    *("full", "streaming", "oracle:0.05", "fixed:16:0.05", "fixed:16:0.10", "fixed:16:0.25", "fixed:32:0.10"),
    *("score95", "output10", "anchor", "fluxion"),
    *("hgca:0.25", "hgca:1", "psa:0.95", "psa:0.99", "lfps:0.05", "lfps:0.10"),
)
SPEED = {"attention": "attention_ms", "one_batch": "tpot_ms"}
"""Benchmarks of times, and what their rows call them."""

Results = dict[str, tuple[Path, dict[str, Any]]]
"""What was measured on one machine, by benchmark."""
Times = dict[tuple[int, str, int], list[float]]
"""Milliseconds by prompt length, policy and batch, one a round."""


def quality_options() -> list[str]:
    """What `fluxion bench quality` is to measure."""
    lengths = ",".join(f"{length // 1024}k" for length in LENGTHS)
    return ["--suite", "ruler", "--lengths", lengths, "--samples", "6", "--policies", ",".join(POLICIES)]


def speed_options(quick: bool) -> list[str]:
    """What attention.py and one_batch.py are to measure; quick: at the lengths they have for that."""
    options = ["--name", NAME, "--models", MODEL, "--batches", *map(str, BATCHES), "--policies", *POLICIES]
    return options if quick else [*options, "--lengths", *map(str, LENGTHS)]


def rivals(results: Path) -> str:
    """A line a policy, families together; a dash for what is not measured. The plot below it."""
    machines: dict[Path, Results] = {}
    for benchmark in ("quality", *SPEED):
        for path, data in result_files(results, f"{benchmark}_{NAME}.json"):
            machines.setdefault(path.parent, {})[benchmark] = path, data
    return "\n".join(_machine(found) for _, found in sorted(machines.items())) or nothing("__main__.py")


def _machine(found: Results) -> str:
    """Scores, reads and times of the largest batch, a column a prompt length each."""
    quality = found["quality"][1] if "quality" in found else {"rows": [], "policies": []}
    means = {(length or 0, policy): row for length, policy, row in quality_table.averaged(quality)}
    times = {name: _times(found[name][1], value) if name in found else {} for name, value in SPEED.items()}
    cells = list(dict.fromkeys([*means, *(key[:2] for of in times.values() for key in of)]))
    lengths = sorted({length for length, _ in cells})
    policies = list(dict.fromkeys(policy for _, policy in cells))
    families = list(dict.fromkeys(map(quality_table.family, policies)))
    policies.sort(key=lambda policy: families.index(quality_table.family(policy)))
    batch = max(BATCHES)
    lines = [
        [policy]
        + [_mean(means.get((length, policy)), "score", ".3f") for length in lengths]
        + [_mean(means.get((length, policy)), "read_fraction", ".1%") for length in lengths]
        + [_median(times["attention"].get((length, policy, batch)), ".2f") for length in lengths]
        + [_median(times["one_batch"].get((length, policy, batch)), ".1f") for length in lengths]
        for policy in policies
    ]
    head = [f"{what} {length // 1024}K" + unit for what, unit in _COLUMNS for length in lengths]
    return f"{table(['policy', *head], lines, 'l' + 'r' * len(head))}\n{_note(found)}\n{_plot(found)}"


_COLUMNS = (("score", ""), ("read", ""), ("attention", " (ms)"), ("TPOT", " (ms)"))


def _times(data: dict[str, Any], value: str) -> Times:
    times: Times = {}
    for row in data["rows"]:
        if row["model"] == MODEL:
            times.setdefault((row["length"], row["policy"], row["batch"]), []).append(row[value])
    return times


def _mean(row: quality_table.Row | None, name: str, form: str) -> str:
    return "-" if row is None or row[name] is None else format(row[name], form)


def _median(values: list[float] | None, form: str) -> str:
    return format(median(values), form) if values else "-"


def _note(found: Results) -> str:
    said = []
    if "quality" in found:
        data = found["quality"][1]
        said.append(
            f"Quality: model {data['model']['id']} ({data['model']['sha256'][:12]}), RULER, {data['samples']} samples "
            f"a task, seed {data['seed']}, dtype {data['dtype']}."
        )
    if any(name in found for name in SPEED):
        said.append(f"Times: the same model in bfloat16, batches of {max(BATCHES)}.")
    said.append(where(next(iter(found.values()))[1]))
    sources = [f"[{name}]({link(path)}) of commit {data['commit']}" for name, (path, data) in found.items()]
    return " ".join([*said, f"Data: {', '.join(sources)}."])


def _plot(found: Results) -> str:
    """The image that `fluxion_quality.plot` draws, if it has."""
    if "quality" not in found or not (image := found["quality"][0].with_suffix(".svg")).exists():
        return ""
    return f"\n![Score of every policy against what it reads, and the Pareto front]({link(image)})\n"
