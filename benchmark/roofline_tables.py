"""Tables of kernels.py, peers.py and forks.py: a column a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rendering import link, nothing, result_files, table

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
BUDGET = 0.05
"""Of the tables that show one budget."""

Files = list[tuple[Path, dict[str, Any]]]
Label = tuple[str, ...]
Cells = dict[Label, dict[Path, str]]
"""By line, then by result file."""


def said(name: str, value: float) -> str:
    return f"{value:.0%} {WORDS[name]}" if name in SHARES else f"{value:.3g} {WORDS[name]}"


def measured(name: str, value: float) -> str:
    """With the digit that decides and the unit."""
    return f"{value:.1%}" if name in SHARES else f"{value:.3g} {WORDS[name].split(' ')[0]}"


def shape(row: dict[str, Any]) -> str:
    blocks = f"blk {row['blk']}, {row['budget']:.0%} of" if row["blk"] else "dense,"
    tokens = f"{row['context'] // 1024}K" + (", shuffled" if row.get("shuffled") else "")
    if row["kernel"] in ("append", "empty"):
        return ""
    return f"up to {tokens}" if row["kernel"] == "imbalance" else f"{blocks} {tokens}"


def variant(row: dict[str, Any], best: str) -> str:
    """What sets a row apart from bfloat16 with head dimension 128, all threads and the best kernels of its machine."""
    parts = [f"G={row['group']}"]
    parts += [f"D={row['head_dim']}"] if row["head_dim"] != 128 else []
    parts += [row["dtype"]] if row["dtype"] != "bf16" else []
    parts += [row["isa"]] if row["isa"] != best else []
    return ", ".join(parts + ([f"{row['threads']} thread"] if row["threads"] else []))


def machines(results: Path) -> str:
    """A line a machine: what its memory gives, and how near the executor comes."""
    files = result_files(results, "kernels.json")
    lines = []
    for path, data in files:
        rows = data["rows"]
        held = [holds for row in rows for *_, holds in _bars(row)]
        gather = _first(rows, kernel="attend", blk=16)
        lines.append(
            [
                _machine(path),
                str(rows[0]["isa"]),
                _shown(gather, "stream", ".0f"),
                _shown(gather, "of_scatter", ".0%"),
                _shown(_first(rows, kernel="attend", blk=0), "of_stream", ".0%"),
                _shown(_first(rows, kernel="scan", blk=0), "of_stream", ".0%"),
                _shown(_first(rows, kernel="layer", shuffled=False), "value", ".2f"),
                f"{sum(held)} of {len(held)}",
                f"[{data['date']}]({link(path)})",
            ]
        )
    head = ["machine", "kernels", "stream (GB/s)", "attend, of scatter", "dense attend, of stream", "scan, of stream"]
    head += ["layer, x the time of its bytes", "bars met", "measured"]
    return table(head, lines, "ll" + "r" * 6 + "l") if files else nothing("kernels.py")


def bars(results: Path) -> str:
    """Rows that are held to something, what that is, and whether they meet it."""
    files = result_files(results, "kernels.json")
    cells: Cells = {}
    isas: dict[Label, set[str]] = {}
    for path, data in files:
        for row in data["rows"]:
            for name, limit, value, holds in _bars(row):
                label = (row["kernel"], shape(row), variant(row, row["isa"]), limit)
                text = measured(name, value)
                cells.setdefault(label, {})[path] = text if holds else f"**{text}**"
                isas.setdefault(label, set()).add(row["isa"])
    named: Cells = {}
    for label, found in cells.items():
        kernel, of, how, limit = label
        named[kernel, of, how + (", avx2" if isas[label] == {"avx2"} else ""), limit] = found
    note = "Bold: not met. Empty: no such row on that machine."
    return _side_by_side(files, "kernels.py", ["what", "of", "variant", "bar"], named, note)


def kernels(results: Path) -> str:
    """Rates of the kernels, shares of the scattered read, and rates from the cache."""
    files = result_files(results, "kernels.json")
    cells: Cells = {}
    errors = [0.0]
    for path, data in files:
        for row in data["rows"]:
            if not row["gb_per_s"] or row["kernel"] == "select" or row["context"] > 32768:
                continue
            if row["blk"] and row["budget"] not in (BUDGET, 1.0):
                continue
            label = (row["kernel"], shape(row), variant(row, data["rows"][0]["isa"]))
            text = f"{row['gb_per_s']:.1f}"
            if "of_scatter" in row and "cached" in row:
                text += f" ({row['of_scatter']:.0%}, {row['cached']:.0f})"
            cells.setdefault(label, {})[path] = text
            errors.append(row["error"] or 0.0)
    kinds = list(dict.fromkeys(label[0] for label in cells))
    cells = dict(sorted(cells.items(), key=lambda cell: kinds.index(cell[0][0])))
    note = f"GB/s (share of scatter, GB/s from the cache). Largest error: {max(errors):.1e}."
    return _side_by_side(files, "kernels.py", ["kernel", "of", "variant"], cells, note)


def peers(results: Path) -> str:
    """Times of other implementations, and over ours."""
    files = result_files(results, "peers.json")
    cells: Cells = {}
    errors: dict[Label, float] = {}
    for path, data in files:
        for row in data["rows"]:
            share = f"{row['budget']:.0%} of " if row["budget"] != 1 else "all of "
            work = f"{share}{row['context'] // 1024}K"
            ours, other = (work, "Fluxion"), (work, row["peer"])
            cells.setdefault(ours, {})[path] = f"{row['ours_ms']:.1f}"
            cells.setdefault(other, {})[path] = f"{row['ms']:.1f} ({row['over_ours']:.1f}x)"
            for label, name in ((ours, "error_ours"), (other, "error")):
                errors[label] = max(errors.get(label, 0.0), row[name])
    for label, found in cells.items():
        found[Path("error")] = f"{errors[label]:.1e}"
    note = "Milliseconds (times Fluxion's). Error: the largest of the machines."
    return _side_by_side(files, "peers.py", ["attention over", "by"], cells, note, {Path("error"): "error"})


def forks(results: Path) -> str:
    """Steps of several branches of a document over that of one."""
    files = result_files(results, "forks.json")
    cells: Cells = {}
    errors = [0.0]
    for path, data in files:
        for row in data["rows"]:
            label = (row["policy"], f"{row['document'] // 1024}K", str(row["branches"]), row["queries"])
            before = cells.setdefault(label, {}).get(path)
            text = f"{row['over_one']:.1f}x"
            cells[label][path] = text if before is None else f"{before} / {text}"
            errors.append(row["error"])
    sides = dict.fromkeys(row["sharing"] for _, data in files for row in data["rows"])
    note = f"Time of the step over that of one branch, sharing {' / '.join(sides)}. Largest error: {max(errors):.1e}."
    return _side_by_side(files, "forks.py", ["policy", "document", "branches", "queries"], cells, note)


def fairness(results: Path) -> str:
    """What a sparse request pays for those beside it."""
    files = result_files(results, "fairness.json")
    cells: Cells = {}
    for path, data in files:
        for row in data["rows"]:
            cells.setdefault((f"`{row['policy']}`",), {})[path] = f"{row['step_ms']:.2f} ms, {row['over_alike']:.1f}x"
    first = files[0][1]["rows"][0] if files else {"alone_ms": 0.0}
    note = (
        "Time of one layer's step, and how many times as long that is as beside four under the request's own policy. "
        f"Alone{' on the first machine' * (len(files) > 1)} it takes {first['alone_ms']:.2f} ms."
    )
    return _side_by_side(files, "fairness.py", ["policy of the four"], cells, note)


def _bars(row: dict[str, Any]) -> Iterator[tuple[str, str, float, bool]]:
    """Of every bar of a row: what is held to it, the bar in words, what was measured, and whether it is met."""
    known = {**row, row["what"]: row["value"]}
    for bar in row["bars"]:
        name, sign, bound = bar.split()
        least = sign == ">="
        value = known[name]
        limit = f"{'at least' if least else 'at most'} {said(name, float(bound))}"
        yield name, limit, value, value >= float(bound) if least else value <= float(bound)


def _first(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The first row with these values: rows of a kernel begin with the plain one. Empty if there is none."""
    return next((row for row in rows if all(row[name] == value for name, value in wanted.items())), {})


