"""The canary finds all corruption of the host pool, and ends the requests that read it and no others."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from native_world import NativeWorld, Request

from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.native import AttentionLayer, CorruptMemory, NativePool, Workers, library
from fluxion_sglang.policy import parse_spec
from fluxion_sglang.policy.testing import Request as Own
from fluxion_sglang.policy.testing import Rig
from fluxion_sglang.sglang.containment.passes import FailureGuard

DTYPES = [torch.float32, torch.bfloat16]


def watched(**options: Any) -> NativeWorld:
    return NativeWorld(canary=1.0, **options)


def flip(tensor: torch.Tensor, byte: int, bit: int) -> None:
    """Flip a bit of a contiguous view of the pool."""
    tensor.view(torch.uint8).flatten()[byte] ^= 1 << bit


def decode(
    world: NativeWorld, requests: list[Request], blk: int = 16, budget: float = 1.0, resident_first: bool = False
) -> dict[int, str]:
    """Execute a step, check the output of all requests that the canary does not end, and return the ended ones with
    messages."""
    plan = world.plan(requests, blk, budget)
    plan.owner = torch.zeros_like(plan.blk)
    world.begin_step(requests)
    _, q, out = world.begin_layer(requests, 0, plan, resident_first)
    world.engine.layer_finish()
    corrupt = world.engine.corrupt()
    for b in corrupt:
        assert not out[b].any(), "what was read is no result"
    if budget == 1:
        kept = [b for b in range(len(requests)) if b not in corrupt]
        world.check(out[kept], world.expected(requests, 0, q, world.everything(requests))[kept])
    return corrupt


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_of_a_tile_is_watched(dtype: torch.dtype) -> None:
    """Each byte of a tile in turn, one bit of it: a decode step and a sweep find it; once restored, neither does."""
    world = watched(dtype=dtype, heads=1)
    request = world.add(300)
    page = request.pages[7]
    tile = world.pool.tensor("tiles", 0)[0, page]
    for byte in range(tile.numel() * dtype.itemsize):
        flip(tile, byte, byte % 8)
        _, found = world.pool.sweep()
        assert len(found) == 1 and f"page {page}, token {byte // dtype.itemsize // world.dim % PAGE})" in found[0]
        if byte % 16 == 0:  # a step takes one token of room
            corrupt = decode(world, [request])
            assert corrupt.keys() == {0} and f"layer 0, KV head 0, page {page}" in corrupt[0]
            assert corrupt[0].endswith(".") and "flush_cache" in corrupt[0]
        flip(tile, byte, byte % 8)
    assert world.pool.sweep()[1] == [] and decode(world, [request]) == {}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", range(4))
def test_every_byte_of_metadata_is_watched(level: int, dtype: torch.dtype) -> None:
    world = watched(dtype=dtype, heads=1)
    request = world.add(500)
    last = request.pages[(16 << level) // PAGE * 2 - 1 if level else 9]  # the last page of a block in the middle
    entry = world.pool.tensor(f"meta{level}", 0)[0, last >> level]
    if level:
        assert int(world.pool.tensor(f"tag{level}", 0)[last >> level]) == last
    for byte in range(entry.numel() * dtype.itemsize):
        flip(entry, byte, byte % 8)
        assert len(world.pool.sweep()[1]) == 1
        if byte % 16 == 0:
            corrupt = decode(world, [request], 16 << level, 0.3)
            assert corrupt.keys() == {0} and f"block of {16 << level} tokens" in corrupt[0]
        flip(entry, byte, byte % 8)
    assert decode(world, [request], 16 << level, 0.3) == {} and world.pool.sweep()[1] == []


def test_every_byte_of_a_sketch_is_watched() -> None:
    """Bytes of the middle, whose sketches a step reads; each ends only the request that reads it."""
    rig = Rig(parse_spec("sketch"), canary=1.0)
    requests = [Own(seed) for seed in range(2)]
    for request in requests:
        rig.prefill(request, 700)
    page = requests[1].pages[15]
    sketch = rig.pool.tensor("sketches", 1)[0, page]
    for byte in range(sketch.numel()):
        flip(sketch, byte, byte % 8)
        assert [f"layer 1, KV head 0, page {page}, sketch" in found for found in rig.pool.sweep()[1]] == [True]
        if byte % 64 == 0:
            rig.corrupt.clear()
            rig.decode(*requests)
            assert rig.corrupt.keys() == {1} and f"page {page}, sketch of its keys" in rig.corrupt[1]
        flip(sketch, byte, byte % 8)
    rig.corrupt.clear()
    rig.decode(*requests)
    assert rig.corrupt == {} and rig.pool.sweep()[1] == []


@pytest.mark.parametrize("bytes_", [64, 96, 128, 160, 512, 1024], ids=str)
def test_every_cpu_makes_the_same_sums(bytes_: int) -> None:
    """This CPU uses its best instruction set; plain code gives the sums of other CPUs. Sizes with and without a
    remainder."""
    library()  # its objects are of the same types
    tested = tvm_ffi.load_module(Path(os.environ["FLUXION_DEVICE_LIBRARIES"]) / "libfluxion_faults.so")
    assert tested.get_function("sums_that_differ")(bytes_, 2000) == 0
    assert tested.get_function("bytes_without_a_say")(bytes_) == 0


PLACE = re.compile(
    r"layer (\d+), KV head (\d+), page (\d+), "
    r"(?:token (\d+)|metadata of its block of (\d+) tokens|sketch of its keys)\)"
)
Place = tuple[int, int, int, int]
"""Layer, head, page, and: the token of the page, or minus the block size of the entry that starts there, or SKETCH."""
SKETCH = -1


def places(sentences: list[str]) -> set[Place]:
    found = [match.groups() for match in map(PLACE.search, sentences) if match]
    return {(int(a), int(b), int(c), int(d) if d else -int(e) if e else SKETCH) for a, b, c, d, e in found}


@settings(max_examples=examples(20))
@given(data=st.data(), dim=st.sampled_from([32, 48, 80, 256]), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_whatever_is_corrupted_is_found_and_nothing_else(
    data: st.DataObject, dim: int, dtype: torch.dtype, seed: int
) -> None:
    """Corrupt one or many bytes of tokens, entries and sketches: a sweep reports each place once, and requests that
    read a corrupt token are ended."""
    world = watched(dim=dim, dtype=dtype, seed=seed, layers=2, sketched=True)
    requests = [world.add(n) for n in (340, 410, 501)]
    random = torch.Generator().manual_seed(seed)

    def draw(below: int) -> int:
        return int(torch.randint(below, (), generator=random))

    spoilt: set[Place] = set()
    tokens: set[tuple[int, int]] = set()  # of layer 0: request and position
    for _ in range(data.draw(st.integers(1, 40))):
        b, layer, head = draw(len(requests)), draw(2), draw(world.heads)
        request = requests[b]
        full = request.length // PAGE
        subject = data.draw(st.sampled_from(["token", "token", "entry", "sketch"]))
        if subject == "token":
            at = draw(request.length)
            page, place = request.pages[at // PAGE], at % PAGE
            what = world.pool.tensor("tiles", layer)[head, page, draw(2), place]
            if layer == 0:
                tokens.add((b, at))
        else:
            page, place = request.pages[draw(full)], -PAGE if subject == "entry" else SKETCH
            what = world.pool.tensor("meta0" if subject == "entry" else "sketches", layer)[head, page].flatten()
        if (layer, head, page, place) in spoilt:
            continue  # a second flip could restore it
        spoilt.add((layer, head, page, place))
        size = what.numel() * what.itemsize
        for byte in {draw(size) for _ in range(data.draw(st.sampled_from([1, 2, 9])))}:
            what.view(torch.uint8)[byte] ^= 1 + draw(255)
    _, sentences = world.pool.sweep(1000)
    assert len(sentences) == len(spoilt) and places(sentences) == spoilt
    ended = set(decode(world, requests))
    assert ended == {b for b, at in tokens if at in world.middle(requests[b])}


def test_what_belongs_elsewhere_is_not_taken_for_it() -> None:
    """Valid tiles, entries and tokens in a wrong place are corruption."""
    world = watched(heads=2, sketched=True)
    request = world.add(400)
    tiles, meta = world.pool.tensor("tiles", 0), world.pool.tensor("meta0", 0)
    a, b = request.pages[5], request.pages[6]
    for view, budget in ((tiles[0], 1.0), (meta[0], 0.3), (tiles[0, :, 0], 1.0), (tiles[:, a], 1.0)):
        before = view.clone()
        first, second = (a, b) if view.shape[0] == world.pages else (0, 1)
        view[[first, second]] = before[[second, first]]
        assert decode(world, [request], 16, budget).keys() == {0}
        view[[first, second]] = before[[first, second]]
    sketches = world.pool.tensor("sketches", 0)
    before = sketches.clone()
    sketches[:, [a, b]] = before[:, [b, a]]
    assert len(world.pool.sweep()[1]) == 2 * world.heads
    sketches[:] = before.flip(0)  # of the other head
    assert len(world.pool.sweep(1000)[1]) == world.heads * (request.length // PAGE)
    sketches[:] = before
    tag = world.pool.tensor("tag1", 0)
    at = int((tag >= 0).nonzero()[0])
    before = int(tag[at])
    tag[at] = before ^ 1
    assert world.pool.sweep()[1]
    tag[at] = before
    assert not world.pool.sweep()[1]


@pytest.mark.parametrize("budget", [1.0, 0.2])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_prompt_that_reads_it_fails(workers: int, budget: float) -> None:
    """Also in a page that is still being filled, but not in its unwritten tokens."""
    world = watched(workers=workers)
    request = world.add(700 + 5)
    pages = torch.tensor(request.pages, dtype=torch.int32)
    tiles = world.pool.tensor("tiles", 0)
    q = world.randn(5 + 60, world.q_heads, world.dim)

    def prefill() -> None:
        world.pool.attend_chunk(0, pages, 640, q, world.scale, torch.empty_like(q), budget)

    def fill() -> None:
        sinks, window = world.placement.sinks, world.placement.window
        world.pool.fill_window(0, world.windows[0], request.row, request.length, pages, sinks, window)

    steps: list[Callable[[], None]] = [prefill, fill]
    tiles[:, request.pages[-1], :, 705 % PAGE :] = torch.nan
    for step in steps:
        step()
    for logical, offset in ((0, 0), (len(request.pages) - 1, 704 % PAGE)):
        tile = tiles[1, request.pages[logical], 1, offset]
        flip(tile, 3, 2)
        for step in steps:
            with pytest.raises(CorruptMemory, match=f"KV head 1, page {request.pages[logical]}, token {offset}"):
                step()
        flip(tile, 3, 2)
    for step in steps:
        step()


def test_only_who_reads_it_ends() -> None:
    world = watched()
    requests = [world.add(n) for n in (300, 400, 500)]
    flip(world.pool.tensor("tiles", 0)[1, requests[1].pages[8]], 77, 1)
    assert decode(world, requests).keys() == {1}
    assert decode(world, [requests[0], requests[2]]) == {}


def test_a_layer_with_a_window_ends_who_reads_it() -> None:
    """Only the window is read."""
    world = watched()
    requests = [world.add(n) for n in (300, 400)]
    flip(world.pool.tensor("tiles", 0)[1, requests[1].pages[20]], 77, 1)  # tokens 320 to 335

    def newest(window: int) -> set[int]:
        world.begin_step(requests)
        q = world.randn(2, world.q_heads, world.dim)
        k, v = world.randn(2, 2, world.heads, world.dim)
        out = torch.full_like(q, torch.nan)
        world.engine.layer_newest(AttentionLayer(world.engine, 0, world.scale, newest=window), q, k, v, out)
        assert out.isfinite().all()
        return {b for b in world.engine.corrupt() if not out[b].any()}

    assert newest(64) == set()
    assert newest(96) == {1}


@pytest.mark.parametrize("name", ["tiles", "meta0"])
def test_what_a_block_is_made_of_is_read(name: str) -> None:
    """Corruption in the page that fills up, and in other pages of a block that ends with it: the metadata would be a
    valid sum of wrong KV."""
    world = watched()
    requests = [world.add(n) for n in (287, 287, 405)]  # the next token ends a block of 32
    for b, other in ((0, 1), (1, 0)):
        page = requests[b].pages[17 if name == "tiles" else 16]
        place = world.pool.tensor(name, 0)[1, page]
        flip(place, 77, 1)
        corrupt = decode(world, requests)
        assert corrupt.keys() == {b} and f"KV head 1, page {page}" in corrupt[b]
        flip(place, 77, 1)
        assert world.pool.sweep()[1] == [], "unchanged memory is not reported as corrupt"
        for request in requests:  # the token is written again
            request.keys[0], request.values[0] = request.keys[0][:-1], request.values[0][:-1]
        assert int(world.pool.tensor("tag1", 0)[requests[other].pages[17] >> 1]) >= 0
    assert decode(world, requests) == {}


@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("name", ["tiles", "meta0"])
def test_a_prompt_whose_blocks_are_made_of_it_fails(name: str, head: int) -> None:
    """The chunk is written completely, other heads by the same worker included: no tag may point at another request's
    entry."""
    world = watched(workers=1)
    request = world.add(280)
    pages = torch.tensor([*request.pages, *(world.free.pop() for _ in range(6))], dtype=torch.int32)
    k, v = (world.randn(90, world.heads, world.dim) for _ in range(2))
    page = int(pages[17 if name == "tiles" else 16])
    place = world.pool.tensor(name, 0)[head, page]
    flip(place, 77, 1)
    with pytest.raises(CorruptMemory, match=f"layer 0, KV head {head}, page {page},"):
        world.pool.append(0, pages, 280, k, v)
    flip(place, 77, 1)
    for last in (17, 19, 21):
        assert int(world.pool.tensor("tag1", 0)[pages[last] >> 1]) == pages[last]
    tiles = world.pool.tensor("tiles", 0)[:, pages].permute(2, 1, 3, 0, 4).reshape(2, -1, world.heads, world.dim)
    assert torch.equal(tiles[:, 280:370], torch.stack([k, v]))
    assert world.pool.sweep()[1] == []
    world.pool.append(0, pages, 280, k, v)


@pytest.mark.parametrize("resident_first", [False, True])
def test_who_makes_a_block_of_it_ends_alone(resident_first: bool) -> None:
    """With and without a policy that looks first. Requests that are read together with it have not read its new
    tokens."""
    world = watched(share_prefixes=True)
    parent = world.add(607)
    requests = [parent, world.add(607, parent, 592), world.add(640, parent, 592)]
    page = parent.pages[37]
    flip(world.pool.tensor("tiles", 0)[0, page], 5, 5)
    assert decode(world, requests, resident_first=resident_first).keys() == {0}
    assert decode(world, requests[1:], resident_first=resident_first) == {}, "the next step is another one"


def test_all_who_are_read_together_end() -> None:
    world = watched(share_prefixes=True)
    parent = world.add(600)
    requests = [parent, world.add(700, parent, 592), world.add(640, parent, 592), world.add(500)]
    flip(world.pool.tensor("tiles", 0)[0, parent.pages[20]], 5, 5)
    assert decode(world, requests).keys() == {0, 1, 2}


@pytest.mark.parametrize("spec", ["anchor", "fixed:16:0.2"])
def test_who_looks_before_it_plans_ends_alone_too(spec: str) -> None:
    """Anchors and measurements read all metadata, whatever the tasks of the step read."""
    rig = Rig(parse_spec(spec), canary=1.0)
    requests = [Own(seed) for seed in range(2)]
    for request in requests:
        rig.prefill(request, 700)
    for level in range(4):
        flip(rig.pool.tensor(f"meta{level}", 1)[0, requests[1].pages[15] >> level], 9, 6)
    steps = [rig.decode(*requests)[0] for _ in range(3)]
    assert set(rig.corrupt) <= {1} and (not spec.startswith("fixed") or 1 in rig.corrupt)
    alone, other = Rig(parse_spec(spec)), Own(0)
    alone.prefill(other, 700)
    torch.testing.assert_close(torch.stack(steps), torch.stack(alone.run(other, 3)))


def test_a_chunk_that_reads_it_ends_its_request_alone() -> None:
    rig = Rig(parse_spec("full"), canary=1.0)
    requests = [Own(seed) for seed in range(2)]
    for request in requests:
        rig.prefill(request, 320)
    flip(rig.pool.tensor("tiles", 0)[1, requests[1].pages[3]], 77, 1)
    chunks = []
    for place, request in enumerate(requests):
        request.pages += [rig.free_pages.pop() for _ in range(2)]
        chunks.append(ExtendRequest(request.row, 320, 352, 32 * place, request.page_list))
    rig.device.begin_extend(chunks, None)
    q, k, v = (torch.cat([getattr(r, x)[0, 320:352] for r in requests]) for x in "qkv")
    out = rig.device.extend(0, q, k, v, 32**-0.5)
    assert set(rig.corrupt) == {1} and "page" in rig.corrupt[1]
    assert out[:32].abs().sum() > 0 and not out[32:].any()


@settings(max_examples=examples(15))
@given(data=st.data(), seed=st.integers(0, 2**16), dtype=st.sampled_from(DTYPES))
def test_nothing_is_found_where_nothing_is_wrong(data: st.DataObject, seed: int, dtype: torch.dtype) -> None:
    """Requests come, share prefixes, decode, go, and pass on their pages: no false alarm from reads or sweeps."""
    world = watched(seed=seed, dtype=dtype, share_prefixes=True, pages=120, sketched=True)
    requests: list[Request] = []
    for _ in range(data.draw(st.integers(4, 14))):
        action = data.draw(st.sampled_from(["add", "fork", "decode", "decode", "free"]))
        if action in ("add", "fork") and world.free_rows and len(world.free) > 40:
            parent = data.draw(st.sampled_from(requests)) if action == "fork" and requests else None
            shared = parent.length // PAGE * PAGE if parent else 0
            requests.append(world.add(shared + data.draw(st.integers(1, 300)), parent, shared))
        elif action == "decode" and requests and len(world.free) > len(requests):
            blk, budget = data.draw(st.sampled_from([(16, 1.0), (32, 0.2), (64, 0.3), (128, 0.1), (1, 0.1)]))
            assert decode(world, requests, blk, budget) == {}
        elif action == "free" and requests:
            gone = requests.pop(data.draw(st.integers(0, len(requests) - 1)))
            world.free += [p for p in gone.pages if all(p not in other.pages for other in requests)]
            world.free_rows.append(gone.row)
        checked, found = world.pool.sweep()
        assert found == [] and checked >= sum(request.length for request in requests[:1])
    assert world.pool.canary_counts()["canary_mismatches"] == 0


@pytest.mark.parametrize("share", [0.3, 0.05])
def test_a_share_of_the_reads_is_checked(share: float) -> None:
    world = NativeWorld(canary=share, heads=4)
    request = world.add(2000)
    for _ in range(60):
        decode(world, [request])
    reads = 60 * world.heads * len(world.middle(request)) / PAGE
    assert world.pool.canary_counts()["canary_checks"] == pytest.approx(share * reads, rel=0.15)


def test_without_a_canary_nothing_is_checked() -> None:
    world = NativeWorld()
    request = world.add(300)
    flip(world.pool.tensor("tiles", 0)[0, request.pages[7]], 0, 0)
    plan = world.plan([request])
    world.begin_step([request])
    world.begin_layer([request], 0, plan)
    world.engine.layer_finish()
    assert world.engine.corrupt() == {} and world.pool.canary_counts() == {"canary_checks": 0, "canary_mismatches": 0}
    with pytest.raises(ValueError, match="no canary"):
        world.pool.sweep()
    with pytest.raises(ValueError, match=r"canary is 1\.5"):
        NativePool(
            Workers(1), layers=1, kv_heads=1, pages=2, head_dim=32, dtype=torch.float32, sink_pages=0, canary=1.5
        )


def test_a_pass_ends_the_requests_that_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from fluxion_sglang.sglang.containment.passes import forward_batch_generation

    guard = FailureGuard()
    with pytest.raises(RuntimeError, match="KV in host memory"):
        guard.lose(0, "KV in host memory is not what was written there.")
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(tp_size=1, pp_size=1))
    worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=SimpleNamespace(failures=guard)))
    for lost in ({1: "first"}, {}):

        def original(worker: Any, batch: Any, lost: dict[int, str] = lost) -> None:
            for request, reason in lost.items():
                guard.lose(request, reason)
                guard.lose(request, "second")

        requests = [SimpleNamespace(to_finish=None, skip_radix_cache_insert=False) for _ in range(3)]
        forward_batch_generation(original, worker, SimpleNamespace(reqs=requests))
        assert [i for i, r in enumerate(requests) if r.to_finish is not None] == list(lost)
        assert all(requests[i].to_finish.message == reason for i, reason in lost.items())
