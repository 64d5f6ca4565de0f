"""Cost of neighbours' policies for a request: a batch waits for its slowest task at every layer.

    python benchmark/fairness.py            # five requests of 16K tokens; about a minute
    python benchmark/fairness.py --quick

One request has a sparse policy; four neighbours have the policy of the row. A run is a decode step of one layer in the
shape of Llama-3.1-8B, including planning. Batches take turns. Results go to fairness.json in
benchmark/results/<machine>.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import common

from fluxion_sglang import openmp

if __name__ == "__main__":
    openmp.wait_passively()  # before torch is loaded

import torch
from layers import HEAD_DIM, Q_HEADS, SCALE, filled_pool, own_pages
from roofline import KV_HEADS, interleave, ratio

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.executor.decode import DecodeEngine
from fluxion_sglang.executor.host import HostDevice
from fluxion_sglang.kv.host_pool import HostPool
from fluxion_sglang.kv.windows import Windows
from fluxion_sglang.policy import parse_spec

TOKENS = 16384
OTHERS = 4
OWN = "fixed:16:0.05"
BESIDE = (OWN, "full", common.SKETCH, "hgca", "hgca:0", "psa:0.95", "psa:0.9999999:16:quest")
BESIDE += ("lfps", "lfps:1:1e-9:1e-9")


class Batch:
    """A request and, if `beside` names a policy, neighbours under it; every step decodes a token of each."""

    def __init__(self, pool: HostPool, tables: list[torch.Tensor], tokens: int, beside: str | None) -> None:
        count = 1 if beside is None else len(tables)
        own, other = parse_spec(OWN), parse_spec(beside or OWN)
        self.policies = [own, *[other] * (count - 1)]
        self.windows = Windows(pool, count, "cpu")
        self.engine = DecodeEngine(
            pool, self.windows, own, [], FluxionConfig(), q_heads=Q_HEADS, max_requests=count, max_tokens=tokens + 256
        )
        self.device = HostDevice(pool, self.windows, self.engine)
        self.table = torch.stack(tables[:count])
        self.length = tokens
        for row in range(count):
            self.windows.heal(row, tokens, self.table[row])
        self.random = torch.Generator().manual_seed(0)

    def run(self) -> int:
        """Nanoseconds of the next step."""
        count = len(self.policies)
        self.length += 1
        q = torch.randn(count, Q_HEADS, HEAD_DIM, generator=self.random).to(torch.bfloat16)
        k, v = (torch.randn(count, KV_HEADS, HEAD_DIM, generator=self.random).to(torch.bfloat16) for _ in range(2))
        start = time.perf_counter_ns()
        lengths = torch.full((count,), self.length)
        self.engine.begin_step(torch.arange(count), lengths, self.table, self.policies)
        self.device.decode(0, q, k, v, SCALE)
        return time.perf_counter_ns() - start


def measure(tokens: int, rounds: int) -> list[dict[str, Any]]:
    """One row per policy of the neighbours."""
    lengths = [tokens + rounds + 2] * (OTHERS + 1)
    tables = own_pages(lengths)
    pool = filled_pool(tables, lengths, sketched=True)
    batches = {spec: Batch(pool, tables, tokens, spec) for spec in (None, *BESIDE)}
    times = interleave({spec or "alone": batch.run for spec, batch in batches.items()}, rounds)
    return [
        {
            "policy": spec,
            "tokens": tokens,
            "others": OTHERS,
            "alone_ms": round(median(times["alone"]) / 1e6, 3),
            "step_ms": round(median(times[spec]) / 1e6, 3),
            "over_alone": round(ratio(times[spec], times["alone"]), 2),
            "over_alike": round(ratio(times[spec], times[OWN]), 2),
        }
        for spec in BESIDE
    ]


def main() -> None:
    args = common.arguments(__doc__, "1K tokens", rounds=31).parse_args()
    tokens, rounds = (1024, 2) if args.quick else (TOKENS, args.rounds)
    common.publish(args, "fairness", common.told(measure(tokens, rounds)), own=OWN, rounds=rounds)


if __name__ == "__main__":
    main()
