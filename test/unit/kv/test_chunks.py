"""Chunks that a device writes to the host pool: the pool equals, byte for byte, the result of the host's append."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxion_sglang.device.chunks import ChunkWriter, chunk_pages
from fluxion_sglang.device.library import load
from fluxion_sglang.device.pinned import Pinned
from fluxion_sglang.device.streams import streams
from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.kv.host_pool import HostPool, KVShape
from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.native import Workers

PAGES = 60
TENSORS = ("tiles", "meta0", "meta1", "meta2", "meta3", "tag1", "tag2", "tag3", "sketches")


class Twins:
    """Two poisoned pools with the same requests: `host` is appended to, and a device writes to `device`."""

    def __init__(
        self, heads: int, dim: int, dtype: torch.dtype, sink_pages: int = 4, seed: int = 0, special: float = 0.0
    ) -> None:
        self.shape = KVShape(2, heads, dim, dtype, sketched=True)
        placement = Placement(sink_pages * PAGE, 256)
        self.host, self.device = (HostPool(self.shape, PAGES * PAGE, placement, Workers(workers)) for workers in (1, 2))
        for pool in (self.host, self.device):
            pool.memory.fill_(255)  # NaN, and the tag of nothing
        library = load("sim")
        self.pinned = Pinned(library, self.device.memory)
        self.writer = ChunkWriter(library, streams(library, torch.device("cpu")), self.device, torch.device("cpu"))
        self.random = torch.Generator().manual_seed(seed)
        self.special = special
        self.free = (torch.randperm(PAGES, generator=self.random) + 1).tolist()
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.told: list[tuple[int, int, torch.Tensor]] = []

    def close(self) -> None:
        self.writer.close()
        self.pinned.release()

    def share(self, row: int, other: int) -> None:
        """Row `row` starts with the full pages of `other`, as after a radix hit."""
        if self.lengths.get(row, 0) == 0 and not self.pages.get(row):
            full = self.lengths.get(other, 0) // PAGE
            self.pages[row], self.lengths[row] = self.pages.get(other, [])[:full], full * PAGE

    def draw(self, tokens: int, heads: int) -> torch.Tensor:
        """[tokens, heads, D] with all magnitudes, zeros of both signs, denormals, and `special`."""
        size = (tokens, heads, self.shape.head_dim)
        numbers = torch.randn(size, generator=self.random) * 10.0 ** torch.randint(-20, 20, size, generator=self.random)
        odd = torch.tensor([0.0, -0.0, 1e-40, -1e-40, self.special])
        chosen = odd[torch.randint(len(odd), size, generator=self.random)]
        return torch.where(torch.rand(size, generator=self.random) < 0.3, chosen, numbers).to(self.shape.dtype)

    def extend(self, counts: dict[int, int], queries: int = 1, gap: int = 0) -> None:
        """A pass over `counts` new tokens of each row, as far as pages are free."""
        requests, offset = [], gap
        for row, wanted in counts.items():
            pages, start = self.pages.setdefault(row, []), self.lengths.get(row, 0)
            count = min(wanted, (len(pages) + len(self.free)) * PAGE - start)
            while len(pages) * PAGE < start + count:
                pages.append(self.free.pop())
            self.lengths[row] = start + count
            listed = torch.tensor(pages, dtype=torch.int32)
            requests.append(ExtendRequest(row, start, start + count, offset, listed, queries))
            offset += count + gap
        self.told.clear()
        self.writer.begin(requests, lambda layer, i, q, scale: self.told.append((layer, i, q.clone())))
        asked = []
        for layer in range(self.shape.layers):
            heads = self.shape.kv_heads
            qkv = self.draw(offset, 4 * heads)  # views of one wider tensor, like the model's projections
            q, k, v = qkv.split([2 * heads, heads, heads], 1)
            self.writer.write(layer, q, k, v, 1.0)
            for i, request in enumerate(requests):
                new = request.tokens
                self.host.append(layer, request.pages, request.start, k[new], v[new])
                if request.stop > request.start:
                    asked.append((layer, i, q[request.last_queries].clone()))
            qkv.fill_(float("nan"))  # the memory now belongs to another layer
        self.writer.drain()
        assert [pair[:2] for pair in self.told] == [pair[:2] for pair in asked]
        for (*_, got), (*_, want) in zip(self.told, asked, strict=True):
            assert torch.equal(got.view(torch.uint8), want.contiguous().view(torch.uint8))

    def equal(self, *names: str) -> bool:
        return all(
            torch.equal(*(pool.tensor(name, layer).view(torch.uint8) for pool in (self.host, self.device)))
            for layer in range(self.shape.layers)
            for name in names
        )


@pytest.fixture
def twins() -> Iterator[Any]:
    made: list[Twins] = []

    def make(*args: Any, **kw: Any) -> Twins:
        made.append(Twins(*args, **kw))
        return made[-1]

    yield make
    for one in made:
        one.close()


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 1 << 16), heads=st.integers(1, 3), dim=st.sampled_from(range(32, 257, 16)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), sink_pages=st.sampled_from([0, 1, 4]),
    passes=st.lists(
        st.dictionaries(st.integers(1, 4), st.one_of(st.integers(0, 40), st.sampled_from([15, 16, 17, 160, 300]))),
        min_size=1, max_size=6,
    ),
    gap=st.sampled_from([0, 3]), shares=st.booleans(),
)  # fmt: skip
def test_the_pool_is_what_the_host_makes_it(
    seed: int, heads: int, dim: int, dtype: torch.dtype, sink_pages: int, passes: list[dict[int, int]], gap: int,
    shares: bool,
) -> None:  # fmt: skip
    """Chunks of any length from any place in a page, several requests per pass, shared prefixes, and unwritten bytes
    unchanged: tiles, metadata of all levels, tags and moments are equal in every byte."""
    one = Twins(heads, dim, dtype, sink_pages, seed)
    try:
        for number, counts in enumerate(passes):
            if shares:
                one.share(number % 4 + 1, (number + 1) % 4 + 1)
            one.extend(counts, queries=number, gap=gap)
            assert torch.equal(one.host.memory, one.device.memory)
    finally:
        one.close()


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_that_are_no_numbers_have_the_hosts_metadata(twins: Any, dtype: torch.dtype, special: float) -> None:
    """Moments of such keys are NaN or infinite in both; the sign of NaN does not count."""
    one = twins(2, 64, dtype, special=special)
    one.extend({1: 200, 2: 7})
    one.extend({1: 1, 2: 30})
    assert one.equal(*TENSORS)
    for layer in range(2):
        torch.testing.assert_close(one.host.page_moments(layer), one.device.page_moments(layer), equal_nan=True)


def test_the_pages_of_a_chunk() -> None:
    pages = torch.tensor([9, 4, 7, 5], dtype=torch.int32)

    def of(start: int, stop: int, offset: int = 100) -> list[list[int]]:
        return chunk_pages(ExtendRequest(1, start, stop, offset, pages)).tolist()

    assert of(0, 16) == [[9, 0, 16, 100]]
    assert of(0, 17) == [[9, 0, 16, 100], [4, 0, 1, 116]]
    assert of(20, 22) == [[4, 4, 6, 100]]
    assert of(31, 64) == [[4, 15, 16, 100], [7, 0, 16, 101], [5, 0, 16, 117]]
    assert of(32, 32) == []


@pytest.mark.parametrize(
    ("pages", "start", "stop", "sentence"),
    [
        ([3, 61], 0, 20, "logical page 1 has the page id 61"),
        ([0], 0, 1, "logical page 0 has the page id 0"),
        ([3], 10, 17, "pages given hold positions 0 to 16"),
    ],
)
def test_a_page_that_is_none_is_refused_before_anything_is_written(
    twins: Any, pages: list[int], start: int, stop: int, sentence: str
) -> None:
    one = twins(1, 32, torch.float32)
    bad = ExtendRequest(1, start, stop, 0, torch.tensor(pages, dtype=torch.int32))
    with pytest.raises(ValueError, match=sentence):
        one.writer.begin([bad], lambda *_: None)
    with pytest.raises(ValueError, match=sentence):
        one.device.adopt(0, bad.pages, start, stop - start)
    with pytest.raises(ValueError, match="no layer 2"):
        one.device.adopt(2, torch.ones(1, dtype=torch.int32), 0, 16)
    with pytest.raises(ValueError, match="positions"):
        one.device.adopt(0, torch.ones(2, dtype=torch.int32), 20, -3)
    assert torch.equal(one.host.memory, one.device.memory)
