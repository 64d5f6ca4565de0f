"""The tables of a result file, in Markdown: `python -m fluxion_quality.table FILE`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from fluxion_sglang.scoring.serve import OFF

from . import record, stats
from .plan import FULL

Row = dict[str, Any]
Key = tuple[str | None, str]
"""Length (None: as it comes) as text, and policy."""


def markdown(data: dict[str, Any]) -> str:
    """Scores by task, then averages over tasks, then what the columns mean."""
    if not data["rows"]:
        return "No cell is measured yet.\n"
    model = f"model {data['model']['id']} ({data['model']['sha256'][:12]})"
    head = (
        f"Suite {data['suite']}, {model}, {data['samples']} samples a task, seed {data['seed']}, "
        f"dtype {data['dtype']}. {where(data)}"
    )
    rows = {(row["task"], row["length"], row["policy"]): row for row in data["rows"]}
    for row in data["rows"]:  # intervals as they are taken now, whichever version measured
        stats.compare(row, rows.get((row["task"], row["length"], FULL)), data["seed"])
    # A mean over perplexities would say nothing.
    means = [] if all(row["measure"] == "perplexity" for row in data["rows"]) else [averages(data)]
    return "\n".join([head, "", scores(data), *means, _MEANING])


def where(data: Mapping[str, Any]) -> str:
    """On what, with what and when any result file was measured: a sentence of what `record.header` wrote."""
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
    """A line a task and length, a column a policy.

    Args:
        intervals: with the difference to `full` and its interval; without, scores alone.
    """
    policies = _policies(data)
    cells = {(row["task"], row["length"], row["policy"]): row for row in data["rows"]}
    lines = []
    for task, length in sorted({(task, length) for task, length, _ in cells}, key=lambda key: (key[0], key[1] or 0)):
        found = [cells.get((task, length, policy)) for policy in policies]
        asked = max(_documents(row) for row in found if row)
        lines.append([task, _length(length), str(asked), *(_score(row, intervals) for row in found)])
    return _table(["task", "prompt", "documents", *policies], lines, 1)


def averages(data: dict[str, Any]) -> str:
    """A line a length and policy: means over the tasks that every policy here has at this length; then how many."""
    lines, counts = [], {}
    for length, policy, row in averaged(data):
        counts[length] = row["tasks"], row["documents"]
        line = [_length(length), policy, _number(row["score"], ".3f"), delta(row), _number(row["read_fraction"], ".1%")]
        line += [megabytes(row["bytes_per_token"]), _number(row["error_mean"], ".4f"), _number(row["error_p99"], ".4f")]
        line += [_number(row["kl"], ".3g"), _number(row["same"], ".1%")]
        lines.append(line)
    head = ["prompt", "policy", "score", "delta", "read", "MB a token", "error", "p99", "KL", "same"]
    return f"{_table(head, lines, 2)}\n{_counted(counts)}\n"


def _counted(counts: Mapping[int | None, tuple[int, int]]) -> str:
    """Over how many tasks and documents means are taken; by length where these differ."""
    said = {length: f"{tasks} tasks and {documents} documents" for length, (tasks, documents) in counts.items()}
    if len(set(said.values())) == 1:
        return f"Means over {next(iter(said.values()))}{' at each length' * (len(said) > 1)}."
    return f"Means over {', '.join(f'{text} at {_length(length)}' for length, text in said.items())}."


def megabytes(count: float | None) -> str:
    """Bytes in units of 10^6."""
    return _number(None if count is None else count / 1e6, ".2f")


_BLOCKS: Final = ("16", "32", "64", "128")


def pareto_front(rows: Mapping[str, Row], among: Collection[str], cost: str = "bytes_per_token") -> set[str]:
    """Of the policies `among` those that none of them beats in score or cost without losing in the other.

    Args:
        rows: of one length, as `averaged` makes them, by policy.
    """

    def beaten(one: Row, by: Row) -> bool:
        a, b = ((row["score"], -row[cost]) for row in (one, by))
        return b != a and b[0] >= a[0] and b[1] >= a[1]

    return {policy for policy in among if not any(beaten(rows[policy], rows[other]) for other in among)}


def yardstick(policy: str) -> bool:
    """Whether the policy reads everything to decide: its bytes are no cost of serving."""
    return policy.startswith(("oracle", "labels"))


def pareto(data: dict[str, Any]) -> str:
    """A line a policy, the least reads first: score and reads at every length. Without yardsticks."""
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
    return _table(["policy", *head], lines, 1)


def family(policy: str) -> str:
    """What is left of a spec without the numbers that set how much it reads: "fixed:32" of "fixed:32:0.05"."""
    return ":".join(part for part in policy.split(":") if part in _BLOCKS or not part.lstrip(".")[:1].isdigit())


def least_reads(data: dict[str, Any], share: float) -> str:
    """What families of policies have to read to have this share of the score of `full`: a line a length and task; then
    over the tasks where every family gets there, with a setting of each task's own, with one that is enough in each of
    them, and with one that is enough in their mean; then with one that is enough in the mean of all tasks.

    A family's setting is the member that reads least such that it, and all that read more, have enough: one that is
    lucky with few samples says nothing. "none" where the one that reads most has less. *Less* is by how much a family
    reads less than the first.
    """
    lines = []
    kinds = list(dict.fromkeys(family(policy) for policy in _policies(data) if family(policy) != policy))
    for length in sorted({row["length"] for row in data["rows"]}, key=lambda length: length or 0):
        tasks: dict[str, _Rows] = {}
        for row in data["rows"]:
            if row["length"] == length:
                tasks.setdefault(row["task"], {})[row["policy"]] = row
        settings: dict[str, list[_Setting | None]] = {
            task: [_setting([rows], kind, share) for kind in kinds] for task, rows in tasks.items()
        }
        good = [task for task, found in settings.items() if None not in found]
        if good:
            here, these = [tasks[task] for task in good], f"these {len(good)}"
            reads = np.mean([[setting[1] for setting in settings[task] if setting] for task in good], axis=0)
            settings[f"{these}: a setting each"] = [("", float(read)) for read in reads]
            settings[f"{these}: one for each of them"] = [_setting(here, kind, share) for kind in kinds]
            settings[f"{these}: one for their mean"] = [_setting([_mean(here)], kind, share) for kind in kinds]
        everywhere = [_mean(list(tasks.values()))]
        settings["one for the mean of all"] = [_setting(everywhere, kind, share) for kind in kinds]
        for name, found in settings.items():
            line, first = [_length(length), name], found[0]
            for i, setting in enumerate(found):
                line += [setting[0], f"{setting[1]:.1%}"] if setting else ["none", ""]
                if i > 0:
                    line.append(f"{first[1] / setting[1]:.2f}x" if first and setting else "")
            lines.append(line)
    head = ["prompt", "task", *(name for i, kind in enumerate(kinds) for name in (kind, "read", *["less"] * (i > 0)))]
    return _table(head, lines, 2)


_Rows = dict[str, Row]
"""By policy."""
_Setting = tuple[str, float]
"""A policy, and what it reads."""


def _setting(tasks: Sequence[_Rows], kind: str, share: float) -> _Setting | None:
    """A family's member, and what it reads in the mean of `tasks`, by `least_reads`."""
    reads = {policy: float(np.mean([rows[policy]["read_fraction"] for rows in tasks])) for policy in tasks[0]
             if family(policy) == kind}  # fmt: skip
    best = None
    for policy in sorted(reads, key=lambda policy: -reads[policy]):
        if any(rows[policy]["score"] < share * rows[FULL]["score"] for rows in tasks):
            break
        best = policy, reads[policy]
    return best


