"""SGLang's linker to files: pages that return to the pool equal, byte for byte, the appended ones."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.kv.host_pool import HostPool, KVShape
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.sglang.memory import disk
from fluxion_sglang.sglang.memory.disk import DiskLinker
from fluxion_sglang.sglang.memory.pools import FluxionKVPool

PAGES = 80
HEADS, DIM, LAYERS = 2, 32, 3


class World:
    """A pool with its linker; `restart` returns another one with the same folder."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, int8: bool = False, weights: str = "a", canary: float = 0.0
    ) -> None:
        self.folder, self.dtype, self.int8 = folder, dtype, int8
        config = FluxionConfig(disk={"folder": str(folder), "gb": 0.1}, workers=2, canary=canary)
        shape = KVShape(LAYERS, HEADS, DIM, dtype, int8, sketched=True)
        self.pool = FluxionKVPool(shape, PAGES * PAGE, 2, config, "cpu", 0, 0, 1)
        self.host.memory.fill_(255)  # NaN, and the tag of nothing
        self.weights = weights
        self.pool.manifest = lambda: {"weights": self.weights}
        self.pool.weights = lambda: self.weights
        allocator = SimpleNamespace(get_kvcache=lambda: self.pool)
        args = SimpleNamespace(tp_size=1, nnodes=1)
        params: Any = SimpleNamespace(token_to_kv_pool_allocator=allocator)
        self.linker = DiskLinker(args, params, components=set(), extra_config={}, forward_stream=None)

    @property
    def host(self) -> HostPool:
        return self.pool.host

    def restart(self) -> World:
        self.linker.close()
        return World(self.folder, self.dtype, self.int8)

    def fill(self, pages: list[int], seed: int, upto: int | None = None, chunk: int = 100) -> None:
        """A prompt on these pages, the first `upto` of them appended in chunks."""
        tokens, end = len(pages) * PAGE, (len(pages) if upto is None else upto) * PAGE
        for layer in range(LAYERS):
            random = torch.Generator().manual_seed(1000 * seed + layer)
            k, v = (torch.randn(tokens, HEADS, DIM, generator=random).to(self.dtype) for _ in "kv")
            for start in range(0, end, chunk):
                part = slice(start, min(start + chunk, end))
                self.host.append(layer, ids(pages), start, k[part], v[part])

    def offload(self, pages: list[int], first: int = 0) -> bool:
        assert self.linker.offload([transfer(range(first, first + len(pages)), pages)])
        while not self.linker.num_completed_offloads():
            pass
        return self.linker.pop_completed_offload()

    def load(self, pages: list[int], first: int = 0) -> bool:
        assert self.linker.load("a", [transfer(range(first, first + len(pages)), pages)])
        return self.linker.finish_layer_wise_loading(self.linker.start_layer_wise_loading())

    def path(self, pages: list[int]) -> list[torch.Tensor]:
        """All bytes of a prompt's full pages in the pool."""
        found = []
        for layer in range(LAYERS):
            for name in ("tiles", "meta0", "moments", "sketches"):
                found.append(self.host.tensor(name, layer)[:, pages])
            for level in (1, 2, 3):
                lasts = pages[(1 << level) - 1 :: 1 << level]
                sinks = self.host.placement.sink_pages
                lasts = [page for i, page in enumerate(lasts) if ((i + 1) << level) > sinks]
                places = [page >> level for page in lasts]
                tags = self.host.tensor(f"tag{level}", layer)[places]
                # If two entries collide, the slot holds the later one.
                mine = [place for place, tag, last in zip(places, tags.tolist(), lasts, strict=True) if tag == last]
                found.append(torch.tensor(mine))
                found.append(self.host.tensor(f"meta{level}", layer)[:, mine])
        return [one.contiguous().view(torch.uint8) for one in found]


def ids(pages: list[int]) -> torch.Tensor:
    return torch.tensor(pages, dtype=torch.int32)


