"""The adapter of FlashInfer, with FlashInfer in torch behind it: results, lists, base of the LSE."""

from __future__ import annotations

import importlib.resources
import inspect
import math
import re
import sys

import fake_flashinfer
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from world import World

from fluxion_sglang.device import flashinfer as door
from fluxion_sglang.device import maker
from fluxion_sglang.device.library import DeviceError
from fluxion_sglang.executor.merge import attention_with_lse
from fluxion_sglang.kv.placement import PAGE, Placement

MODULE = door.module.__wrapped__


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "module", lambda: fake_flashinfer)


def test_the_fake_takes_what_flashinfer_takes() -> None:
    real = pytest.importorskip("flashinfer")
    pairs = [(real.single_prefill_with_kv_cache, fake_flashinfer.single_prefill_with_kv_cache)]
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"):
        wrapper, fake_wrapper = getattr(real, name), getattr(fake_flashinfer, name)
        plan = wrapper._plan if hasattr(wrapper, "_plan") else wrapper.plan
        pairs += [(wrapper.__init__, fake_wrapper.__init__), (wrapper.run, fake_wrapper.run), (plan, fake_wrapper.plan)]
    decode = inspect.getsource(real.BatchDecodeWithPagedKVCacheWrapper.plan)
    for function, stand_in in pairs:
        there = inspect.signature(inspect.unwrap(function)).parameters
        for name, parameter in inspect.signature(stand_in).parameters.items():
            assert name in there or name in decode, (function, name)
            positional = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            if positional and name in there:
                assert list(there).index(name) == list(inspect.signature(stand_in).parameters).index(name)


@settings(max_examples=examples(60), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=5),
    sinks=st.sampled_from([16, 64]), window=st.sampled_from([16, 128, 256]), heads=st.integers(1, 3),
)  # fmt: skip
def test_lists_hold_the_residents_in_order_of_position(lengths: list[int], sinks: int, window: int, heads: int) -> None:
    placement, window_rows = Placement(sinks, window), 9
    rows = torch.arange(len(lengths)) + 2
    indptr, indices, last = door.resident_lists(placement, rows, torch.tensor(lengths), heads, window_rows)
    assert len(indptr) == len(lengths) * heads + 1 and len(last) == len(lengths) * heads
    for i, (row, n) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        positions = [*range(min(sinks, n)), *range(placement.window_start(n), n)]
        want = [placement.slot(position) for position in positions]
        for head in range(heads):
            own = indices[indptr[i * heads + head] : indptr[i * heads + head + 1]].tolist()
            base = (head * window_rows + row) * placement.slot_pages
            slots = [(page - base) * PAGE + t for page in own for t in range(PAGE)]
            assert slots[: len(slots) - PAGE + int(last[i * heads + head])] == want


def test_divided_lists_are_the_sinks_then_the_windows() -> None:
    placement, rows = Placement(64, 128), torch.tensor([2, 3, 4, 5, 6])
    lengths = torch.tensor([5, 64, 65, 150, 900])
    whole = door.resident_lists(placement, rows, lengths, 2, 9)
    indptr, indices, last = door.resident_lists(placement, rows, lengths, 2, 9, divided=True)
    n = 2 * len(lengths)
    assert len(indptr) == 2 * n + 1 and len(last) == 2 * n
    for i, length in enumerate(lengths.repeat_interleave(2).tolist()):
        sinks, window = (indices[indptr[at] : indptr[at + 1]] for at in (i, n + i))
        assert torch.equal(torch.cat([sinks, window]), whole[1][whole[0][i] : whole[0][i + 1]])
        assert (len(sinks) - 1) * PAGE + int(last[i]) == min(length, 64)
        assert len(window) == 0 if length <= 64 else int(last[n + i]) == int(whole[2][i])


