"""The table of locality.py: what caches of tiles would leave to be read of the host, and whether that is little."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rendering import link, nothing, result_files, table, where

CACHES = {"clock": "CLOCK", "lru": "LRU", "s3fifo": "S3-FIFO"}
SHARE = 0.15
MOST = 0.03
"""A cache of SHARE of the middle's tiles is worth building where at most this share of them is missed in a step."""
DECIDES = "gemma3"
"""The model whose longest window decides."""
Rows = list[dict[str, Any]]


def locality(results: Path) -> str:
    """A line a model, window, policy and way to choose; and for which policies a cache is worth building."""
    out = []
    for path, data in result_files(results, "locality.json"):
        rows = data["rows"]
        kept = sorted({row["kept"] for row in rows if row["kept"] > 1})
        lines = []
        for own in _alike(rows, "model", "tokens", "policy", "way"):
            row = _at(own, kept=1)
            enough = [one["share"] for one in own if one["kept"] == 1 and _best(one) <= MOST]
            lines.append(
                [
                    *(row["model"], f"{row['tokens']:,}", f"`{row['policy']}`", row["way"], f"{row['read']:.1%}"),
                    *(f"{row[f'{cache}_missed']:.1%} ({row[f'{cache}_hit']:.0%})" for cache in CACHES),
                    f"{max(0.0, row['read'] - SHARE):.1%}",
                    f"{min(enough):.0%}" if enough else f"over {max(one['share'] for one in own):.0%}",
                    *(f"{_best(_at(own, kept=steps)):.1%}" for steps in kept),
                ]
            )
        head = [
            "model",
            "window",
            "policy",
            "choice",
            "read in a step",
            *(f"missed (hits), {c}" for c in CACHES.values()),
        ]
        head += ["missed at the least", f"cache for {MOST:.0%}", *(f"kept {steps} steps" for steps in kept)]
        note = (
            f"Shares of the middle's tiles, of all layers that attend to everything; caches hold {SHARE:.0%} of them. "
            "*union*: a group reads what any of its heads chose. *once*: it chooses for all of them. *at the least*: "
            f"no cache hits more tiles in a step than it holds. *kept*: the best of the caches. {data['steps']} steps, "
            f"of which the first {data['warm']} do not count. {where(data)} [Data]({link(path)})."
        )
        out.append(f"{table(head, lines, 'lrll' + 'r' * (len(head) - 4))}\n{_verdict(rows)}\n\n{note}\n")
    return "\n".join(out) or nothing("locality.py")


def _verdict(rows: Rows) -> str:
    """For which policies a cache is worth building, as they choose, and what else would have to change."""
    rows = [row for row in rows if row["model"] == DECIDES and row["share"] == SHARE]
    if not rows:
        return f"Not decided yet: {DECIDES} decides, and has not been measured."
    tokens = max(row["tokens"] for row in rows)
    found: dict[bool, list[str]] = {True: [], False: []}
    for own in _alike([row for row in rows if row["tokens"] == tokens], "policy"):
        best = _best(_at(own, kept=1, way="union"))
        text = f"`{own[0]['policy']}` ({best:.1%} missed"
        others = [f"{row['way']}, kept {row['kept']}" for row in own if _best(row) <= MOST]
        if best > MOST:
            text += f"; a go with {' or '.join(others)}" if others else "; no other choice is a go"
        found[best <= MOST].append(f"{text})")
    return (
        " ".join(
            f"**{name}** for {', '.join(found[go])}." for go, name in ((True, "Go"), (False, "No-go")) if found[go]
        )
        + f" A go is at most {MOST:.0%} missed with the best cache of {SHARE:.0%}, as the policy chooses; {DECIDES} at "
        f"{tokens:,} tokens decides."
    )


def _alike(rows: Rows, *keys: str) -> Iterator[Rows]:
    """The rows that agree in these, group by group."""
    for cell in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        yield [row for row in rows if tuple(row[key] for key in keys) == cell]


def _at(rows: Rows, **wanted: Any) -> dict[str, Any]:
    """The row with these values at the share that decides."""
    wanted["share"] = SHARE
    return next(row for row in rows if all(row[key] == value for key, value in wanted.items()))


def _best(row: dict[str, Any]) -> float:
    return min(float(row[f"{cache}_missed"]) for cache in CACHES)


LOCALITY_TABLES: dict[str, Callable[[Path], str]] = {"locality": locality}