def transfer(names: Any, pages: list[int]) -> PoolTransfer:
    slots = (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()
    return PoolTransfer(PoolName.KV, device_indices=slots, keys=[f"{i:064x}" for i in names])


@pytest.mark.parametrize(("dtype", "int8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
@settings(deadline=None, max_examples=examples(15))
@given(data=st.data())
def test_a_prompt_comes_back_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, int8: bool, data: st.DataObject
) -> None:
    first = World(tmp_path_factory.mktemp("disk"), dtype, int8)
    count = data.draw(st.integers(1, 36), label="pages")
    there = data.draw(st.integers(0, count - 1), label="pages of it that the tree has")
    seed = data.draw(st.integers(0, 99))
    draw = torch.Generator().manual_seed(seed)
    old, new = ((torch.randperm(PAGES, generator=draw) + 1)[:count].tolist() for _ in range(2))
    first.fill(old, seed)
    assert first.offload(old)
    again = first.restart()
    names = transfer(range(count + 1), [*old, 1])
    assert again.linker.lookup("a", [names]) == list(range(1, count + 1)), "every length up to what is there"
    # The first pages are in the tree already; the others are read into free pages.
    again.fill(new, seed, there)
    assert again.load(new[there:], there)
    again.linker.begin(ids(new), count * PAGE, count * PAGE)
    wanted = World(tmp_path_factory.mktemp("wanted"), dtype, int8)
    wanted.fill(new, seed)
    for mine, theirs in zip(again.path(new), wanted.path(new), strict=True):
        assert torch.equal(mine, theirs)
    for world in (again, wanted):
        world.linker.close()


def test_pages_that_cannot_be_read_end_their_requests_and_leave_numbers(tmp_path: Path) -> None:
    world = World(tmp_path, torch.float32)
    pages = [3, 4, 5]
    world.fill(pages, 1)
    assert world.offload(pages)
    assert world.linker.lookup("a", [transfer(range(3), pages)]) == [1, 2, 3]
    for file in tmp_path.rglob(f"{1:064x}"):
        file.unlink()
    assert not world.load(pages)
    assert not world.host.stored[:, :, pages].any()
    world.linker.begin(ids(pages), 3 * PAGE, 3 * PAGE)
    assert all(world.host.page_moments(layer)[:, pages].isfinite().all() for layer in range(LAYERS))
    assert world.linker.lookup("a", [transfer(range(3), pages)]) == [1]
    world.linker.close()


@pytest.mark.parametrize("appended", [[2 * PAGE], [2 * PAGE - 2, 2 * PAGE - 1, 2 * PAGE]], ids=["token", "draft"])
def test_a_canary_knows_what_was_read_and_not_what_was_there_before(tmp_path: Path, appended: list[int]) -> None:
    """A request may end between the read and its pass. Its pages may then belong to other requests."""
    world = World(tmp_path, torch.float32, canary=1.0)
    world.fill([3, 4], 1)
    assert world.offload([3, 4])
    world.fill([5, 6], 2)
    assert world.load([5, 6]), "over what another request has left there"
    assert world.host.sweep()[1] == [], "its pass has not begun"
    world.linker.begin(ids([5, 6]), 2 * PAGE, 2 * PAGE)
    checked, found = world.host.sweep()
    assert found == [] and checked >= LAYERS * HEADS * 4 * PAGE
    assert world.load([7, 8])
    for layer in range(LAYERS):  # the pass never began; others append to these pages, in a chunk and one by one
        k, v = torch.randn(2, 2 * PAGE, HEADS, DIM)
        if layer == 0:
            if len(appended) == 1:
                world.linker.begin(ids([9, 7, 8]), PAGE, PAGE + 3)
            world.linker.append(ids([9, 7, 8]).unsqueeze(0), torch.tensor([appended]))
        world.host.append(layer, ids([7, 8]), 0, k, v)
    world.host.tiles(0)[0, 7, 0, 0, 0] += 1
    world.linker.begin(ids([7, 8, 9]), 2 * PAGE, 2 * PAGE)
    assert len(world.host.sweep()[1]) == 1, "it is not vouched for what is there"
    world.linker.close()


def test_what_is_queued_can_be_called_off(tmp_path: Path) -> None:
    world = World(tmp_path, torch.float32)
    world.fill([3], 1)
    world.offload([3])
    assert world.linker.start_layer_wise_loading() == -1, "nothing is queued"
    assert world.linker.load("a", [transfer([0], [7])]) and world.linker.cancel_queued_load("a")
    assert not world.linker.cancel_queued_load("a") and world.linker.start_layer_wise_loading() == -1
    assert world.linker.finish_layer_wise_loading(-1)
    world.linker.close()


def test_a_flush_with_other_weights_begins_another_folder(tmp_path: Path) -> None:
    world = World(tmp_path, torch.float32)
    world.fill([3, 4], 1)
    assert world.linker.offload([transfer(range(2), [3, 4])])
    world.linker.reset()
    assert world.linker.num_completed_offloads() == 0
    assert world.linker.lookup("a", [transfer(range(2), [3, 4])]) == [1, 2], "what waited was written"
    world.weights = "b"
    world.linker.reset()
    assert world.linker.lookup("a", [transfer(range(2), [3, 4])]) == []
    world.linker.close()


def test_what_would_lock_too_much_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, go = World(tmp_path, torch.float32), Event()
    most = PAGES // disk.BACKLOG
    long, short, two = range(1, 3 * most), range(1, most), [40, 41]
    parts = [transfer(range(100 * i, 100 * i + len(part)), list(part)) for i, part in enumerate((long, short, two))]
    with monkeypatch.context() as patch:
        patch.setattr(world.linker._store, "write", lambda *_: go.wait(60))
        assert all(world.linker.offload([part]) for part in parts)
        go.set()
        results = []
        while len(results) < 3:
            if world.linker.num_completed_offloads():
                results.append(world.linker.pop_completed_offload())
    assert results == [True, False, False], "a long one alone is taken, and nothing beside it"
    assert world.offload(two, first=200)
    world.linker.close()


def test_a_full_disk_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, torch.float32)
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("os.replace", full)
        assert not world.offload([1]) and not world.offload([2], first=1)
    assert sum("cannot be written" in record.message for record in caplog.records) == 1
    assert world.offload([1])
    world.linker.close()


def test_every_parameter_counts() -> None:
    """A digest of samples: retraining changes some sample of every matrix."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.LayerNorm(32))
    before = disk.weights_digest(model)
    assert disk.weights_digest(model) == before
    for parameter in model.parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(1.01).add_(0.01)
        assert disk.weights_digest(model) != before
        parameter.data = kept
        assert disk.weights_digest(model) == before
    with torch.no_grad():  # one number of 2,048, at a place without a sample
        model[0].weight[17, 33] += 0.5
    assert disk.weights_digest(model) != before
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    assert isinstance(disk.weights_digest(model), str), "whatever its strides"


def test_large_parameters_have_a_digest() -> None:
    """float32 would round the last index of 2^24 + 4 elements up by one."""
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(torch.zeros(2**24 + 4, dtype=torch.uint8), requires_grad=False))
    assert disk.weights_digest(model) != disk.weights_digest(model, whole=False)


def test_weights_that_change_before_a_flush_are_not_taken_for_the_old_ones(tmp_path: Path) -> None:
    world = World(tmp_path, torch.float32)
    sample = "a"
    world.pool.weights = lambda: sample
    world.linker.reset()
    assert world.offload([1])
    sample = "b"
    assert not world.offload([2], first=1)
    world.linker.reset()
    assert world.offload([2], first=1)
    assert world.linker.stats()["disk_written_pages"] == 2, "over all flushes"
    world.linker.close()


def test_a_flush_that_cannot_open_the_folder_again_ends_the_files_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, torch.float32)
    assert world.offload([1])
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("os.replace", full)
        world.linker.reset()
    assert "kept in files no more" in caplog.text
    assert world.linker.lookup("a", [transfer([0], [1])]) == [] and not world.offload([1])
    world.linker.begin(ids([1]), PAGE, PAGE)
    assert world.linker.stats()["disk_written_pages"] == 1
    world.linker.reset()
    assert world.linker.lookup("a", [transfer([0], [1])]) == [1]
    world.linker.close()
