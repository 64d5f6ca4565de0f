"""Decode branches of one document together: time of a step relative to a step of one branch.

    python benchmark/forks.py            # 8 branches over 32K and 128K tokens; about two minutes
    python benchmark/forks.py --quick

The branches share the document's pages and have a few tokens of their own. Their queries are either alike, as for
samples of one prompt, or independent; heads of a group are alike in both cases. With the engine's option
share_prefixes, KV that several branches read comes from memory once; without it every branch reads it. Caches are
flushed before every step, and the steps take turns. Results go to forks.json in benchmark/results/<machine>.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import common

from fluxion_sglang import openmp

if __name__ == "__main__":
    openmp.wait_passively()  # before torch is loaded

import torch
from layers import Steps, filled_pool, flushed
from roofline import Arena, beyond_caches, interleave, ratio

from fluxion_sglang.kv.placement import PAGE

DOCUMENTS = (32768, 131072)
BRANCHES = 8
OWN = 24
"""Own tokens per branch."""
POLICIES = ("fixed:16:0.05", "full")
QUERIES = {"alike": 0.2, "independent": 1.0}


def measure(
    document: int, policies: list[str], rounds: int, arena: Arena, branches: int = BRANCHES
) -> list[dict[str, Any]]:
    """One row per policy, kind of queries, and way to read a common prefix."""
    shared, own = document // PAGE, -(-(OWN + 1) // PAGE)
    ids = 1 + torch.randperm(shared + branches * own, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    tables = [torch.cat([ids[:shared], part]) for part in ids[shared:].split(own)]
    lengths = [document + OWN] * branches
    pool = filled_pool(tables, lengths)
    rows = []
    for policy in policies:
        one = Steps(pool, tables[:1], lengths[:1], policy)
        sides = {"on": True, "off": False}
        cells = {
            (kind, side): Steps(pool, tables, lengths, policy, apart=apart, sharing=sharing)
            for kind, apart in QUERIES.items()
            for side, sharing in sides.items()
        }
        contenders = {"one": partial(flushed, arena, one)}
        contenders |= {f"{kind} {side}": partial(flushed, arena, steps) for (kind, side), steps in cells.items()}
        times = interleave(contenders, rounds)
        for (kind, side), steps in cells.items():
            taken = times[f"{kind} {side}"]
            rows.append(
                {
                    "policy": policy,
                    "document": document,
                    "branches": branches,
                    "queries": kind,
                    "sharing": side,
                    "one_ms": round(median(times["one"]) / 1e6, 4),
                    "step_ms": round(median(taken) / 1e6, 4),
                    "over_one": round(ratio(taken, times["one"]), 3),
                    "error": steps.error(),
                }
            )
    return rows


def main() -> None:
    args = common.arguments(__doc__, "a document of 2K", rounds=21).parse_args()
    arena = Arena.of(1 << 24 if args.quick else beyond_caches(1 << 27), 0)
    rounds, documents = (2, (2048,)) if args.quick else (args.rounds, DOCUMENTS)
    rows = common.told(row for document in documents for row in measure(document, list(POLICIES), rounds, arena))
    common.publish(args, "forks", rows, rounds=rounds)


if __name__ == "__main__":
    main()
