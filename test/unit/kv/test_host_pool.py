"""How large the host pool may be, and what is said when it may not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.kv.host_pool import GIB, KVShape
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.sglang.memory.capacity import AUTO_FRACTION, EXPLICIT_FRACTION, plan_tokens

SHAPE = KVShape(layers=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)


@pytest.mark.parametrize("kv_heads", [1, 8, 16, 64, 128])
def test_large_models_are_sized_right(kv_heads: int) -> None:
    """The search probes pools of any size: nothing on the way may overflow."""
    shape = KVShape(layers=32, kv_heads=kv_heads, head_dim=128, dtype=torch.bfloat16)
    tokens = plan_tokens(FluxionConfig(), shape, 40 * GIB)
    # K and V, and at least the metadata of level 0 and the moments of every page.
    least = 32 * kv_heads * (2 * 128 * 2 + (2 * 128 * 2 + (2 * 128 + 8) * 8) / 16)
    assert 0.9 * 20 * GIB < tokens * least < 20 * GIB
    with pytest.raises(ConfigError, match="pass host_tokens="):
        plan_tokens(FluxionConfig(host_tokens=10**9), shape, 40 * GIB)


@settings(deadline=None)
@given(st.floats(0.01, 2000))
def test_the_default_takes_its_share_and_no_more(gib: float) -> None:
    available = int(gib * GIB)
    tokens = plan_tokens(FluxionConfig(), SHAPE, available)
    assert tokens % 16 == 0
    assert SHAPE.pool_bytes(tokens) <= available * AUTO_FRACTION < SHAPE.pool_bytes(tokens + 16 * 300)


@settings(deadline=None)
@given(st.floats(0.01, 100))
def test_host_memory_gb_is_what_the_pool_takes(gib: float) -> None:
    tokens = plan_tokens(FluxionConfig(host_memory_gb=gib), SHAPE, 1000 * GIB)
    assert SHAPE.pool_bytes(tokens) <= gib * GIB < SHAPE.pool_bytes(tokens + 16 * 300)


def test_host_tokens_is_taken_as_it_is() -> None:
    assert plan_tokens(FluxionConfig(host_tokens=5000), SHAPE, GIB) == 4992


@pytest.mark.parametrize(
    "config",
    [*(FluxionConfig(host_tokens=10**digits) for digits in (9, 12, 30, 400)), FluxionConfig(host_memory_gb=50)],
)
def test_too_large_is_refused_with_the_number_that_fits(config: FluxionConfig) -> None:
    with pytest.raises(ConfigError, match=r"pass host_tokens=(\d+) or less") as error:
        plan_tokens(config, SHAPE, 2 * GIB)
    fits = int(str(error.value).split("host_tokens=")[-1].split()[0])
    assert SHAPE.pool_bytes(fits) <= 2 * GIB * EXPLICIT_FRACTION
    assert plan_tokens(FluxionConfig(host_tokens=fits), SHAPE, 2 * GIB) == fits


@pytest.mark.parametrize("sketched", [False, True])
def test_sums_of_the_canary_have_room_beside_the_largest_pool(sketched: bool) -> None:
    """They are not part of the size, and come out of the same memory."""
    shape = replace(SHAPE, sketched=sketched)
    with pytest.raises(ConfigError) as caught:
        plan_tokens(FluxionConfig(host_tokens=10**9, canary=0.01), shape, 2 * GIB)
    fits = int(str(caught.value).split("host_tokens=")[-1].split()[0])
    heads, pages = shape.layers * shape.kv_heads, fits // PAGE + 1
    sums = heads * (pages * (PAGE + sketched) + sum(-(-pages // size) for size in (1, 2, 4, 8))) * 8
    room = EXPLICIT_FRACTION * 2 * GIB - shape.pool_bytes(fits)
    assert 0.99 * sums < room < 1.02 * sums + shape.pool_bytes(PAGE)


def test_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="fewer than one request's sinks and window"):
        plan_tokens(FluxionConfig(host_memory_gb=0.0001), SHAPE, GIB)
    with pytest.raises(ConfigError, match="free memory"):
        plan_tokens(FluxionConfig(), SHAPE, 2**16)
