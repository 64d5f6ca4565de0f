"""What adaptive reads and loses round by round, gathered from its quality runs: `python benchmark/rounds.py`.

The runs themselves are larger, and of no use once the last one is published; git ignores them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import common

NAME = "adaptive_rounds.json"
RUNS = ("first", "second", "third", "fourth", "far_first", "far_second", "other_first", "other_second", "other_third")
"""Those of quality_adaptive_*.json that are gathered; `other` is a model of another shape."""

KEPT = ("task", "length", "score", "delta", "delta_low", "delta_high", "read_fraction")


def gathered(folder: Path) -> dict[str, Any]:
    """By name: what a run was, and the rows of adaptive."""
    rounds = {}
    for name in RUNS:
        data = common.load(folder / f"quality_adaptive_{name}.json")
        if data is not None:
            about = {key: data[key] for key in ("date", "commit", "machine", "versions", "model", "dtype")}
            rows = [{key: row[key] for key in KEPT} for row in data["rows"] if row["policy"] == "adaptive"]
            rounds[name] = {**about, "seed": data["seed"], "samples": data["samples"], "rows": _short(rows)}
    return rounds


def _short(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()} for row in rows]


def main() -> None:
    folder = common.RESULTS / common.machine_name()
    found = gathered(folder)
    path = folder / NAME
    before = common.load(path) or {}
    path.write_text(json.dumps({**before, **found}, separators=(",", ":")) + "\n")
    print(f"{path}: {', '.join(found)}")


if __name__ == "__main__":
    main()
