"""Costs that depend on the number of tokens in a host pool, from 100,000 to 10 million.

    python benchmark/pool_scale.py            # about three minutes, and 6 GiB of memory
    python benchmark/pool_scale.py --quick    # up to 100,000 tokens, to see that it runs

There is no server: our host pool and engine run with SGLang's allocator and radix tree as in a server. A token has one
layer and one KV head of 32 elements, so that ten million fit into this memory; the measured times depend on their
number. First the tree is filled with prompts of 32,000 tokens. Then operations of a scheduler take turns, each on a new
prompt:

    alloc    pages for a prompt of 32,000 tokens
    append   write their KV, metadata and moments into the pool
    insert   add the prompt to the tree
    match    find it there
    decode   attention of one step over it, `fixed:16:0.05`; its pages are scattered over the pool
    page     one more page for it
    evict    remove the oldest prompt, to make room for the next
    free     the page of an aborted request

`flush` empties tree and allocator. Times are medians. Results go to pool_scale.json in benchmark/results/<machine>.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, TypeVar

import common

from fluxion_sglang import openmp

if __name__ == "__main__":
    openmp.wait_passively()  # before torch is loaded

import torch
from roofline import workers
from tqdm import tqdm

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.executor.decode import DecodeEngine
from fluxion_sglang.executor.host import HostDevice
from fluxion_sglang.kv.host_pool import GIB, HostPool, KVShape
from fluxion_sglang.kv.page_table import page_table
from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.kv.windows import Windows
from fluxion_sglang.policy import parse_spec

SIZES, QUICK_SIZES = (100_000, 1_000_000, 10_000_000), (65_536, 100_000)
PROMPT = 32_000
TURNS, QUICK_TURNS = 21, 2
DIM = 32
OPERATIONS = ("alloc", "append", "insert", "match", "decode", "page", "evict", "free")

T = TypeVar("T")


class Server:
    """The parts of a server that depend on the number of tokens in the pool.

    Attributes:
        times: nanoseconds of each operation, by name.
    """

    def __init__(self, tokens: int) -> None:
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.times: dict[str, list[int]] = {}
        shape = KVShape(1, 1, DIM, torch.bfloat16)
        self.pool = self.timed("start", lambda: HostPool(shape, tokens, Placement(), workers(0)))
        windows = Windows(self.pool, 2, "cpu")
        self.engine = DecodeEngine(
            self.pool, windows, parse_spec("fixed:16:0.05"), [], FluxionConfig(), q_heads=4, max_requests=1,
            max_tokens=PROMPT + PAGE,
        )  # fmt: skip
        self.windows, self.device = windows, HostDevice(self.pool, windows, self.engine)
        nothing: Any = None
        self.allocator = PagedTokenToKVPoolAllocator(
            tokens // PAGE * PAGE, PAGE, torch.bfloat16, "cpu", nothing, need_sort=False
        )
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False, req_to_token_pool=nothing, token_to_kv_pool_allocator=self.allocator, page_size=PAGE,
                tree_components=(ComponentType.FULL,),
            )
        )  # fmt: skip
        self.random = torch.Generator().manual_seed(0)
        self.rows = torch.zeros(2, PROMPT + PAGE, dtype=torch.int32)

    def timed(self, name: str, call: Callable[[], T]) -> T:
        start = time.perf_counter_ns()
        result = call()
        self.times.setdefault(name, []).append(time.perf_counter_ns() - start)
        return result

    def slots(self, count: int) -> torch.Tensor:
        found = self.allocator.alloc(count)
        assert found is not None, "the pool has no room, although there was some"
        return found

    def prompt(self) -> Any:
        from array import array

        from sglang.srt.mem_cache.radix_cache import RadixKey

        ids = torch.randint(3, 1 << 17, (PROMPT,), generator=self.random).tolist()
        return RadixKey(array("q", ids), None)

    def insert(self, key: Any, slots: torch.Tensor) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        self.tree.insert(InsertParams(key=key, value=slots))

    def fill(self) -> None:
        """Insert prompts until the pool is full. Their pages are random, as after days of service."""
        order = torch.randperm(len(self.allocator.free_pages), generator=self.random)
        self.allocator.free_pages = self.allocator.free_pages[order]
        while self.allocator.available_size() >= 3 * PROMPT:
            self.insert(self.prompt(), self.slots(PROMPT))

    def turn(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams

        key = self.prompt()
        slots = self.timed("alloc", lambda: self.slots(PROMPT))
        self.rows[1, :PROMPT] = slots
        pages = page_table(self.rows, torch.tensor([1]), PROMPT)[0]
        k, v = (torch.randn(PROMPT, 1, DIM, generator=self.random).to(torch.bfloat16) for _ in range(2))
        self.timed("append", lambda: self.pool.append(0, pages, 0, k, v))
        self.timed("insert", lambda: self.insert(key, slots))
        found = self.timed("match", lambda: self.tree.match_prefix(MatchPrefixParams(key=key)))
        assert found.device_prefix_len == PROMPT, found
        more = self.timed("page", lambda: self.slots(PAGE))
        self.rows[1, PROMPT:] = more
        self.windows.heal(1, PROMPT, pages)
        q = torch.randn(1, 4, DIM, generator=self.random).to(torch.bfloat16)

        def decode() -> None:
            table = page_table(self.rows, torch.tensor([1]), PROMPT + 1)
            self.engine.begin_step(torch.tensor([1]), torch.tensor([PROMPT + 1]), table)
            self.device.decode(0, q, k[:1], v[:1], DIM**-0.5)

        self.timed("decode", decode)
        self.timed("free", lambda: self.allocator.free(more))
        result = self.timed("evict", lambda: self.tree.evict(EvictParams(num_tokens=PROMPT)))
        assert result.num_tokens_evicted >= PROMPT

    def flush(self) -> None:
        self.tree.reset()
        self.allocator.clear()


def measure(tokens: int, turns: int) -> dict[str, Any]:
    server = Server(tokens)
    server.timed("fill", server.fill)
    for _ in tqdm(range(turns + 1), desc=f"{tokens:,} tokens", unit="turn"):
        server.turn()
    server.timed("flush", server.flush)
    times = server.times
    return {
        "tokens": tokens,
        "prompts": tokens // PROMPT,
        "pool_gib": round(server.pool.nbytes / GIB, 2),
        "start_s": round(times["start"][0] / 1e9, 3),
        "flush_ms": round(times["flush"][0] / 1e6, 3),
        **{f"{name}_ms": round(median(times[name][1:]) / 1e6, 4) for name in OPERATIONS},  # the first turn warms up
    }


def main() -> None:
    args = common.arguments(__doc__, "small pools").parse_args()
    sizes, turns = (QUICK_SIZES, QUICK_TURNS) if args.quick else (SIZES, TURNS)
    rows = common.told(measure(tokens, turns) for tokens in sizes)
    common.publish(args, "pool_scale", rows, prompt=PROMPT, turns=turns)


if __name__ == "__main__":
    main()
