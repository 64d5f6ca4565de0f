"""The native pool equals a recomputation after any appends, shares, frees and reuses."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from effort import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.native import NativePool, Workers, pool_bytes

DTYPES = [torch.float32, torch.bfloat16]
LEVELS = (0, 1, 2, 3)


def make_pool(
    workers: int = 2, *, layers: int = 1, heads: int = 2, pages: int = 64, dim: int = 32,
    dtype: torch.dtype = torch.float32, sink_pages: int = 4,
) -> NativePool:  # fmt: skip
    return NativePool(
        Workers(workers), layers=layers, kv_heads=heads, pages=pages, head_dim=dim, dtype=dtype, sink_pages=sink_pages
    )


def moments(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[n, H, D] twice -> [H, 2 D + 8] float64: sums of k, v, |k|^1..4, |v|^1..4."""
    parts = []
    for x in (keys.double(), values.double()):
        norms = x.norm(dim=2)
        parts.append((x.sum(0), torch.stack([(norms**p).sum(0) for p in (1, 2, 3, 4)], dim=1)))
    (k, k_norms), (v, v_norms) = parts
    return torch.cat([k, v, k_norms, v_norms], dim=1)


@dataclass
class Path:
    """A request: its pages, and all its keys and values per layer [n, H, D]."""

    pages: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def length(self) -> int:
        return self.keys[0].shape[0]


