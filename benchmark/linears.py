"""Linear layers of a decode step: ours, a stream of memory, and other libraries, interleaved in one process.

    python benchmark/linears.py            # about three minutes; needs nothing beyond what SGLang brings
    python benchmark/linears.py --quick

Weights are bfloat16 in huge pages, as in a server with the flag, and packed where the server packs them. A run
multiplies several copies, which together exceed all caches. The stream reads as many bytes with the fastest plan
(`probe.PLANS`). Peers multiply the same rows: torch's linear, oneDNN with weights packed beforehand, and llama.cpp's
ggml_mul_mat if llama-cpp-python is installed. Our layers with 8-bit and 4-bit weights take part, with enough copies to
exceed the caches; their `of_stream` counts their own bytes. Results go to linears.json in benchmark/results/<machine>.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import common

from fluxion_sglang import openmp

if __name__ == "__main__":
    openmp.wait_passively()  # before torch is loaded

import probe
import torch
from foreign import GgmlLinear
from peers import installed
from roofline import beyond_caches, error, interleave, isas, judge, ratio, workers
from torch import Tensor
from torch.nn import functional as F

from fluxion_sglang.native import NativeLayers
from fluxion_sglang.weights.quantised import Format, Quantised, pack, slices

SHAPES = ((2816, 1024), (1024, 2816), (4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (128256, 4096))
"""Outputs and inputs of layers: of a model with 111 million parameters, and of Llama-3.1-8B."""
ROWS = (1, 2, 4, 8, 16, 32)
QUICK_SHAPES, QUICK_ROWS = ((1024, 512),), (1, 4)

FORMATS = {"ours, 8 bits": Format(8, 32, minima=False), "ours, 4 bits": Format(4, 32, minima=True)}
"""Format that fluxion-int8 produces, and the one of most GGUF files."""

Layer = Callable[[], Tensor]


def copies_of(weight: Tensor, count: int) -> list[Tensor]:
    found = [weight.clone() for _ in range(count)]
    for copy in found:
        NativeLayers.into_huge_pages(copy)
    return found


def packed(native: NativeLayers, weights: list[Tensor]) -> list[Tensor]:
    """Packed copies of the weights; the weights themselves if a server leaves them unpacked."""
    if not native.gains_from_packing(weights[0]):
        return weights
    found = copies_of(weights[0], len(weights))
    for copy in found:
        native.repack(copy)
    return found


def layers(native: NativeLayers, own: Sequence[Tensor], weights: Sequence[Tensor], x: Tensor) -> dict[str, list[Layer]]:
    """Implementations of x weights^T, one call per copy of the weights. own: copies for ours, packed or not."""
    order = None if own is weights else torch.ones(1, dtype=torch.int32)
    found: dict[str, list[Layer]] = {
        "ours": [partial(native.linear, x, w, order=order) for w in own],
        "torch": [partial(F.linear, x, w) for w in weights],
    }
    if hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        packed = [torch.ops.mkldnn._reorder_linear_weight(w, len(x)) for w in weights]
        found["oneDNN, packed"] = [
            partial(torch.ops.mkldnn._linear_pointwise, x, w, None, "none", [], "") for w in packed
        ]
    if installed("ggml"):
        found["ggml mul_mat"] = [GgmlLinear(x, w) for w in weights]
    return found


def quantised(
    native: NativeLayers, weight: Tensor, x: Tensor, least: int
) -> dict[str, tuple[Tensor, int, list[Layer]]]:
    """By format: the first 4,096 outputs of the weight in use (float32), the weight's bytes, and a layer for each
    copy."""
    found = {}
    for name, form in FORMATS.items():
        made = [grid(weight[rows], form) for rows in slices(*weight.shape)]
        packed = torch.cat([pack(part) for part in made])
        copies = copies_of(packed, -(-least // packed.nbytes))
        layer = partial(native.linear_quantised, x, form=form, outputs=len(weight))
        found[name] = grid(weight[:4096], form).wide(), packed.nbytes, [partial(layer, weights=copy) for copy in copies]
    return found


def grid(weight: Tensor, form: Format) -> Quantised:
    """The weight quantised per group: between its minimum and maximum, or symmetric around 0."""
    groups = weight.float().unflatten(1, (-1, form.group))
    if form.minima:
        least = groups.amin(-1)
        scales = (groups.amax(-1) - least) / 15
        integers = ((groups - least.unsqueeze(-1)) / scales.unsqueeze(-1)).round().clamp(0, 15).to(torch.uint8)
        return Quantised(integers.flatten(1), scales, least, form)
    scales = groups.abs().amax(-1) / 127
    integers = (groups / scales.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8)
    return Quantised(integers.flatten(1), scales, None, form)


def run_all(calls: Sequence[Layer]) -> int:
    start = time.perf_counter_ns()
    for call in calls:
        call()
    return time.perf_counter_ns() - start


def measure(outputs: int, inputs: int, rows: Sequence[int], rounds: int, least: int) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(outputs + inputs)
    copies = -(-least // (outputs * inputs * 2))
    weight = torch.randn(outputs, inputs, generator=random).to(torch.bfloat16)
    weights = copies_of(weight, copies)
    native = NativeLayers(workers(0))
    own = packed(native, weights)
    # Each plan has its own memory, so that no stream finds data of the previous one in a cache.
    memories = {plan: probe.host_memory(workers(0), least).fill_(1) for plan in probe.PLANS}
    found = []
    for count in rows:
        x = torch.randn(count, inputs, generator=random).to(torch.bfloat16)
        every = layers(native, own, weights, x)
        exact = x.double() @ weight[:4096].double().T
        errors = {name: error(calls[0]()[:, :4096], exact) for name, calls in every.items()}
        few_bits = quantised(native, weight, x, least)
        for name, (wide, _, calls) in few_bits.items():
            every[name] = calls
            errors[name] = error(calls[0]()[:, :4096], x.double() @ wide[:4096].double().T)
        contenders = {name: partial(run_all, calls) for name, calls in every.items()}
        streams = {f"stream {plan.streams}:{plan.ahead}": partial(read, memories[plan], plan) for plan in probe.PLANS}
        times = interleave(contenders | streams, rounds)
        nbytes = copies * weight.nbytes
        ours = judge(times, "ours", nbytes, least)
        for name, calls in every.items():
            each = median(times[name]) / len(calls)
            read_bytes = few_bits[name][1] if name in few_bits else weight.nbytes
            speed = {"gb_per_s": round(read_bytes / each, 2), "of_stream": round(read_bytes / each / ours["stream"], 4)}
            found.append(
                {
                    "outputs": outputs,
                    "inputs": inputs,
                    "rows": count,
                    "peer": name,
                    "us": round(each / 1e3, 1),
                    "over_ours": round(ratio(times[name], times["ours"]) * copies / len(calls), 3),
                    "error": errors[name],
                    **({**ours, "packed": own is not weights} if name == "ours" else speed),
                }
            )
    return found


def read(memory: Tensor, plan: probe.ReadPlan) -> int:
    return probe.stream(workers(0), isas()[-1], memory, plan)[0][0]


def main() -> None:
    args = common.arguments(__doc__, "one small layer", rounds=9).parse_args()
    torch.set_num_threads(workers(0).count)
    shapes, counts, rounds = (QUICK_SHAPES, QUICK_ROWS, 2) if args.quick else (SHAPES, ROWS, args.rounds)
    least = 1 << 24 if args.quick else -(-beyond_caches(1 << 26) // probe.STREAM_PIECE) * probe.STREAM_PIECE
    rows = common.told(row for shape in shapes for row in measure(*shape, counts, rounds, least))
    common.publish(args, "linears", rows, rounds=rounds)


if __name__ == "__main__":
    main()
