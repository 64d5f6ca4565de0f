"""FlashInfer's door, with FlashInfer in torch behind it: results, lists, base of the LSE."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace

import fake_flashinfer
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from world import World

from fluxion_sglang.device import flashinfer as door
from fluxion_sglang.kv.placement import PAGE, Placement

FAKE = SimpleNamespace(
    single_prefill_with_kv_cache=fake_flashinfer.single_prefill_with_kv_cache,
    BatchDecodeWithPagedKVCacheWrapper=fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper,
)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "module", lambda: FAKE)


def test_the_fake_takes_what_flashinfer_takes() -> None:
    real = pytest.importorskip("flashinfer")
    wrapper, fake_wrapper = real.BatchDecodeWithPagedKVCacheWrapper, FAKE.BatchDecodeWithPagedKVCacheWrapper
    pairs = [
        (real.single_prefill_with_kv_cache, FAKE.single_prefill_with_kv_cache),
        (wrapper.__init__, fake_wrapper.__init__),
        (wrapper.run, fake_wrapper.run),
        (wrapper._plan if hasattr(wrapper, "_plan") else wrapper.plan, fake_wrapper.plan),
    ]
    for function, stand_in in pairs:
        there = inspect.signature(inspect.unwrap(function)).parameters
        for name, parameter in inspect.signature(stand_in).parameters.items():
            assert name in there or name in inspect.getsource(wrapper.plan), (function, name)
            positional = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            if positional and name in there:
                assert list(there).index(name) == list(inspect.signature(stand_in).parameters).index(name)


@settings(max_examples=60, deadline=None)
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


@pytest.mark.parametrize("group", [1, 4, 5, 7, 8])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_residents_equal_the_reference(group: int, scale: float) -> None:
    """Lengths before the window, within it, on and off page boundaries, and with a ring that has come round."""
    world = World(layers=1, group=group, rows=8, tokens=16384, seed=group, dtype=torch.bfloat16)
    lengths = {2: 5, 3: 64, 5: 333, 1: 336, 4: 1201, 6: 2000}
    for row, length in lengths.items():
        world.extend(row, length)
    rows, n = torch.tensor(list(lengths)), torch.tensor(list(lengths.values()))
    residents = door.Residents(
        world.placement,
        world.rows,
        q_heads=world.heads * group,
        kv_heads=world.heads,
        head_dim=world.dim,
        dtype=torch.bfloat16,
        scale=world.scale,
        device=torch.device("cpu"),
    )
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


@pytest.mark.parametrize("causal", [False, True])
def test_prefill_gives_the_natural_log(causal: bool) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(9, 6, 64), torch.randn(9, 2, 64), torch.randn(9, 2, 64)
    from fluxion_sglang.executor.merge import attention_with_lse

    want = attention_with_lse(q, k.transpose(0, 1), v.transpose(0, 1), 0.1, causal)
    for got, wanted in zip(door.prefill(q, k, v, 0.1, causal), want, strict=True):
        assert torch.allclose(got, wanted, atol=1e-5)


def test_what_flashinfer_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert door.serves(torch.bfloat16, 128)
    assert not door.serves(torch.float32, 128) and not door.serves(torch.bfloat16, 96)
    monkeypatch.setattr(door, "module", lambda: None)
    assert not door.serves(torch.bfloat16, 128)
