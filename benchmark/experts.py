"""Experts of a mixture in a decode step: ours in bfloat16 and 8 bits, SGLang's loop, and a plain stream of memory.

    python benchmark/experts.py            # about two minutes; needs nothing beyond what SGLang brings
    python benchmark/experts.py --quick

One layer of Qwen3-30B-A3B's shape: each row chooses 8 of 128 experts at random. A run computes several steps with
different choices, enough to read more than all caches hold. `of_stream` is the bandwidth of reading the weights over
that of a plain stream. Results go to experts.json in benchmark/results/<machine>.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import common

from fluxion_sglang import openmp

if __name__ == "__main__":
    openmp.wait_passively()  # before torch is loaded

import probe
import torch
from linears import read, run_all
from roofline import beyond_caches, error, interleave, judge, ratio, workers
from sglang.srt.layers.moe import MoeRunnerConfig
from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
from sglang.srt.layers.moe.topk import StandardTopKOutput
from torch import Tensor

from fluxion_sglang.native import NativeLayers
from fluxion_sglang.sglang.weights.rounding import FORMAT, rounded
from fluxion_sglang.weights.quantised import pack


class Shape(NamedTuple):
    """Sizes of a layer: experts, experts chosen per row, and elements of a row outside and inside an expert."""

    experts: int
    chosen: int
    hidden: int
    inner: int


FULL, ROWS = Shape(128, 8, 2048, 768), (1, 4, 16)
QUICK, QUICK_ROWS = Shape(8, 2, 256, 128), (1, 4)

Layer = Callable[[], Tensor]


def weights_of(shape: Shape) -> tuple[Tensor, Tensor]:
    """Random weights: gate and up in one tensor, and down."""
    random = torch.Generator().manual_seed(0)
    sizes = (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)
    both = [torch.randn(shape.experts, *size, generator=random).mul_(size[1] ** -0.5).bfloat16() for size in sizes]
    return both[0], both[1]


def choices(shape: Shape, rows: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Expert ids and weights of every row, for each of `count` steps."""
    random = torch.Generator().manual_seed(rows)
    drawn = torch.rand(count, rows, shape.experts, generator=random).topk(shape.chosen)
    return list(zip(drawn.indices.int().unbind(), drawn.values.softmax(-1).unbind(), strict=True))


def layers(
    native: NativeLayers, x: Tensor, chosen: Sequence[tuple[Tensor, Tensor]], plain: Sequence[Tensor], eight: Any
) -> dict[str, list[Layer]]:
    """The implementations that compute x, each as one call per step."""
    layer: Any = SimpleNamespace(num_experts=len(plain[0]), w13_weight=plain[0], w2_weight=plain[1])
    config = MoeRunnerConfig(activation="silu")
    return {
        "ours": [partial(native.experts, x, ids, w, *plain) for ids, w in chosen],
        "ours, 8 bits": [partial(native.experts, x, ids, w, *eight, (FORMAT, FORMAT)) for ids, w in chosen],
        "SGLang": [partial(moe_forward_native, layer, x, StandardTopKOutput(w, ids, x), config) for ids, w in chosen],
    }


def measure(shape: Shape, counts: Sequence[int], rounds: int, least: int) -> list[dict[str, Any]]:
    native, plain = NativeLayers(workers(0)), weights_of(shape)
    eight = [torch.stack([pack(rounded(expert)) for expert in weight]) for weight in plain]
    for weight in (*plain, *eight):
        native.into_huge_pages(weight.flatten(0, 1))
    memories = {plan: probe.host_memory(workers(0), least).fill_(1) for plan in probe.PLANS}
    found = []
    for rows in counts:
        expert = sum(weight[0].nbytes for weight in plain)
        chosen = choices(shape, rows, -(-least // (shape.chosen * expert)))
        x = torch.randn(rows, shape.hidden, generator=torch.Generator().manual_seed(rows)).bfloat16()
        every = layers(native, x, chosen, plain, eight)
        want = every["SGLang"][0]()
        contenders = {name: partial(run_all, calls) for name, calls in every.items()}
        streams = {f"stream {plan.streams}:{plan.ahead}": partial(read, memories[plan], plan) for plan in probe.PLANS}
        times = interleave(contenders | streams, rounds)
        active = sum(len(ids.unique()) for ids, _ in chosen)
        for name in every:
            nbytes = active * sum(weight[0].nbytes for weight in (eight if name == "ours, 8 bits" else plain))
            found.append(
                {
                    **shape._asdict(),
                    "rows": rows,
                    "who": name,
                    "active": round(active / len(chosen), 1),
                    "us": round(median(times[name]) / len(chosen) / 1e3, 1),
                    "over_ours": round(ratio(times[name], times["ours"]), 3),
                    "error": error(every[name][0](), want),
                    **judge(times, name, nbytes, least),
                }
            )
    return found


def main() -> None:
    args = common.arguments(__doc__, "a small layer", rounds=5).parse_args()
    torch.set_num_threads(workers(0).count)
    shape, counts, rounds = (QUICK, QUICK_ROWS, 2) if args.quick else (FULL, ROWS, args.rounds)
    least = 1 << 24 if args.quick else -(-beyond_caches(1 << 26) // probe.STREAM_PIECE) * probe.STREAM_PIECE
    rows = common.told(measure(shape, counts, rounds, least))
    common.publish(args, "experts", rows, rounds=rounds)


if __name__ == "__main__":
    main()