def _mean(tasks: Sequence[_Rows]) -> _Rows:
    """Of the policies that all `tasks` have: mean scores and reads."""
    return {
        policy: {name: float(np.mean([rows[policy][name] for rows in tasks])) for name in ("score", "read_fraction")}
        for policy in tasks[0]
        if all(policy in rows for rows in tasks)
    }


def reads_at_equal_error(data: dict[str, Any]) -> str:
    """A line a length and policy of the families after the first one: what it reads, and what the first family reads at
    the same mean error, between its members by the logarithm of theirs; empty where none of them is near."""
    lines = []
    found = averaged(data)
    for length in dict.fromkeys(length for length, _, _ in found):
        rows = {
            policy: (float(np.log(row["error_mean"])), float(row["read_fraction"]))
            for at, policy, row in found
            if at == length and family(policy) != policy and row["read_fraction"] and row["error_mean"]
        }
        first = family(next(iter(rows), ""))
        errors, reads = zip(*sorted(point for policy, point in rows.items() if family(policy) == first), strict=True)
        for policy, (error, read) in rows.items():
            if family(policy) == first:
                continue
            line = [_length(length), policy, f"{np.exp(error):.4f}", f"{read:.1%}", "", ""]
            if errors[0] <= error <= errors[-1]:
                equal = float(np.interp(error, errors, reads))
                line[4:] = [f"{equal:.1%}", f"{equal / read:.2f}x"]
            lines.append(line)
    return _table(["prompt", "policy", "error", "read", "first family, same error", "less by"], lines, 2)


def averaged(data: dict[str, Any]) -> list[tuple[int | None, str, Row]]:
    """(length, policy, means over tasks), the interval of the mean delta included.

    Over the tasks that all of the policies with rows at this length have: means over different tasks say nothing.
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
            # Each task's documents are drawn by themselves: a seed a task, or they would all be drawn alike.
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
    """The difference to `full`, with its interval where it has one; empty where there is no `full`."""
    if row["delta"] is None:
        return ""
    low, high = row["delta_low"], row["delta_high"]
    return f"{row['delta']:+.3f}" + ("" if low is None else f" [{low:+.3f}, {high:+.3f}]")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _length(length: int | None) -> str:
    return "" if length is None else f"{length:,}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], words: int) -> str:
    """The first `words` columns to the left, numbers to the right."""
    rule = ["---" if i < words else "---:" for i in range(len(head))]
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, rule, *lines])


def render(draw: Callable[[dict[str, Any], Path], None], words: Sequence[str]) -> None:
    """For the commands of this module and of `plot`: `draw` every file named."""
    if not words:
        sys.exit("name one or more result files of `fluxion bench quality`")
    for path in map(Path, words):
        data = record.load(path)
        if data is None:
            sys.exit(f"there is no {path}")
        draw(data, path)


if __name__ == "__main__":
    render(lambda data, path: print(markdown(data)), sys.argv[1:])
