"""The same attention by other implementations, interleaved with ours in one process.

    python benchmark/peers.py            # about a minute; needs nothing beyond what SGLang brings
    python benchmark/peers.py --quick

There are two kinds of work, in the shape of a layer of Llama-3.1-8B: the pages that every group of a batch selected,
and a whole context. Each peer gets KV in its preferred layout, prepared beforehand. "with gather" includes the copy of
the selected pages into that layout, which is unavoidable when every step selects anew. Peers take part if they are
installed: torch, SGLang's torch_native backend, onnxruntime with onnx for its GroupQueryAttention, and llama-cpp-python
for llama.cpp's ggml_flash_attn_ext. Results go to peers.json in benchmark/results/<machine>.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from typing import Any

import common

from fluxion_sglang import openmp

if __name__ == "__main__":
    openmp.wait_passively()  # before torch is loaded

import probe
import torch
from foreign import GgmlAttention, OnnxAttention
from roofline import (
    KV_HEADS,
    Arena,
    beyond_caches,
    error,
    exact_attention,
    interleave,
    isas,
    page_lists,
    queries,
    ratio,
    workers,
)
from torch import Tensor
from torch.nn import functional as F

from fluxion_sglang.kv.placement import PAGE

GROUP, HEAD_DIM = 4, 128
SCALE = HEAD_DIM**-0.5


@dataclass
class Work:
    """Attention of B requests: q [B, H, G, D], and the tiles that each group reads. All groups read the same number."""

    arena: Arena
    tasks: probe.TaskList
    q: Tensor
    batch: int
    what: str

    @classmethod
    def of(cls, arena: Arena, context: int, budget: float) -> Work:
        """budget: share of the context; 1: the whole context in one run."""
        tile_bytes = 2 * PAGE * HEAD_DIM * 2
        dense = budget == 1
        lists = page_lists(arena, tile_bytes, context, budget, 0 if dense else 16)
        batch = max(lists.tasks // KV_HEADS, 1)
        ids = lists.pieces.view(lists.tasks, -1)
        ids = ids[torch.arange(batch * KV_HEADS) % lists.tasks]
        tasks = probe.TaskList.of(list(ids))
        q = queries(tasks.tasks, GROUP, HEAD_DIM, torch.bfloat16).view(batch, KV_HEADS, GROUP, HEAD_DIM)
        share = "" if dense else f"{budget:.0%} of "
        return cls(arena, tasks, q, batch, f"{share}{context // 1024}K, {batch} requests")

    @cached_property
    def tiles(self) -> Tensor:
        return self.arena.pieces(2, PAGE, HEAD_DIM, dtype=torch.bfloat16)

    @property
    def nbytes(self) -> int:
        return len(self.tasks.pieces) * self.tiles[0].nbytes

    def gather(self, k: Tensor, v: Tensor) -> None:
        """Copy the tiles that are read into k, v [B, H, n, D]."""
        for part, to in enumerate((k, v)):
            torch.index_select(self.tiles[:, part], 0, self.tasks.pieces, out=to.view(-1, PAGE, HEAD_DIM))

    @cached_property
    def kv(self) -> tuple[Tensor, Tensor]:
        size = (self.batch, KV_HEADS, len(self.tasks.pieces) // self.tasks.tasks * PAGE, HEAD_DIM)
        k, v = torch.empty(size, dtype=torch.bfloat16), torch.empty(size, dtype=torch.bfloat16)
        self.gather(k, v)
        return k, v

    def error(self, o: Tensor) -> float:
        """Error of the first group; o [B, H, G, D]."""
        k, v = self.kv
        return error(o[0, 0], exact_attention(self.q[0, 0], k[0, 0], v[0, 0], SCALE))


Peer = Callable[[], Tensor]
"""Computes the work; returns o [B, H, G, D]."""


def sdpa(work: Work, dtype: torch.dtype, *, gather: bool = False, fold: bool = True) -> Peer:
    """torch's attention; fold: the heads of a group are queries of one head. Otherwise torch's enable_gqa handles
    groups."""
    B, q = work.batch, work.q.to(dtype)
    if not fold:
        q = q.view(B, KV_HEADS * GROUP, 1, HEAD_DIM)
    own = tuple(part.clone() for part in work.kv)
    k, v = (part.to(dtype) for part in own)

    def run() -> Tensor:
        if gather:
            work.gather(*own)
            if dtype != torch.bfloat16:
                for part, to in zip(own, (k, v), strict=True):
                    to.copy_(part)
        o = F.scaled_dot_product_attention(q, k, v, scale=SCALE, enable_gqa=not fold)
        return o.view(B, KV_HEADS, GROUP, HEAD_DIM)

    return run


def torch_native(work: Work) -> Peer:
    """Decode function of SGLang's backend torch_native, which gathers tokens from a pool [tokens, H, D] itself."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    backend = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
    k, v = work.kv
    B, n = work.batch, k.shape[2]
    # The selected pages are scattered in SGLang's pool too.
    places = torch.randperm(B * n // PAGE, generator=torch.Generator().manual_seed(0))
    slots = (places[:, None] * PAGE + torch.arange(PAGE)).view(B, n)
    pools = []
    for part in (k, v):
        pool = torch.empty(B * n, KV_HEADS, HEAD_DIM, dtype=part.dtype)
        pool[slots.flatten()] = part.transpose(1, 2).reshape(B * n, KV_HEADS, HEAD_DIM)
        pools.append(pool)
    q = work.q.view(B, KV_HEADS * GROUP, HEAD_DIM)
    out = torch.empty_like(q)
    lengths, rows = torch.full((B,), n), torch.arange(B)

    def run() -> Tensor:
        backend._run_sdpa_forward_decode(
            q, out, *pools, slots, rows, lengths, scaling=SCALE, enable_gqa=True, causal=False
        )
        return out.view(B, KV_HEADS, GROUP, HEAD_DIM)

    return run


PEERS: dict[str, Callable[[Work], Peer]] = {
    "sdpa bf16": lambda work: sdpa(work, torch.bfloat16),
    "sdpa bf16, enable_gqa": lambda work: sdpa(work, torch.bfloat16, fold=False),
    "sdpa bf16, with gather": lambda work: sdpa(work, torch.bfloat16, gather=True),
    "sdpa f32": lambda work: sdpa(work, torch.float32),
    "sdpa f32, with gather": lambda work: sdpa(work, torch.float32, gather=True),
    "SGLang torch_native": torch_native,
    "onnxruntime GroupQueryAttention f32": lambda work: OnnxAttention(work.q, *work.kv, SCALE),
    "ggml flash_attn_ext f16": lambda work: GgmlAttention(work.q, *work.kv, SCALE),
}
PACKAGES = {"onnxruntime": ("onnx", "onnxruntime"), "ggml": ("llama_cpp",)}
"""Packages that a peer needs beyond SGLang's dependencies, by the first word of its name."""


def installed(name: str) -> bool:
    return all(map(importlib.util.find_spec, PACKAGES.get(name.split()[0], ())))


def measure(
    context: int, budget: float, rounds: int, arena: Arena, names: tuple[str, ...] = tuple(PEERS)
) -> list[dict[str, Any]]:
    """One row per peer; over_ours is the median over rounds of its time over ours."""
    work = Work.of(arena, context, budget)
    pool, isa = workers(0), isas()[-1]
    threads = torch.get_num_threads()
    torch.set_num_threads(pool.count)
    names = tuple(name for name in names if installed(name) and not (budget == 1 and "gather" in name))
    q = work.q.view(-1, GROUP, HEAD_DIM)
    o, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
    errors: dict[str, float] = {}

    def ours() -> int:
        return probe.attend(pool, isa, q, SCALE, work.tiles, work.tasks, o, lse)[0]

    def timed(name: str, peer: Peer) -> int:
        start = time.perf_counter_ns()
        found = peer()
        took = time.perf_counter_ns() - start
        if name not in errors:
            errors[name] = work.error(found)
        return took

    peers = {name: PEERS[name](work) for name in names}
    contenders: dict[str, Callable[[], int]] = {"ours": ours}
    contenders |= {name: partial(timed, name, peers[name]) for name in names}
    times = interleave(contenders, rounds)
    torch.set_num_threads(threads)
    error_ours = work.error(o.view(work.q.shape))
    return [
        {
            "peer": name,
            "work": work.what,
            "budget": budget,
            "context": context,
            "ms": round(median(times[name]) / 1e6, 3),
            "ours_ms": round(median(times["ours"]) / 1e6, 3),
            "over_ours": round(ratio(times[name], times["ours"]), 2),
            "gb_per_s_ours": round(work.nbytes / median(times["ours"]), 2),
            "error": errors[name],
            "error_ours": error_ours,
        }
        for name in names
    ]


def main() -> None:
    args = common.arguments(__doc__, "2K tokens", rounds=9).parse_args()
    arena = Arena.of(1 << 25, 1 << 22) if args.quick else Arena.of(2 * beyond_caches(1 << 29), beyond_caches(1 << 27))
    context, rounds = (2048, 2) if args.quick else (32768, args.rounds)
    rows = common.told(row for budget in (0.05, 1) for row in measure(context, budget, rounds, arena))
    missing = [name for name in PEERS if not installed(name)]
    if missing:
        print(f"Not installed, left out: {', '.join(missing)}.")
    distributions = importlib.metadata.packages_distributions()
    modules = sorted({module for name in PEERS if installed(name) for module in PACKAGES.get(name.split()[0], ())})
    versions = {
        name: importlib.metadata.version(name) for module in modules for name in distributions.get(module, [])[:1]
    }
    common.publish(args, "peers", rows, rounds=rounds, peers=versions)


if __name__ == "__main__":
    main()
