"""Random operations on host pool, radix tree and policies, as in a busy server.

    make fuzz                                   # a million operations under AddressSanitizer and UBSan
    make fuzz ARGS="--operations 5000 --seed 7"

Requests share prefixes, reuse the tree, diverge inside and between pages, are prefilled in chunks, decode under their
own policies, and are aborted, retracted and resumed. Twins compute the same pages, and one of them must release its
own. Leaves are evicted; everything is flushed. The device interface is called as by SGLang's backend.

Free pages are filled with NaN, and a value's first element identifies its writer. Checks on an output can therefore
tell what it has read: it is finite, it lies within the tags of its own request, and under `full` it equals PyTorch's
result. Periodically every live page is compared with the expected contents, and every page is counted. At the end all
pages must be free.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import accumulate, count

import torch
from engine import tiny_predictor
from fuzz.pages import DIM, GROUP, HEADS, LAYERS, LONGEST, PAGES, PLACEMENT, ROWS, Request, Store

from benchmark.probe import function
from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.executor.decode import DecodeEngine
from fluxion_sglang.executor.host import HostDevice
from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.kv.host_pool import HostPool, KVShape
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.kv.windows import Windows
from fluxion_sglang.native import Workers
from fluxion_sglang.policy import Context, Policy, examples, parse_spec

AUDIT_EVERY = 200
"""Operations between two comparisons of everything with the expected contents."""
SCALE = DIM**-0.5


class Wrong(AssertionError):
    """A check failed."""


def _spec(request: Request) -> str:
    return "the server's policy" if request.policy is None else request.policy.spec


class Machine(Store):
    """A server without SGLang: rows, pages, a radix tree, and an engine.

    Args:
        seed: of all random choices, including data and shape of the machine.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.random = torch.Generator().manual_seed(seed)
        self.dtype = self.rng.choice([torch.float32, torch.bfloat16])
        workers = Workers(self.rng.choice([1, 2, 3]))
        shape = KVShape(LAYERS, HEADS, DIM, self.dtype, sketched=True)
        pool = HostPool(shape, (PAGES - 1) * PAGE, PLACEMENT, workers)
        windows = Windows(pool, ROWS, "cpu")
        options = FluxionConfig(share_prefixes=self.rng.random() < 0.7)
        predictor = tiny_predictor.predictor()
        context = Context(predictor=lambda tau: predictor)
        self.policies: list[Policy | None] = [None, *(parse_spec(spec, context) for spec in examples())]
        server = parse_spec(self.rng.choice(["full", "fixed:16:0.10", "fluxion"]), context)
        self.engine = DecodeEngine(
            pool, windows, server, [], options, q_heads=HEADS * GROUP, max_requests=2, max_tokens=64
        )
        self.device = HostDevice(pool, windows, self.engine)
        self.generations = torch.zeros(ROWS, dtype=torch.int64)
        self.take(pool, windows)

    # --- Requests ---

    def _draw(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        k = torch.randn(LAYERS, tokens, HEADS, DIM, generator=self.random) * self.rng.choice([0.1, 1.0, 3.0])
        v = torch.randn(LAYERS, tokens, HEADS, DIM, generator=self.random)
        v[..., 0] = self.rng.randint(1, 100)  # identifies the writer
        return k.to(self.dtype), v.to(self.dtype)

    def start(self) -> bool:
        """A new request, with or without a shared prefix; or one that was retracted."""
        if not self.rows:
            return False
        if self.waiting and self.rng.random() < 0.5:
            request = self.waiting.pop(0)
            self.counts["taken up"] += 1
        else:
            request = self._new()
        node, depth = self.root, 0
        # As in SGLang, at least one token must be computed.
        while depth < min(len(request.contents), (request.prompt - 1) // PAGE):
            child = node.children.get(request.contents[depth])
            if child is None:
                break
            node, depth = child, depth + 1
            request.pages.append(child.page)
        if depth:
            self.counts["hit"] += 1
        self._lock(node, 1)
        request.locked, request.shared, request.length = node, depth, depth * PAGE
        request.row = self.rows.pop(self.rng.randrange(len(self.rows)))
        self.generations[request.row] += 1
        request.generation = int(self.generations[request.row])
        self.running.append(request)
        self.counts["started"] += 1
        return True

    def _new(self) -> Request:
        k, v = self._draw(LONGEST)
        contents: list[int] = []
        prompt = self.rng.choice([1, PAGE, self.rng.randint(1, 120), self.rng.randint(100, 500)])
        others = [request for request in self.running if request.length]
        if others and self.rng.random() < 0.6:
            other = self.rng.choice(others)
            # Copy up to a point within a page, at a page's end, or the whole of the other one, as its twin.
            same = self.rng.choice([other.length, self.rng.randint(1, other.length), other.length // PAGE * PAGE])
            k[:, :same], v[:, :same] = other.k[:, :same], other.v[:, :same]
            while len(other.contents) < other.length // PAGE:
                other.contents.append(next(self.numbers))
            contents = other.contents[: same // PAGE]
            prompt = min(max(prompt, same + self.rng.choice([0, 1, 40])), LONGEST - 40)
            self.counts["diverges"] += 1
        stop = min(prompt + self.rng.choice([1, 5, 60, 200]), LONGEST)
        found = v[0, :, 0, 0].tolist()
        tags = list(zip(accumulate(found, min), accumulate(found, max), strict=True))
        return Request(k, v, self.rng.choice(self.policies), contents, prompt, stop, tags)

    def retract(self) -> bool:
        if not self.running:
            return False
        self._retract(self.rng.choice(self.running))
        return True

    def abort(self) -> bool:
        """The computed part of the prompt may enter the tree; the rest is dropped."""
        if not self.running:
            return False
        request = self.rng.choice(self.running)
        if self.rng.random() < 0.5:
            self._insert(request, min(request.length, request.prompt))
        self._release(request)
        self.counts["aborted"] += 1
        return True

    def finish(self, request: Request) -> None:
        # Tokens decoded under a request's own policy stay out of the tree.
        self._insert(request, request.length if request.policy is None else min(request.length, request.prompt))
        self._release(request)
        self.counts["finished"] += 1

    def evict(self) -> bool:
        return self._evict(self.rng.randint(1, 10)) > 0

    def flush(self) -> bool:
        self.counts["flushed"] += 1
        return self._evict(PAGES) > 0

    def forget_window(self) -> bool:
        """A row without a prefill: its window heals."""
        decoding = [request for request in self.running if request.length >= request.prompt]
        if not decoding:
            return False
        row = self.rng.choice(decoding).row
        self._poison_window(row)
        self.windows.mark(torch.tensor([row]), torch.tensor([-1]), torch.tensor([0]))
        return True

    # --- Passes ---

    def chunk(self) -> bool:
        """Prefill a chunk for some requests."""
        todo = [request for request in self.running if request.length < request.prompt]
        todo = self.rng.sample(todo, min(len(todo), self.rng.randint(1, 3)))
        parts: list[tuple[Request, ExtendRequest]] = []
        offset = 0
        for request in todo:
            size = min(self.rng.choice([1, 16, 37, 200]), request.prompt - request.length)
            if request not in self.running or not self._grow(request, request.length + size):
                continue
            parts.append((request, ExtendRequest(0, request.length, request.length + size, offset, torch.empty(0), 20)))
            offset += size
        # A request may have been retracted for another's pages.
        parts = [(request, part) for request, part in parts if request in self.running]
        if not parts:
            return False
        offset, extends = 0, []
        for request, part in parts:
            extends.append(ExtendRequest(request.row, part.start, part.stop, offset, request.page_list(), 20))
            offset += part.stop - part.start
        rows = torch.tensor([request.row for request, _ in parts])
        generations = self.generations[rows]
        for i in self.windows.taken_over(rows, generations):
            self.engine.forget(int(rows[i]))

        def appended(layer: int, index: int, queries: torch.Tensor, scale: float) -> None:
            own = parts[index][0].policy
            self.engine.prefilled(layer, extends[index].row, extends[index].stop, queries, own)

        self.device.begin_extend(extends, appended)
        self.windows.mark(rows, generations, torch.tensor([part.stop for part in extends]))
        for layer in range(LAYERS):
            q = torch.randn(offset, HEADS * GROUP, DIM, generator=self.random).to(self.dtype)
            k, v = (
                torch.cat([getattr(r, name)[layer, part.start : part.stop] for r, part in parts]) for name in ("k", "v")
            )
            out = self.device.extend(layer, q, k, v, SCALE)
            for (request, _), part in zip(parts, extends, strict=True):
                tokens, last = part.tokens, slice(part.tokens.stop - 1, part.tokens.stop)
                self._check(layer, [(request, part.stop, True)], q[last], out[last])
                if not math.isfinite(float(out[tokens].float().sum())):
                    raise Wrong("an output of a prefill is not finite")
        for request, part in parts:
            request.length = part.stop
            self.counts["chunk"] += 1
            if request.length == request.prompt or self.rng.random() < 0.3:
                self._insert(request, request.length)  # SGLang caches unfinished requests, too
        return True

    def decode(self) -> bool:
        """Decode a token for every request with a complete prompt."""
        batch: list[Request] = []
        for request in [request for request in self.running if request.length >= request.prompt]:
            if request in self.running and self._grow(request, request.length + 1):
                batch.append(request)
        batch = [request for request in batch if request in self.running]
        if not batch:
            return False
        table = torch.zeros(len(batch), max(len(request.pages) for request in batch), dtype=torch.int32)
        for b, request in enumerate(batch):
            table[b, : len(request.pages)] = request.page_list()
        rows = torch.tensor([request.row for request in batch])
        lengths = torch.tensor([request.length + 1 for request in batch])
        generations = self.generations[rows]
        for i in self.windows.stale(rows, generations, lengths - 1):
            self.device.heal(int(rows[i]), int(lengths[i]) - 1, table[i])
            self.engine.forget(int(rows[i]))
            self.counts["healed"] += 1
        policies = [request.policy or self.engine.policy for request in batch]
        self.device.begin_decode(rows, lengths, table, policies if any(r.policy for r in batch) else None)
        self.windows.mark(rows, generations, lengths)
        for layer in range(LAYERS):
            q = torch.randn(len(batch), HEADS * GROUP, DIM, generator=self.random).to(self.dtype)
            k, v = (torch.stack([getattr(r, name)[layer, r.length] for r in batch]) for name in ("k", "v"))
            out = self.device.decode(layer, q, k, v, SCALE)
            read = [(r, r.length + 1, policy.spec == "full") for r, policy in zip(batch, policies, strict=True)]
            self._check(layer, read, q, out)
        for request in batch:
            request.length += 1
            self.counts["token"] += 1
            if request.length >= request.stop:
                self.finish(request)
        return True

    # --- Invariants ---

    def _check(self, layer: int, read: list[tuple[Request, int, bool]], q: torch.Tensor, out: torch.Tensor) -> None:
        """Check that out [n, Hq, D] can be the result for q [n, Hq, D].

        Args:
            read: for each row, its request, the number of tokens, and whether it must read all of them.
        """
        if not math.isfinite(float(out.float().sum())):
            raise Wrong(f"an output is not finite, of {[_spec(request) for request, *_ in read]}")
        coarse = self.dtype is torch.bfloat16
        for b, ((request, tokens, exact), got) in enumerate(zip(read, out[..., 0].tolist(), strict=True)):
            low, high = request.tags[tokens - 1]
            room = (0.01 if coarse else 1e-4) * high
            if min(got) < low - room or max(got) > high + room:
                raise Wrong(f"{_spec(request)} has read another request: {got} is not in {low} to {high}")
            if exact and self.rng.random() < 0.2:
                k, v = (x[layer, :tokens].float().repeat_interleave(GROUP, 1) for x in (request.k, request.v))
                scores = torch.einsum("hd,nhd->hn", q[b].float(), k) * SCALE
                error = (out[b].float() - torch.einsum("hn,nhd->hd", scores.softmax(-1), v)).abs()
                if not bool((error <= room + (0.02 if coarse else 1e-4)).all()):
                    raise Wrong(f"an exact output of {_spec(request)} is off by {float(error.max()):.1e}")
                self.counts["compared"] += 1

    def audit(self) -> None:
        """Every page has exactly one owner and holds the expected contents."""
        owned = Counter(self.free)
        owned.update(node.page for node in self._nodes())
        for request in self.running:
            owned.update(request.pages[request.shared :])
        if owned != Counter(range(1, PAGES)):
            raise Wrong(f"pages are lost or owned twice: {owned}")
        for request in self.running:
            for layer in range(LAYERS):
                tiles = self.pool.tiles(layer)[:, request.pages]  # [H, n, 2, 16, D]
                stored = tiles.permute(2, 1, 3, 0, 4).reshape(2, -1, HEADS, DIM)[:, : request.length]
                want = torch.stack([request.k[layer, : request.length], request.v[layer, : request.length]])
                if not torch.equal(stored, want):
                    raise Wrong("a page does not hold what was written")
                if full := request.length // PAGE:
                    self._check_sketch(layer, self.rng.randrange(HEADS), request.pages[self.rng.randrange(full)])
        self.counts["audit"] += 1

    def _check_sketch(self, layer: int, head: int, page: int) -> None:
        got = self.pool.tensor("sketches", layer)[head, page]
        want = torch.empty_like(got)
        function("k_write_sketch")(self.pool.isa, self.pool.tiles(layer)[head, page], DIM, want)
        if not torch.equal(got, want):
            raise Wrong("a sketch is not of its page's keys")

    def step(self) -> None:
        """Execute one operation that is possible now."""
        kinds: dict[Callable[[], bool], float] = {
            self.decode: 50, self.chunk: 20, self.start: 12, self.abort: 2, self.retract: 2,
            self.evict: 2, self.flush: 0.2, self.forget_window: 1,
        }  # fmt: skip
        while True:
            (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
            if kind():
                return

    def drain(self) -> None:
        """End all requests and empty the tree: every page and every row is free."""
        for request in list(self.running):
            self._release(request)
        self.flush()
        self.audit()
        if len(self.free) != PAGES - 1 or len(self.rows) != ROWS - 1:
            raise Wrong(f"{PAGES - 1 - len(self.free)} pages are lost")


PER_MACHINE = 10_000
"""Operations per machine; the next one has another dtype, number of workers and server policy."""
CHECKS = {"compared", "audit"}
"""Counters that are no operations."""


def run(operations: int, seed: int, say: Callable[[str], None] = lambda line: None) -> Counter[str]:
    """Run at least `operations` operations, on one machine after another; return counts of operations and checks.

    An operation acts on one request or one page: a token decoded, a chunk prefilled, a page evicted.

    Raises:
        Wrong: a check failed; the message says how to reproduce it.
    """
    counts: Counter[str] = Counter()
    for number in count():
        machine_seed = seed * 1_000_003 + number
        least = min(PER_MACHINE, operations - _operations(counts))
        if least <= 0:
            return counts
        machine, steps = Machine(machine_seed), 0
        try:
            while _operations(machine.counts) < least:
                machine.step()
                steps += 1
                if steps % AUDIT_EVERY == 0:
                    machine.audit()
            machine.drain()
        except Exception as error:
            raise Wrong(f"{error} ({type(error).__name__}; Machine({machine_seed}), step {steps})") from error
        counts += machine.counts
        say(f"{_operations(counts)} operations")
    return counts


def _operations(counts: Counter[str]) -> int:
    return sum(number for name, number in counts.items() if name not in CHECKS)


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    words.add_argument("--operations", type=int, default=1_000_000)
    words.add_argument("--seed", type=int, default=1)
    chosen = words.parse_args()
    start = time.monotonic()
    shown = [0.0]

    def say(line: str) -> None:
        if time.monotonic() - shown[0] > 30:
            shown[0] = time.monotonic()
            print(f"{line}, {time.monotonic() - start:.0f} s", flush=True)

    try:
        counts = run(chosen.operations, chosen.seed, say)
    except Wrong as error:
        print(f"FAILED: {error}")
        return 1
    print(", ".join(f"{name} {number}" for name, number in counts.most_common()))
    print(f"operations {_operations(counts)} seed {chosen.seed} seconds {time.monotonic() - start:.0f}")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
