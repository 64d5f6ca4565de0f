"""Passes on the simulated device: extends and decode steps against exact attention, and the state after a failure."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import fake_flashinfer
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from world import World

from fluxion_sglang.device import extend, flashinfer
from fluxion_sglang.device.library import load
from fluxion_sglang.device.pinned import Pinned
from fluxion_sglang.device.step import StreamDevice
from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.policy import LayerPlan, Policy, parse_spec
from fluxion_sglang.policy import base as policy

TIMEOUT_S = 20.0


class Passes:
    """A world whose passes run on a device. `told`: what the host pool was told to have, (layer, request, queries).

    checked: whether attention of prompts is compared, which takes quadratic time.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, timeout_s: float = TIMEOUT_S, graphs: bool = False,
        copies_gb: float = 0.0, max_tokens: int = 2048, checked: bool = True, **kw: Any,
    ):  # fmt: skip
        monkeypatch.setenv("FLUXION_TASK_TIMEOUT_S", str(timeout_s))
        self.checked = checked
        self.world = world = World(**{"tokens": 16384, **kw})
        self.library = load("cuda" if world.place == "cuda" else "sim")
        self.pinned = Pinned(self.library, world.pool.memory)
        self.device = StreamDevice(
            self.library, world.pool, world.windows, world.engine, q_heads=world.heads * world.group, scale=world.scale,
            max_requests=world.rows, graphs=graphs, max_tokens=max_tokens, copies_gb=copies_gb,
        )  # fmt: skip
        self.told: list[tuple[int, int, torch.Tensor]] = []

    def _appended(self, layer: int, index: int, queries: torch.Tensor, scale: float) -> None:
        assert scale == self.world.scale
        self.told.append((layer, index, queries.clone()))

    def extend(self, counts: dict[int, int], queries: int = 1, finish: bool = True) -> None:
        """A pass over `counts` new tokens of each row, checked against exact attention."""
        world, requests, offset = self.world, [], 0
        for row, count in counts.items():
            start = world.length(row)
            pages = world.page_list(row, start + count)
            requests.append(ExtendRequest(row, start, start + count, offset, pages, queries))
            offset += count
        self.told.clear()
        self.device.begin_extend(requests, self._appended)
        asked = []
        for layer in range(world.layers):
            # Views of one wider tensor, like the model's projections.
            qkv = world.randn(offset, (world.group + 2) * world.heads, world.dim)
            q, k, v = qkv.split([world.group * world.heads, world.heads, world.heads], 1)
            there = qkv.to(world.place).split([q.shape[1], world.heads, world.heads], 1)
            out = self.device.extend(layer, *there, world.scale).cpu()
            for request in requests:
                empty = [torch.empty(0, world.heads, world.dim, dtype=world.dtype) for _ in range(world.layers)]
                for kept, new in ((world.keys, k), (world.values, v)):
                    old = kept.setdefault(request.row, list(empty))
                    old[layer] = torch.cat([old[layer], new[request.tokens]])
                if self.checked:
                    self._check_chunk(request, layer, q, out)
            asked += [(layer, i, q[request.last_queries].clone()) for i, request in enumerate(requests)]
            (qkv if world.place == "cpu" else there[0]).fill_(float("nan"))  # the memory now belongs to another layer
        if finish:
            self.device.finish()
            assert [(layer, i) for layer, i, _ in self.told] == [(a, b) for a, b, _ in asked if counts[requests[b].row]]
            for (*_, got), (*_, want) in zip(self.told, [a for a in asked if counts[requests[a[1]].row]], strict=True):
                assert torch.equal(got, want)
            for row in counts:
                self.check_memory(row)

    def _check_chunk(self, request: ExtendRequest, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        world, tokens = self.world, request.tokens
        keys, values = (kept[request.row][layer].double() for kept in (world.keys, world.values))
        keys, values = (x.repeat_interleave(world.group, 1).transpose(0, 1) for x in (keys, values))
        seen, queries = torch.arange(request.stop), q[tokens].double().transpose(0, 1)
        mask = seen[request.start :].view(-1, 1) >= seen
        want = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=world.scale).transpose(0, 1)
        assert torch.allclose(out[tokens].double(), want, atol=1e-4 if world.dtype == torch.float32 else 3e-2)

    def check_memory(self, row: int) -> None:
        """Host tiles and windows hold all tokens of the row that they should."""
        world, n = self.world, self.world.length(row)
        place = world.placement
        positions = torch.arange(n)
        pages = world.page_list(row, n).long()
        there = torch.tensor([p for p in range(n) if p < place.sinks or p >= place.window_start(n)], dtype=torch.long)
        slots = torch.tensor([place.slot(int(p)) for p in there], dtype=torch.long) + row * place.slots
        for layer in range(world.layers):
            tiles, windows = world.pool.tiles(layer), world.windows.layers[layer]
            for i, kept in enumerate((world.keys, world.values)):
                host = tiles[:, pages[positions // 16], i, positions % 16].transpose(0, 1)
                assert torch.equal(host, kept[row][layer])
                resident = windows.cpu()[:, slots // 16, i, slots % 16].transpose(0, 1)
                assert torch.equal(resident, kept[row][layer][there])

    def begin_decode(self, rows: list[int], policies: Sequence[Policy] | None = None) -> None:
        world = self.world
        self.before = {row: world.length(row) for row in rows}
        lengths = [world.length(row) + 1 for row in rows]
        table = world.table(rows, lengths)
        self.device.begin_decode(torch.tensor(rows), torch.tensor(lengths), table, policies)

    def layer(self, layer: int, rows: list[int], padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        world = self.world
        q = world.randn(len(rows) + padding, world.heads * world.group, world.dim)
        k, v = (world.randn(len(rows) + padding, world.heads, world.dim) for _ in range(2))
        got = self.device.decode(layer, *(x.to(world.place) for x in (q, k, v)), world.scale)
        return got.cpu(), world.take(rows, layer, q, k, v)

    def decode(self, rows: list[int], policies: Sequence[Policy] | None = None, exact: bool = True) -> None:
        self.begin_decode(rows, policies)
        for layer in range(self.world.layers):
            got, want = self.layer(layer, rows)
            if exact:
                assert torch.allclose(got.double(), want, atol=1e-4 if self.world.dtype == torch.float32 else 3e-2)
        self.device.finish()
        for row in rows:
            self.check_memory(row)

    def forget(self, rows: list[int]) -> None:
        """The tokens of a failed step belong to no request."""
        for row in rows:
            for kept in (self.world.keys, self.world.values):
                kept[row] = [layer[: self.before[row]] for layer in kept[row]]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Passes] = []

    def make(**kw: Any) -> Passes:
        made.append(Passes(monkeypatch, **kw))
        return made[-1]

    yield make
    while made:
        made[-1].library.inject("none", 1)
        made[-1].device.close()
        made[-1].device.close()
        made[-1].pinned.release()
        made.pop().pinned.release()
    gc.collect()  # streams end with their owners; each holds a hundred stacks, and sanitizer data for them


@pytest.mark.parametrize(
    ("dtype", "group"),
    [
        (torch.bfloat16, 7),
        *(pytest.param(*shape, marks=pytest.mark.full) for shape in ((torch.float32, 4), (torch.bfloat16, 1))),
    ],
)
def test_chunks_then_decode(passes: Any, dtype: torch.dtype, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that end in and on pages, mixed lengths, prefixes of no, one and several stages."""
    monkeypatch.setattr(extend, "STREAM_PAGES", 8)
    one = passes(dtype=dtype, group=group, seed=group, rows=6)
    one.extend({1: 5, 2: 64, 3: 333})
    one.extend({1: 700, 3: 1, 4: 1200}, queries=3)
    one.extend({3: 500, 1: 16, 2: 1, 4: 77}, queries=400)
    for _ in range(18):
        one.decode([4, 1, 3])
    one.extend({1: 40, 4: 1})
    one.decode([1, 2, 3, 4])


@settings(max_examples=examples(15), deadline=None)
@given(chunks=st.lists(st.integers(1, 400), min_size=1, max_size=4), stage=st.sampled_from([4, 8, 20]))
def test_any_chunks(chunks: list[int], stage: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(extend, "STREAM_PAGES", stage)
        one = Passes(monkeypatch, layers=1)
        try:
            for count in chunks:
                one.extend({2: count})
            one.decode([2])
        finally:
            one.device.close()


@pytest.mark.parametrize(
    ("spec", "flash"),
    [
        ("fixed:16:0.3", False),
        ("anchor", True),
        pytest.param("streaming", False, marks=pytest.mark.full),
        pytest.param("psa", True, marks=pytest.mark.full),
    ],
)
def test_policies_read_what_they_read_on_the_cpu(
    passes: Any, spec: str, flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both worlds have the same requests, keys and queries; only the processor of the residents differs."""
    monkeypatch.setattr(flashinfer, "module", lambda: fake_flashinfer)
    monkeypatch.setattr(flashinfer, "serves", lambda backend, dtype, head_dim: flash)
    lists: list[int] = []
    attend = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper.run
    monkeypatch.setattr(
        fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        "run",
        lambda self, q, *args, **kw: (lists.append(len(q)), attend(self, q, *args, **kw))[1],
    )
    one, cpu = passes(seed=5, policy=spec), World(seed=5, policy=spec, tokens=16384)
    lists.clear()
    for row, count in ((1, 900), (2, 400), (3, 1500), (4, 20)):
        one.world.extend(row, count)
        cpu.extend(row, count)
    for _ in range(4):
        want = cpu.decode([3, 1, 2, 4])
        one.begin_decode([3, 1, 2, 4])
        for layer in range(cpu.layers):
            got, _ = one.layer(layer, [3, 1, 2, 4])
            assert torch.allclose(got, want[layer][0], atol=1e-4)
        one.device.finish()
    assert one.world.engine.stats()["tasks_cpu"] == cpu.engine.stats()["tasks_cpu"]
    # Policies that observe sinks and window have a separate list for each.
    whole = 4 * cpu.heads * (2 if cpu.engine.looks() else 1)
    assert lists == ([whole] * (4 * cpu.layers) if flash else [])


def test_mixed_policies(passes: Any) -> None:
    one = passes(seed=6)
    one.extend({1: 900, 2: 700, 3: 1100})
    mixed = [parse_spec("fixed:16:0.05"), parse_spec("full"), parse_spec("anchor")]
    one.begin_decode([1, 2, 3], mixed)
    for layer in range(one.world.layers):
        got, want = one.layer(layer, [1, 2, 3])
        assert torch.allclose(got[1].double(), want[1], atol=1e-4)
    one.device.finish()


def test_a_row_heals_from_the_host(passes: Any) -> None:
    one = passes(seed=7)
    one.extend({1: 900, 2: 50})
    for windows in one.world.windows.layers:
        windows.fill_(float("nan"))
    for row in (1, 2):
        one.device.heal(row, one.world.length(row), one.world.page_list(row, one.world.length(row)))
        one.check_memory(row)
    one.decode([2, 1])


class Broken(Policy):
    """Reads everything, and acts as configured when it plans layer 1."""

    def __init__(self, trouble: Any) -> None:
        self.full, self.trouble = parse_spec("full"), trouble

    def begin_step(self, step: policy.DecodeStep) -> None:
        self.full.begin_step(step)

    def plan(self, layer: int, q: torch.Tensor, observed: policy.Observed = policy.UNSEEN) -> LayerPlan:
        if layer == 1:
            self.trouble()
        return self.full.plan(layer, q)


def fail() -> None:
    raise ValueError("the plan went wrong")


def check_that_it_goes_on(one: Passes, rows: list[int]) -> None:
    one.forget(rows)
    for row in rows:  # as for a request that is stale
        one.device.heal(row, one.world.length(row), one.world.page_list(row, one.world.length(row)))
    one.decode(rows)
    one.extend({rows[0]: 20, 4: 300})
    one.decode([*rows, 4])


def test_a_failing_layer_fails_the_pass_and_no_other(passes: Any) -> None:
    one = passes(seed=8, layers=3)
    one.extend({1: 800, 2: 400})
    for _ in range(2):
        one.begin_decode([1, 2], [Broken(fail), parse_spec("full")])
        for layer in range(3):
            one.layer(layer, [1, 2])
        with pytest.raises(RuntimeError, match="the plan went wrong"):
            one.device.finish()
        check_that_it_goes_on(one, [1, 2])


@pytest.mark.parametrize("layers", [0, 2])
def test_a_pass_that_is_given_up_where_it_is_launched(passes: Any, layers: int) -> None:
    one = passes(seed=10, layers=3)
    one.extend({1: 800, 2: 400})
    one.begin_decode([1, 2])
    for layer in range(layers):
        one.layer(layer, [1, 2])
    one.device.abort()
    one.device.finish()
    check_that_it_goes_on(one, [1, 2])


def test_a_failing_append_fails_the_pass(passes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = passes(seed=11)
    one.extend({1: 100})
    adopt = one.world.pool.adopt

    def broken(layer: int, *args: Any) -> None:
        if layer == 1:
            raise ValueError("the page is gone")
        adopt(layer, *args)

    monkeypatch.setattr(one.world.pool, "adopt", broken)
    one.extend({2: 60}, finish=False)
    with pytest.raises(ValueError, match="the page is gone"):
        one.device.finish()
    monkeypatch.setattr(one.world.pool, "adopt", adopt)
    one.decode([1])


@pytest.mark.parametrize("kind", ["launch", "lost"])
def test_a_device_that_fails_ends_the_pass(passes: Any, kind: str) -> None:
    one = passes(seed=12, layers=3)
    one.extend({1: 800, 2: 400})
    one.begin_decode([1, 2])
    one.layer(0, [1, 2])
    one.library.inject(kind, 1)
    with pytest.raises(RuntimeError):
        one.layer(1, [1, 2])
    before = one.before
    if kind == "lost":
        with pytest.raises(RuntimeError):
            one.device.abort()
        with pytest.raises(RuntimeError):
            one.begin_decode([1, 2])
            one.device.finish()
    one.library.inject("none", 1)
    one.device.abort()
    one.before = before
    check_that_it_goes_on(one, [1, 2])


def test_layers_that_are_nobodys_wait_for_nobody(passes: Any) -> None:
    one = passes(seed=13)
    one.extend({1: 800})
    before = [windows.clone() for windows in one.world.windows.layers]
    world = one.world
    for _ in range(2):
        one.device.begin_dummy()
        for layer in range(world.layers):
            q = world.randn(4, world.heads * world.group, world.dim)
            one.device.decode(layer, q, *(world.randn(4, world.heads, world.dim) for _ in range(2)), world.scale)
    assert all(torch.equal(a, b) for a, b in zip(before, world.windows.layers, strict=True))
    one.decode([1])
    one.device.begin_dummy()
    one.extend({1: 30, 2: 40})
    one.decode([2, 1])


def test_flashinfer_attends_to_prompts_and_residents(passes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With FlashInfer in torch. Every kernel has run before the first pass; an empty step needs no plan."""
    ran: list[str] = []
    for name in ("single_prefill_with_kv_cache", "_attend_to_chunks", "_attend_to_pages"):
        original = getattr(fake_flashinfer, name)

        def noted(*args: Any, name: str = name, original: Any = original, **kw: Any) -> Any:
            ran.append(name)
            return original(*args, **kw)

        monkeypatch.setattr(fake_flashinfer, name, noted)
    monkeypatch.setattr(flashinfer, "module", lambda: fake_flashinfer)
    monkeypatch.setattr(flashinfer, "serves", lambda backend, dtype, head_dim: dtype == torch.bfloat16)
    one = passes(group=4, dtype=torch.bfloat16)
    everything = {"single_prefill_with_kv_cache", "_attend_to_chunks", "_attend_to_pages"}
    assert set(ran) == everything, "the first passes would compile the others"
    assert "FlashInfer" in one.device.description
    dummy = one.world.randn(2, one.world.heads * one.world.group, one.world.dim)
    ran.clear()
    one.device.begin_dummy()
    one.device.decode(0, dummy, *(one.world.randn(2, one.world.heads, one.world.dim) for _ in range(2)), 1.0)
    assert not ran
    one.extend({1: 900, 2: 33})
    one.extend({1: 40})
    one.decode([1, 2])
    assert set(ran) == everything


def test_requests_that_are_not_there_are_left_alone(passes: Any) -> None:
    """Rows behind a step's requests pad a graph's batch."""
    one = passes(seed=14, graphs=True)
    one.extend({1: 800, 2: 300, 3: 40})
    one.decode([1, 2, 3])
    one.begin_decode([2])
    for layer in range(one.world.layers):
        got, want = one.layer(layer, [2], padding=2)
        assert torch.allclose(got[:1].double(), want, atol=1e-4)
    one.device.finish()
    for row in (1, 2, 3):
        one.check_memory(row)


def test_the_launching_thread_is_not_held_up_by_writes(passes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of a chunk are launched before the host has any; `finish` waits for all."""
    one, go = passes(seed=15), threading.Event()
    adopt = one.world.pool.adopt
    monkeypatch.setattr(one.world.pool, "adopt", lambda *args: (go.wait(10), adopt(*args)))
    one.extend({1: 100}, finish=False)
    assert not one.told
    go.set()
    one.device.finish()
    assert len(one.told) == one.world.layers
    one.check_memory(1)


def test_a_recorded_step_serves_every_step_of_its_size(passes: Any) -> None:
    """One graph of a whole step, with publish, residents and take of every layer, is replayed for other requests,
    lengths and policies, with and without padding. The CPU is told of each step before its replay."""
    one = passes(seed=16, graphs=True, layers=3)
    one.extend({1: 800, 2: 300, 3: 40})
    world, library, size = one.world, one.library, 3
    stream = library.stream_create()
    one.device._streams.main = stream
    inputs = [
        [torch.zeros(size, heads, world.dim) for heads in (world.heads * world.group, world.heads, world.heads)]
        for _ in range(world.layers)
    ]
    before = [windows.clone() for windows in world.windows.layers]
    one.device.begin_dummy()
    # As in SGLang's warm-up before recording. Outputs must stay alive until the stream has written them; torch does not
    # know of it.
    warm = [one.device.decode(layer, *inputs[layer], world.scale) for layer in range(world.layers)]
    library.stream_synchronize(stream)
    del warm
    library.graph_begin(stream)
    outs = [one.device.decode(layer, *inputs[layer], world.scale) for layer in range(world.layers)]
    graph = library.graph_end(stream)
    assert all(torch.equal(a, b) for a, b in zip(before, world.windows.layers, strict=True))
    sparse = parse_spec("anchor")
    for rows, policies in (([1, 2, 3], None), ([2], None), ([3, 1], [parse_spec("full"), sparse]), ([2, 3, 1], None)):
        one.begin_decode(rows, policies)
        for tensors in inputs:
            for tensor in tensors:
                tensor.copy_(world.randn(*tensor.shape))
        library.graph_launch(graph, stream)
        one.device.finish()
        library.stream_synchronize(stream)
        for layer, (q, k, v) in enumerate(inputs):
            for b, want in enumerate(world.take(rows, layer, q, k, v)):
                if policies is None or policies[b] is not sparse:
                    assert torch.allclose(outs[layer][b].double(), want, atol=1e-4)
        for row in rows:
            one.check_memory(row)