@pytest.mark.parametrize("group", [1, 4, 5, 7, 8])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_residents_equal_the_reference(group: int, scale: float) -> None:
    """Lengths before and within the window, on and off page boundaries, and with a wrapped ring."""
    world = World(layers=1, group=group, rows=8, tokens=16384, seed=group, dtype=torch.bfloat16)
    lengths = {2: 5, 3: 64, 5: 333, 1: 336, 4: 1201, 6: 2000}
    for row, length in lengths.items():
        world.extend(row, length)
    rows, n = torch.tensor(list(lengths)), torch.tensor(list(lengths.values()))
    residents = door.Residents(
        world.placement, world.rows, q_heads=world.heads * group, kv_heads=world.heads, head_dim=world.dim,
        dtype=torch.bfloat16, scale=world.scale, device=torch.device("cpu"),
    )  # fmt: skip
    residents.plan(rows, n)
    q = world.randn(len(lengths), world.heads * group, world.dim)
    o, lse = residents.run(q, world.windows.layers[0], world.scale * scale)
    for i, (row, length) in enumerate(lengths.items()):
        there = [*range(min(64, length)), *range(world.placement.window_start(length), length)]
        k = world.keys[row][0][there].double().repeat_interleave(group, 1)
        v = world.values[row][0][there].double().repeat_interleave(group, 1)
        scores = torch.einsum("hd,shd->hs", q[i].double(), k) * world.scale * scale
        assert torch.allclose(o[i].double(), torch.einsum("hs,shd->hd", scores.softmax(-1), v), atol=2e-2)
        assert torch.allclose(lse[i].double() * math.log(2), scores.logsumexp(-1), atol=1e-4)


def test_prefill_attends_to_every_key() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(9, 6, 64), torch.randn(17, 2, 64), torch.randn(17, 2, 64)
    want = attention_with_lse(q, k.transpose(0, 1), v.transpose(0, 1), 0.1, causal=False)
    o, lse = door.prefill(q, k, v, 0.1)
    assert torch.allclose(o, want[0], atol=1e-5) and torch.allclose(lse * math.log(2), want[1], atol=1e-5)


@pytest.mark.parametrize("spans", [[(0, 5)], [(0, 1), (1, 33)], [(4, 7), (7, 8), (11, 30)]])
def test_chunks_attend_to_themselves_and_to_nobody_else(spans: list[tuple[int, int]]) -> None:
    """Tokens that belong to no request may lie before, between and behind the chunks."""
    torch.manual_seed(2)
    q, k, v = torch.randn(40, 6, 64), torch.randn(40, 2, 64), torch.randn(40, 2, 64)
    chunks = door.Chunks(q_heads=6, kv_heads=2, head_dim=64, dtype=torch.float32, scale=0.1, device=torch.device("cpu"))
    for _ in range(2):  # passes follow one another
        chunks.plan([slice(*span) for span in spans])
        out = torch.full_like(q, torch.nan)
        lse = chunks.run(q, k, v, out) * math.log(2)
        assert bool(out[spans[-1][1] :].isnan().all())
        for first, stop in spans:
            own = slice(first, stop)
            want = attention_with_lse(q[own], k[own].transpose(0, 1), v[own].transpose(0, 1), 0.1, causal=True)
            assert torch.allclose(out[own], want[0], atol=1e-5) and torch.allclose(lse[own], want[1], atol=1e-5)


def test_a_gpu_without_flashinfer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher refuses it without importing it; if it is installed but broken, the serving process refuses it."""
    monkeypatch.setattr(maker, "load", lambda backend: None)
    monkeypatch.setattr(door.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        DeviceError, match=r"FlashInfer.* does not import \(it is not installed\); install .*--device cpu"
    ):
        maker.Cuda()
    monkeypatch.setattr(door.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(door, "module", MODULE)
    with pytest.raises(DeviceError, match="does not import"):
        maker.Cuda().select()


def test_what_flashinfer_serves() -> None:
    assert door.serves("cuda", torch.bfloat16, 128)
    assert not door.serves("sim", torch.bfloat16, 128)
    assert not door.serves("cuda", torch.float32, 128) and not door.serves("cuda", torch.bfloat16, 96)


def test_groups_are_those_of_the_installed_version() -> None:
    """Group sizes of its decode kernels without tensor cores."""
    pytest.importorskip("flashinfer")
    folder = importlib.resources.files("flashinfer") / "data" / "include" / "flashinfer"
    macro = (folder / "utils.cuh").read_text().partition("#define DISPATCH_GQA_GROUP_SIZE")[2].partition("#define")[0]
    assert tuple(map(int, re.findall(r"group_size == (\d+)", macro))) == door._CUDA_CORE_GROUPS