class PoolMachine(RuleBasedStateMachine):
    """Requests grow by chunks and by decoding, share prefixes, diverge and end; freed pages return in any order.

    Pages are few, so that coarse entries constantly collide.
    """

    @initialize(
        seed=st.integers(0, 2**16), dtype=st.sampled_from(DTYPES), sink_pages=st.sampled_from([0, 1, 4]),
        workers=st.sampled_from([1, 2]), heads=st.integers(1, 3),
    )  # fmt: skip
    def start(self, seed: int, dtype: torch.dtype, sink_pages: int, workers: int, heads: int) -> None:
        self.layers, self.heads, self.dim, self.dtype, self.sink_pages = 2, heads, 32, dtype, sink_pages
        self.random = torch.Generator().manual_seed(seed)
        self.pool = make_pool(
            workers, layers=self.layers, heads=heads, pages=70, dim=self.dim, dtype=dtype, sink_pages=sink_pages
        )
        self.free = (torch.randperm(69, generator=self.random) + 1).tolist()
        self.uses: dict[int, int] = {}
        self.paths: list[Path] = []
        # Last page of the block that was sealed into each coarse entry.
        self.tags = {j: [-1] * -(-70 // 2**j) for j in (1, 2, 3)}

    def pick(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self.random))

    def grow(self, path: Path, count: int) -> int:
        """Give the path pages for up to `count` more tokens; return the number of tokens that fit."""
        count = min(count, (len(path.pages) + len(self.free)) * PAGE - path.length)
        while len(path.pages) * PAGE < path.length + count:
            page = self.free.pop(self.pick(len(self.free)))
            self.uses[page] = 1
            path.pages.append(page)
        return count

    def draw(self, count: int) -> torch.Tensor:
        """[count, H, D] with mixed magnitudes; a slice of a larger tensor, strided over tokens and heads."""
        fused = torch.randn(count, self.heads * 3, self.dim + 16, generator=self.random).to(self.dtype)
        return (fused * 10.0 ** (self.pick(5) - 2))[:, ::3, : self.dim]

    def wrote(self, path: Path, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        path.keys[layer] = torch.cat([path.keys[layer], k])
        path.values[layer] = torch.cat([path.values[layer], v])

    def sealed(self, path: Path, first: int, stop: int) -> None:
        """Logical pages [first, stop) became full."""
        for logical in range(first, stop):
            for j in (1, 2, 3):
                if (logical + 1) % 2**j == 0 and logical >= self.sink_pages:
                    self.tags[j][path.pages[logical] >> j] = path.pages[logical]

    @rule(count=st.integers(1, 300))
    def new(self, count: int) -> None:
        empty = [torch.empty(0, self.heads, self.dim, dtype=self.dtype) for _ in range(self.layers)]
        path = Path([], list(empty), list(empty))
        if self.free:
            self.paths.append(path)
            self.extend(path, count)

    def extend(self, path: Path, count: int) -> None:
        start, count = path.length, self.grow(path, count)
        pages = torch.tensor(path.pages, dtype=torch.int32)
        for layer in range(self.layers):
            k, v = self.draw(count), self.draw(count)
            self.pool.append(layer, pages, start, k, v)
            self.wrote(path, layer, k, v)
        self.sealed(path, start // PAGE, (start + count) // PAGE)

    @precondition(lambda self: self.paths)
    @rule(count=st.integers(1, 200))
    def append(self, count: int) -> None:
        self.extend(self.paths[self.pick(len(self.paths))], count)

    @precondition(lambda self: self.paths)
    @rule(steps=st.integers(1, 20))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            batch = [path for path in self.paths if self.grow(path, 1) == 1]
            if not batch:
                return
            starts = [path.length for path in batch]
            for layer in range(self.layers):
                k, v = self.draw(len(batch)), self.draw(len(batch))
                for b, path in enumerate(batch):
                    pages = torch.tensor(path.pages, dtype=torch.int32)
                    self.pool.append(layer, pages, starts[b], k[b : b + 1], v[b : b + 1])
                    self.wrote(path, layer, k[b : b + 1], v[b : b + 1])
            for path in batch:
                self.sealed(path, (path.length - 1) // PAGE, path.length // PAGE)

    @precondition(lambda self: any(path.length >= PAGE for path in self.paths))
    @rule(full=st.integers(1, 20), count=st.integers(1, 150))
    def share(self, full: int, count: int) -> None:
        """A radix hit on the first `full` pages of another request; then they diverge."""
        parents = [path for path in self.paths if path.length >= PAGE]
        parent = parents[self.pick(len(parents))]
        full = min(full, parent.length // PAGE)
        child = Path(
            parent.pages[:full], [k[: full * PAGE] for k in parent.keys], [v[: full * PAGE] for v in parent.values]
        )
        if not self.free:
            return
        for page in child.pages:
            self.uses[page] += 1
        self.paths.append(child)
        self.extend(child, count)

    @precondition(lambda self: self.paths)
    @rule()
    def end(self) -> None:
        path = self.paths.pop(self.pick(len(self.paths)))
        for page in path.pages:
            self.uses[page] -= 1
            if self.uses[page] == 0:
                self.free.append(page)

    @invariant()
    def everything_equals_a_recomputation(self) -> None:
        for layer in range(self.layers):
            for j, tags in self.tags.items():
                assert self.pool.tensor(f"tag{j}", layer).tolist() == tags
            for path in self.paths:
                self.check(layer, path)

    def check(self, layer: int, path: Path) -> None:
        keys, values = path.keys[layer], path.values[layer]
        tiles = self.pool.tensor("tiles", layer)[:, path.pages]  # [H, n, 2, 16, D]
        stored = tiles.permute(2, 1, 3, 0, 4).reshape(2, -1, self.heads, self.dim)[:, : path.length]
        assert torch.equal(stored[0], keys)
        assert torch.equal(stored[1], values)
        full = path.length // PAGE
        for j in LEVELS:
            for block in range(full >> j):
                last = path.pages[((block + 1) << j) - 1]
                first = max(block << j, self.sink_pages if j else 0)
                if first >= (block + 1) << j or (j and self.tags[j][last >> j] != last):
                    continue
                inside = keys[first * PAGE : ((block + 1) << j) * PAGE]
                entry = self.pool.tensor(f"meta{j}", layer)[:, last >> j]
                assert torch.equal(entry[:, 0], inside.amin(0))
                assert torch.equal(entry[:, 1], inside.amax(0))
        sums = self.pool.tensor("moments", layer)
        want = torch.zeros(self.heads, 2 * self.dim + 8, dtype=torch.float64)
        scale = torch.zeros_like(want)
        for logical in range(full):
            if logical >= self.sink_pages:
                here = slice(logical * PAGE, (logical + 1) * PAGE)
                want += moments(keys[here], values[here])
                scale += moments(keys[here].abs(), values[here].abs())
            # Cancelling sums are as exact as their terms.
            error = (sums[:, path.pages[logical]] - want).abs()
            assert bool((error <= 1e-12 * scale).all())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(30), stateful_step_count=15, deadline=None)


def test_every_page_of_memory_is_there_once_the_pool_is_made() -> None:
    """All pages are present before memory is pinned, each head on the node of the worker that touched it."""
    pool = make_pool(layers=3, heads=3, pages=500)
    memory = pool.tensor("memory", 0)
    last = pool.tensor("moments", 2)
    used = -(-(last.data_ptr() + last.nbytes - memory.data_ptr()) // 4096)
    resident = (ctypes.c_ubyte * used)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(used * 4096), resident) == 0
    assert all(flags & 1 for flags in resident)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("placement", [Placement(), Placement(0, 16), Placement(16, 80)], ids=str)
def test_a_filled_window_holds_what_the_placement_says(dtype: torch.dtype, placement: Placement) -> None:
    """The residents of every length, each in its slot; no other row is touched."""
    most = placement.slots * 2 + 40
    pool = make_pool(dtype=dtype, pages=100, sink_pages=placement.sink_pages)
    pages = torch.randperm(99)[: -(-most // PAGE)].add(1).int()
    k, v = torch.randn(most, 2, 32).to(dtype), torch.randn(most, 2, 32).to(dtype)
    pool.append(0, pages, 0, k, v)
    for n in range(most + 1):
        windows = torch.full((2, 3 * placement.slot_pages, 2, PAGE, 32), torch.nan, dtype=dtype)
        pool.fill_window(0, windows, 1, n, pages, placement.sinks, placement.window)
        by_row = windows.view(2, 3, placement.slot_pages, 2, PAGE, 32)
        assert bool(by_row[:, 0].isnan().all()) and bool(by_row[:, 2].isnan().all())
        slots = by_row[:, 1].permute(2, 1, 3, 0, 4).reshape(2, placement.slots, 2, 32)
        start = placement.window_start(n)
        resident = [*range(min(placement.sinks, n)), *range(start, n)]
        at = [placement.slot(p) for p in resident]
        assert len(set(at)) == len(at)
        assert torch.equal(slots[0, at], k[resident])
        assert torch.equal(slots[1, at], v[resident])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 64, 65, 150])
def test_gather(dtype: torch.dtype, count: int) -> None:
    pool = make_pool(dtype=dtype, heads=3, pages=200)
    tiles = pool.tensor("tiles", 0)
    tiles.copy_(torch.randn_like(tiles))
    pages = torch.randperm(199)[:count].add(1).int()
    k, v = pool.gather(0, pages)
    want = tiles[:, pages.long()]
    assert torch.equal(k, want[:, :, 0].reshape(3, -1, 32))
    assert torch.equal(v, want[:, :, 1].reshape(3, -1, 32))


def test_a_shared_page_is_never_written() -> None:
    pool = make_pool()
    k = torch.randn(40, 2, 32)
    pool.append(0, torch.tensor([5, 6, 7], dtype=torch.int32), 0, k, k)
    names = ["tiles", "meta0", "moments"]
    before = [pool.tensor(name, 0)[:, [5, 6]].clone() for name in names]
    pool.append(0, torch.tensor([5, 6, 9, 10], dtype=torch.int32), 32, k[:30], k[:30])
    for name, old in zip(names, before, strict=True):
        assert torch.equal(pool.tensor(name, 0)[:, [5, 6]], old)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_bad_arguments_write_nothing() -> None:
    pool = make_pool(pages=64)
    tiles = pool.tensor("tiles", 0)
    before = tiles.clone()
    k = torch.randn(20, 2, 32)
    for pages in [(0, 1), (1, 64), (1, -3), (1, 2**31 - 1)]:
        with pytest.raises(ValueError, match="must be between 1 and 63"):
            pool.append(0, int32(*pages), 0, k, k)
        with pytest.raises(ValueError, match="must be between 1 and 63"):
            pool.gather(0, int32(*pages))
        with pytest.raises(ValueError, match="must be between 1 and 63"):
            pool.fill_window(0, torch.empty(2, 12, 2, PAGE, 32), 0, 20, int32(*pages), 64, 112)
    for start in (-1, 13):
        with pytest.raises(ValueError, match="pass every page"):
            pool.append(0, int32(1, 2), start, k, k)
    with pytest.raises(ValueError, match="no layer 1"):
        pool.append(1, int32(1, 2), 0, k, k)
    with pytest.raises(ValueError, match="no row 1"):
        pool.fill_window(0, torch.empty(2, 12, 2, PAGE, 32), 1, 20, int32(1, 2), 64, 112)
    assert torch.equal(tiles, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_those_of_the_tensors(dtype: torch.dtype) -> None:
    pool = make_pool(layers=3, heads=3, pages=77, dim=80, dtype=dtype)
    names = ["tiles", "meta0", "meta1", "meta2", "meta3", "tag1", "tag2", "tag3", "moments"]
    views = [pool.tensor(name, layer) for layer in range(3) for name in names]
    total = sum(view.nbytes for view in views)
    mapped = pool_bytes(3, 3, 77, 80, dtype)
    assert total <= mapped < total + len(views) * 4096 + (2 << 20)
    # No two overlap, and all lie in one mapping of that size.
    spans = sorted((view.data_ptr(), view.data_ptr() + view.nbytes) for view in views)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] - spans[0][0] <= mapped
    for view in views:
        empty = -1 if view.dtype == torch.int32 else 0
        assert bool((view == empty).all())


def test_a_view_outlives_its_pool() -> None:
    pool = make_pool()
    tiles = pool.tensor("tiles", 0)
    tiles.fill_(3.0)
    del pool
    make_pool()  # would be mapped at the address of the first
    assert bool((tiles == 3.0).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "there"), [(1, 0), (9, 0), (9, 4), (40, 3), (40, 39)])
def test_tiles_that_somebody_else_wrote_are_adopted(dtype: torch.dtype, count: int, there: int) -> None:
    """All data derived from the tiles equals that after an append."""
    made, adopted = (make_pool(pages=80, dtype=dtype) for _ in range(2))
    pages = (torch.randperm(79)[:count] + 1).int()
    k, v = (torch.randn(count * PAGE, 2, 32).to(dtype) for _ in "kv")
    made.append(0, pages, 0, k, v)
    for name in ("tiles", "meta0", "moments"):
        adopted.tensor(name, 0).view(torch.uint8).fill_(255)
    start = there * PAGE
    adopted.append(0, pages, 0, k[:start], v[:start])
    adopted.tensor("tiles", 0)[:, pages.long()] = made.tensor("tiles", 0)[:, pages.long()]
    adopted.adopt(0, pages, start, count * PAGE - start, described=False)
    for name in ("meta0", "moments"):
        assert torch.equal(adopted.tensor(name, 0)[:, pages.long()], made.tensor(name, 0)[:, pages.long()])
    for level in LEVELS[1:]:
        tags = made.tensor(f"tag{level}", 0)
        assert torch.equal(adopted.tensor(f"tag{level}", 0), tags)
        assert torch.equal(adopted.tensor(f"meta{level}", 0)[:, tags > 0], made.tensor(f"meta{level}", 0)[:, tags > 0])
