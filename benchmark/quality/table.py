"""Tables of a result file in Markdown: `python -m fluxion_quality.table FILE`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from fluxion_sglang.scoring.serve import OFF

from . import record, stats
from .plan import FULL

Row = dict[str, Any]
Key = tuple[str | None, str]
"""Length as text (None: fixed lengths), and policy."""


def markdown(data: dict[str, Any]) -> str:
    """Scores by task, then averages over tasks, then the meaning of the columns."""
    if not data["rows"]:
        return "No cell is measured yet.\n"
    model = f"model {data['model']['id']} ({data['model']['sha256'][:12]})"
    head = (
        f"Suite {data['suite']}, {model}, {data['samples']} samples a task, seed {data['seed']}, "
        f"dtype {data['dtype']}. {where(data)}"
    )
    rows = {(row["task"], row["length"], row["policy"]): row for row in data["rows"]}
    for row in data["rows"]:  # compute intervals anew, whichever version measured
        stats.compare(row, rows.get((row["task"], row["length"], FULL)), data["seed"])
    # A mean over perplexities is meaningless.
    means = [] if all(row["measure"] == "perplexity" for row in data["rows"]) else [averages(data)]
    return "\n".join([head, "", scores(data), *means, _MEANING])


def where(data: Mapping[str, Any]) -> str:
    """Machine, versions and date of a result file: a sentence from the fields of `record.header`."""
    at, of = data["machine"], data["versions"]
    name = at["cpu"] + (f" ({at['generation']})" if at.get("generation") else "")
    cpu = f"{name}, {at['cores']} cores" + (f" ({', '.join(at['flags'])})" if at["flags"] else "")
    made = f"sglang {of['sglang']}, torch {of['torch']}; commit {data['commit']}, {data['date']}"
    return f"{cpu}, {at['gpu'] or 'no GPU'}; {made}."


_MEANING: Final = """\
Delta: score minus that of `full`, with the 95% interval of a paired bootstrap over documents. An interval of zero
width says that all documents had the same difference, not that all others would: if n documents show no loss, up to
about 3/n of all documents may still have one (95%). Read: bytes of tiles and metadata, over the bytes of the whole
middle's KV, all layers; the keys that an oracle scans do not count. MB a token: the same bytes (10^6), for one token of
one request. Error: of a head's output against exact attention for the same query, relative to the largest norm of the
layer's heads; mean and 99th percentile. KL: of the next-token distribution, from `full`, in nats, at every decode step
up to and including the first whose token differs; mean over a sample's steps, then over samples (vocabularies over
1,024: a lower bound from the 256 most probable tokens and one bucket). Same: answers equal to those of `full`; of
forced tokens, steps with the same most probable token. Perplexities are of forced tokens at decode steps; lower is
better.
"""


def scores(data: dict[str, Any], intervals: bool = True) -> str:
    """A line per task and length, a column per policy.

    Args:
        intervals: whether to show the difference to `full` and its interval beside scores.
    """
    policies = _policies(data)
    cells = {(row["task"], row["length"], row["policy"]): row for row in data["rows"]}
    lines = []
    for task, length in sorted({(task, length) for task, length, _ in cells}, key=lambda key: (key[0], key[1] or 0)):
        found = [cells.get((task, length, policy)) for policy in policies]
        asked = max(_documents(row) for row in found if row)
        lines.append([task, _length(length), str(asked), *(_score(row, intervals) for row in found)])
    return grid(["task", "prompt", "documents", *policies], lines, "l")


def averages(data: dict[str, Any]) -> str:
    """A line per length and policy: means over the tasks that every policy has at this length, then their number."""
    lines, counts = [], {}
    for length, policy, row in averaged(data):
        counts[length] = row["tasks"], row["documents"]
        line = [_length(length), policy, _number(row["score"], ".3f"), delta(row), _number(row["read_fraction"], ".1%")]
        line += [megabytes(row["bytes_per_token"]), _number(row["error_mean"], ".4f"), _number(row["error_p99"], ".4f")]
        line += [_number(row["kl"], ".3g"), _number(row["same"], ".1%")]
        lines.append(line)
    head = ["prompt", "policy", "score", "delta", "read", "MB a token", "error", "p99", "KL", "same"]
    return f"{grid(head, lines, 'll')}\n{_counted(counts)}\n"


def _counted(counts: Mapping[int | None, tuple[int, int]]) -> str:
    """Number of tasks and documents behind the means, by length if these differ."""
    said = {length: f"{tasks} tasks and {documents} documents" for length, (tasks, documents) in counts.items()}
    if len(set(said.values())) == 1:
        return f"Means over {next(iter(said.values()))}{' at each length' * (len(said) > 1)}."
    return f"Means over {', '.join(f'{text} at {_length(length)}' for length, text in said.items())}."


def megabytes(count: float | None) -> str:
    """Bytes in units of 10^6."""
    return _number(None if count is None else count / 1e6, ".2f")


_BLOCKS: Final = ("16", "32", "64", "128")


def pareto_front(rows: Mapping[str, Row], among: Collection[str], cost: str = "bytes_per_token") -> set[str]:
    """The policies of `among` that no other one dominates: at least as good in score and cost, and better in one.

    Args:
        rows: by policy, for one length, from `averaged`.
    """

    def beaten(one: Row, by: Row) -> bool:
        a, b = ((row["score"], -row[cost]) for row in (one, by))
        return b != a and b[0] >= a[0] and b[1] >= a[1]

    return {policy for policy in among if not any(beaten(rows[policy], rows[other]) for other in among)}


def yardstick(policy: str) -> bool:
    """Whether the policy reads everything to decide, so that its bytes are no cost of serving."""
    return policy.startswith(("oracle", "labels"))


def pareto(data: dict[str, Any]) -> str:
    """A line per policy, ordered by reads: score and reads at every length. Yardsticks are left out."""
    cells = {(policy, length): row for length, policy, row in averaged(data) if row["read_fraction"] is not None}
    lengths = [length for policy, length in cells if policy == FULL]
    policies = [policy for policy in dict.fromkeys(policy for policy, _ in cells) if not yardstick(policy)]
    policies.sort(key=lambda policy: [cells[policy, at]["read_fraction"] for at in lengths if (policy, at) in cells])
    lines = []
    for policy in policies:
        found = [cells.get((policy, at)) for at in lengths]
        shown = [
            [f"{row['score']:.3f}", delta(row), f"{row['read_fraction']:.1%}"] if row else [""] * 3 for row in found
        ]
        lines.append([policy, *(cell for three in shown for cell in three)])
    head = [cell for at in lengths for cell in (f"score at {_length(at)}", "delta", "read")]
    return grid(["policy", *head], lines, "l")


def family(policy: str) -> str:
    """A spec without the numbers that set how much it reads: "fixed:32" for "fixed:32:0.05"."""
    return ":".join(part for part in policy.split(":") if part in _BLOCKS or not part.lstrip(".")[:1].isdigit())


def averaged(data: dict[str, Any]) -> list[tuple[int | None, str, Row]]:
    """(length, policy, means over tasks), including the interval of the mean delta.

    Means cover the tasks that all policies with rows at this length have; means over different tasks are not
    comparable.
    """
    out = []
    for length in sorted({row["length"] for row in data["rows"]}, key=lambda length: length or 0):
        here = [row for row in data["rows"] if row["length"] == length]
        full = {row["task"]: row for row in here if row["policy"] == FULL}
        tasks = set(full).intersection(
            *({row["task"] for row in here if row["policy"] == policy} for policy in {row["policy"] for row in here})
        )
        for policy in _policies(data):
            rows = [row for row in here if row["policy"] == policy and row["task"] in tasks]
            if not rows:
                continue
            found: Row = {"tasks": len(rows), "documents": sum(map(_documents, rows))}
            for name in ("score", "delta", "read_fraction", "bytes_per_token", "error_mean", "error_p99", "kl", "same"):
                values = [row[name] for row in rows if row[name] is not None]
                found[name] = float(np.mean(values)) if values else None
            # Each task draws its documents with its own seed; else all tasks would draw alike.
            deltas = [
                stats.resampled_deltas(
                    row["samples"],
                    full[row["task"]]["samples"],
                    row["documents"],
                    row["measure"],
                    data["seed"] + number,
                )
                for number, row in enumerate(sorted(rows, key=lambda row: str(row["task"])))
            ]
            drawn = [delta for delta in deltas if delta is not None]
            found["delta_low"], found["delta_high"] = (
                stats.interval(np.mean(drawn, axis=0)) if len(drawn) == len(rows) else (None, None)
            )
            out.append((length, policy, found))
    return out


def _policies(data: dict[str, Any]) -> list[str]:
    measured = {row["policy"] for row in data["rows"]}
    return [policy for policy in (*data["policies"], OFF) if policy in measured]


def _documents(row: Row) -> int:
    return len(set(row["documents"]))


def _score(row: Row | None, intervals: bool) -> str:
    if row is None:
        return ""
    shown = f"{row['score']:.3f}" if row["score"] < 1e4 else f"{row['score']:.1e}"
    return shown + (f" ({delta(row)})" if intervals and row["policy"] != FULL else "")


def delta(row: Row) -> str:
    """The difference to `full` with its interval, if there is one; empty without `full`."""
    if row["delta"] is None:
        return ""
    low, high = row["delta_low"], row["delta_high"]
    return f"{row['delta']:+.3f}" + ("" if low is None else f" [{low:+.3f}, {high:+.3f}]")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _length(length: int | None) -> str:
    return "" if length is None else f"{length:,}"


def grid(head: Sequence[str], lines: Iterable[Sequence[str]], align: str) -> str:
    """A Markdown table. align: l or r for each column; further columns are right-aligned."""
    rule = [{"l": "---", "r": "---:"}[side] for side in align.ljust(len(head), "r")]
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, rule, *lines])


def render(draw: Callable[[dict[str, Any], Path], None], words: Sequence[str]) -> None:
    """Entry point of this module and of `plot`: `draw` every file named."""
    if not words:
        sys.exit("name one or more result files of `fluxion bench quality`")
    for path in map(Path, words):
        data = record.load(path)
        if data is None:
            sys.exit(f"there is no {path}")
        draw(data, path)


if __name__ == "__main__":
    render(lambda data, path: print(markdown(data)), sys.argv[1:])