def _shown(row: dict[str, Any], name: str, form: str) -> str:
    return format(row[name], form) if name in row else ""


def _machine(path: Path) -> str:
    return MACHINES.get(path.parent.name, path.parent.name)


def _side_by_side(
    files: Files, script: str, head: list[str], cells: Cells, note: str, more: dict[Path, str] | None = None
) -> str:
    """A column a result file, in the order of MACHINES, then one for each of `more`."""
    if not files:
        return nothing(script)
    order = {name: at for at, name in enumerate(MACHINES)}
    files = sorted(files, key=lambda file: order.get(file[0].parent.name, len(order)))
    columns = {path: _machine(path) for path, _ in files} | (more or {})
    lines = [[*label, *(found.get(column, "") for column in columns)] for label, found in cells.items()]
    data = ", ".join(f"[{_machine(path)}]({link(path)})" for path, _ in files)
    rounds = " to ".join(str(n) for n in sorted({data["rounds"] for _, data in files}))
    align = "l" * len(head) + "r" * len(columns)
    return f"{table([*head, *columns.values()], lines, align)}\n{note} Medians of {rounds} rounds. Data: {data}.\n"


ROOFLINE_TABLES: dict[str, Callable[[Path], str]] = {
    "machines": machines,
    "bars": bars,
    "kernels": kernels,
    "peers": peers,
    "forks": forks,
    "fairness": fairness,
}
