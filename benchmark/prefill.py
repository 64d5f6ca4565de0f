"""Attention of a whole prompt: ours, torch's, and the rate of torch's matrix products, interleaved in one process.

    python benchmark/prefill.py            # about ten minutes on two cores, nearly all of it torch's attention
    python benchmark/prefill.py --quick

A prompt is one causal chunk in bfloat16, with two KV heads and four query heads each. Rates count 4 D operations for
each query and each key up to its own position, also where a sparse prefill skips keys. Errors compare 64 queries with
float64, except for sparse prefills, whose errors on random keys mean nothing. Results go to prefill.json in
benchmark/results/<machine>.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import Any

import common

from fluxion_sglang import openmp

if __name__ == "__main__":
    openmp.wait_passively()  # before torch is loaded

import torch
from roofline import error, interleave, ratio, workers
from torch import Tensor

from fluxion_sglang.executor.merge import attention_with_lse
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.native import NativePool

KV_HEADS, GROUP = 2, 4
LENGTHS, HEAD_DIMS, QUICK_LENGTHS = (4096, 16384, 32768), (64, 128), (1024,)
BUDGETS = (0.5, 0.3, 0.15)
"""Budgets of sparse prefills."""
MATRIX = 4096


@dataclass
class Prompt:
    """q: [T, Hq, D]. k, v: [T, H, D]."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(cls, tokens: int, head_dim: int) -> Prompt:
        random = torch.Generator().manual_seed(tokens)
        heads = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
        return cls(*(torch.randn(tokens, count, head_dim, generator=random).to(torch.bfloat16) for count in heads))

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    @property
    def operations(self) -> float:
        tokens, heads, dim = self.q.shape
        return 2.0 * tokens * (tokens + 1) * heads * dim

    def exact(self, at: Tensor) -> Tensor:
        """Outputs of the queries `at` in float64."""
        outputs = []
        for t in at.tolist():
            k, v = (x[: t + 1].double().transpose(0, 1) for x in (self.k, self.v))
            q = self.q[t].double().view(KV_HEADS, GROUP, -1)
            outputs.append((torch.softmax(q @ k.transpose(1, 2) * self.scale, -1) @ v).flatten(0, 1))
        return torch.stack(outputs)


class Ours:
    """The chunk as a server computes it: append KV to the pool, then attend to it."""

    def __init__(self, prompt: Prompt) -> None:
        tokens, _, dim = prompt.k.shape
        self._prompt, pages = prompt, -(-tokens // PAGE)
        self._pool = NativePool(
            workers(0),
            layers=1,
            kv_heads=KV_HEADS,
            pages=pages + 1,
            head_dim=dim,
            dtype=torch.bfloat16,
            sink_pages=4,
        )
        self._pages = (torch.randperm(pages) + 1).to(torch.int32)
        self.out, self.read = torch.empty_like(prompt.q), 1.0

    def run(self, budget: float) -> Tensor:
        of = self._prompt
        self._pool.append(0, self._pages, 0, of.k, of.v)
        self.read = self._pool.attend_chunk(0, self._pages, 0, of.q, of.scale, self.out, budget)
        return self.out


def timed(run: Callable[[], Any]) -> int:
    start = perf_counter_ns()
    run()
    return perf_counter_ns() - start


def measure(prompt: Prompt, rounds: int) -> list[dict[str, Any]]:
    ours = Ours(prompt)
    square = torch.randn(MATRIX, MATRIX).to(torch.bfloat16)
    k, v = prompt.k.transpose(0, 1), prompt.v.transpose(0, 1)
    runs: dict[str, Callable[[], Tensor]] = {
        "full": partial(ours.run, 1.0),
        **{f"sparse, {budget:g}": partial(ours.run, budget) for budget in BUDGETS},
        "torch": lambda: attention_with_lse(prompt.q, k, v, prompt.scale, causal=True)[0],
    }
    at = torch.randperm(len(prompt.q), generator=torch.Generator().manual_seed(1))[:64]
    exact = prompt.exact(at)
    errors = {name: error(runs[name]()[at], exact) for name in ("full", "torch")}
    read = {}
    for budget in BUDGETS:
        ours.run(budget)
        read[f"sparse, {budget:g}"] = round(ours.read, 3)
    contenders = {name: partial(timed, run) for name, run in runs.items()}
    times = interleave(contenders | {"matrix": partial(timed, partial(torch.mm, square, square))}, rounds)
    matrix = 2.0 * MATRIX**3 / median(times["matrix"])
    found = []
    for name in runs:
        rate = prompt.operations / median(times[name])
        found.append(
            {
                "tokens": len(prompt.q),
                "head_dim": prompt.q.shape[2],
                "peer": name,
                "ms": round(median(times[name]) / 1e6, 1),
                "gflop_per_s": round(rate, 1),
                "of_matrix": round(ratio(times["matrix"], times[name]) * prompt.operations / (2.0 * MATRIX**3), 3),
                "over_full": round(ratio(times[name], times["full"]), 3),
                "read": read.get(name, 1.0),
                "error": errors.get(name),
                "matrix_gflop_per_s": round(matrix, 1),
            }
        )
    return found


def main() -> None:
    args = common.arguments(__doc__, "short prompts", rounds=3).parse_args()
    torch.set_num_threads(workers(0).count)
    prompts = [(tokens, dim) for tokens in (QUICK_LENGTHS if args.quick else LENGTHS) for dim in HEAD_DIMS]
    rows = common.told(row for size in prompts for row in measure(Prompt.random(*size), args.rounds))
    common.publish(args, "prefill", rows, rounds=args.rounds)


if __name__ == "__main__":
    main()
