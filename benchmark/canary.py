"""Cost of the option `canary`: decode steps of a layer and writes of a prompt with and without it, interleaved.

    python benchmark/canary.py             # two minutes
    python benchmark/canary.py --quick

The shape is a layer of Llama-3.1-8B in bfloat16. Results go to canary.json in benchmark/results/<machine>.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

import common

from fluxion_sglang import openmp

if __name__ == "__main__":
    openmp.wait_passively()  # before torch is loaded

import torch
from layers import HEAD_DIM, Steps, filled_pool, own_pages
from roofline import KV_HEADS, interleave, ratio

from fluxion_sglang.kv.host_pool import HostPool

SHARES = (0.0, 0.01, 0.1, 1.0)
WORK = ((1, 16384, "full"), (8, 16384, "full"), (8, 16384, "fixed:16:0.1"))
QUICK_WORK = ((2, 2048, "full"),)
WRITTEN = 2048
"""Tokens per write."""


def write(pool: HostPool, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    start = time.perf_counter_ns()
    pool.append(0, pages, 0, k, v)
    return time.perf_counter_ns() - start


def measure(batch: int, length: int, policy: str, rounds: int) -> list[dict[str, Any]]:
    lengths = [length] * batch
    tables = own_pages(lengths)
    pools = {share: filled_pool(tables, lengths, canary=share) for share in SHARES}
    steps = {share: Steps(pool, tables, lengths, policy) for share, pool in pools.items()}
    decoded = interleave({str(share): step.run for share, step in steps.items()}, rounds)
    count = min(WRITTEN, length)
    k, v = (torch.randn(count, KV_HEADS, HEAD_DIM).to(torch.bfloat16) for _ in range(2))
    written = interleave({str(share): partial(write, pool, tables[0], k, v) for share, pool in pools.items()}, rounds)
    found = []
    for share in SHARES:
        for what, times in (("decode step of a layer", decoded), (f"write of {count} tokens", written)):
            found.append(
                {
                    "batch": batch,
                    "length": length,
                    "policy": policy,
                    "what": what,
                    "canary": share,
                    "us": round(median(times[str(share)]) / 1e3, 1),
                    "throughput": round(ratio(times["0.0"], times[str(share)]), 4),
                }
            )
    return found


def main() -> None:
    args = common.arguments(__doc__, "little work", rounds=101).parse_args()
    work, rounds = (QUICK_WORK, 5) if args.quick else (WORK, args.rounds)
    rows = common.told(row for of in work for row in measure(*of, rounds))
    common.publish(args, "canary", rows, rounds=rounds)


if __name__ == "__main__":
    main()
