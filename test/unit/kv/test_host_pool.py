"""Size limits of the host pool, and the errors beyond them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.kv.host_pool import GIB, KVShape
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.sglang.memory.capacity import (
    AUTO_FRACTION,
    EXPLICIT_FRACTION,
    STATES_FRACTION,
    plan_states,
    plan_tokens,
)

SHAPE = KVShape(layers=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)


@pytest.mark.parametrize("kv_heads", [1, 8, 16, 64, 128])
def test_large_models_are_sized_right(kv_heads: int) -> None:
    """The search probes pools of any size, so nothing may overflow."""
    shape = KVShape(layers=32, kv_heads=kv_heads, head_dim=128, dtype=torch.bfloat16)
    tokens = plan_tokens(FluxionConfig(), shape, 40 * GIB)
    # K and V, and at least the level-0 metadata and the moments of every page.
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
    """They are not part of the size, but use the same memory."""
    shape = replace(SHAPE, sketched=sketched)
    with pytest.raises(ConfigError) as caught:
        plan_tokens(FluxionConfig(host_tokens=10**9, canary=0.01), shape, 2 * GIB)
    fits = int(str(caught.value).split("host_tokens=")[-1].split()[0])
    heads, pages = shape.layers * shape.kv_heads, fits // PAGE + 1
    sums = heads * (pages * (PAGE + sketched) + sum(-(-pages // size) for size in (1, 2, 4, 8))) * 8
    room = EXPLICIT_FRACTION * 2 * GIB - shape.pool_bytes(fits)
    assert 0.99 * sums < room < 1.02 * sums + shape.pool_bytes(PAGE)


@settings(deadline=None)
@given(gib=st.floats(0.5, 100), mib=st.floats(0.05, 60))
def test_states_and_pool_share_the_memory(gib: float, mib: float) -> None:
    """Together they take the requested memory, up to one state and some pages."""
    each, config = int(mib * 2**20), FluxionConfig(host_memory_gb=gib)
    least = int(gib * GIB * STATES_FRACTION) // each - 1
    if least < 1:
        return
    states = (plan_states(config, SHAPE, 1000 * GIB, each, 1) + 1) * each
    tokens = plan_tokens(config, SHAPE, 1000 * GIB, states)
    assert states <= gib * GIB * STATES_FRACTION < states + each
    assert states + SHAPE.pool_bytes(tokens) <= gib * GIB < states + SHAPE.pool_bytes(tokens + 16 * 300)


def test_states_beside_a_pool_of_so_many_tokens() -> None:
    states = plan_states(FluxionConfig(host_tokens=100_000), SHAPE, 40 * GIB, 1 << 20, 5)
    half = SHAPE.pool_bytes(100_000) / 2
    assert half - (2 << 20) <= (states + 1) << 20 <= half
    assert plan_states(FluxionConfig(host_tokens=4096), SHAPE, 40 * GIB, 48 << 20, 5) == 40, "of eight requests"
    default = plan_states(FluxionConfig(), SHAPE, 40 * GIB, 1 << 20, 5)
    assert abs(((default + 1) << 20) - 40 * GIB * AUTO_FRACTION * STATES_FRACTION) <= 1 << 20
    with pytest.raises(ConfigError, match="pass host_tokens="):
        plan_tokens(FluxionConfig(host_tokens=4992), SHAPE, SHAPE.pool_bytes(6000), SHAPE.pool_bytes(3000))


def test_no_room_for_the_states_of_a_request_is_refused_with_what_is_enough() -> None:
    with pytest.raises(
        ConfigError, match=r"room for 0 states .* needs 5; pass host_memory_gb=([\d.]+) or more"
    ) as caught:
        plan_states(FluxionConfig(host_memory_gb=0.1), SHAPE, 40 * GIB, 48 << 20, 5)
    enough = float(str(caught.value).split("host_memory_gb=")[-1].split()[0])
    assert plan_states(FluxionConfig(host_memory_gb=enough + 0.001), SHAPE, 40 * GIB, 48 << 20, 5) >= 5


def test_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="fewer than one request's sinks and window"):
        plan_tokens(FluxionConfig(host_memory_gb=0.0001), SHAPE, GIB)
    with pytest.raises(ConfigError, match="free memory"):
        plan_tokens(FluxionConfig(), SHAPE, 2**16)
