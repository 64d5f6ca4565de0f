"""What is measured of a machine, and how a layer is divided by it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from rogue import Rogue

from fluxion_sglang import native
from fluxion_sglang.device import rates as calibration
from fluxion_sglang.device.crossover import crossover
from fluxion_sglang.device.rates import Rates, cache_key, cached, fit, measure
from fluxion_sglang.kv.host_pool import KVShape
from fluxion_sglang.kv.placement import Placement
from fluxion_sglang.native import Workers, function

SPEED = st.floats(1e6, 1e13)
RATES = st.builds(Rates, SPEED, SPEED, SPEED, st.floats(0, 1e-2), st.just(0.0) | SPEED, st.floats(0, 1e-2))
BYTES = st.integers(0, 1 << 36)


def times(rates: Rates, share: float, tiles: int, metadata: int, cpu_bytes: int, hits: float) -> tuple[float, float]:
    """T_cpu and T_gpu of csrc/device/costs.h."""
    cpu = (cpu_bytes + metadata + (1 - share) * tiles) / rates.cpu
    if share == 0:
        return cpu, 0.0
    ways = [(rates.launch_s, rates.link)]
    ways += [(max(rates.stage_s, rates.launch_s), rates.stage)] if rates.stage else []
    return cpu, min(launch + share * (tiles * (1 - hits) / link + tiles * hits / rates.hot) for launch, link in ways)


@given(rates=RATES, tiles=BYTES, metadata=BYTES, cpu_bytes=BYTES, hits=st.floats(0, 1))
def test_no_other_share_is_done_sooner(rates: Rates, tiles: int, metadata: int, cpu_bytes: int, hits: float) -> None:
    share = rates.share(tiles, metadata, cpu_bytes, hits)
    assert 0 <= share <= 1
    best = max(times(rates, share, tiles, metadata, cpu_bytes, hits))
    for other in (i / 50 for i in range(51)):
        assert best <= max(times(rates, other, tiles, metadata, cpu_bytes, hits)) * (1 + 1e-9) + 1e-15


@given(rates=RATES, tiles=BYTES, metadata=BYTES, cpu_bytes=BYTES, hits=st.floats(0, 1), factor=st.floats(1, 1e3))
def test_the_share_follows_the_rates(
    rates: Rates, tiles: int, metadata: int, cpu_bytes: int, hits: float, factor: float
) -> None:
    def share(rates: Rates) -> float:
        return rates.share(tiles, metadata, cpu_bytes, hits)

    here = share(rates)
    for faster in ("link", "hot", "stage"):
        assert share(replace(rates, **{faster: factor * getattr(rates, faster)})) >= here - 1e-12
    assert share(replace(rates, cpu=factor * rates.cpu)) <= here + 1e-12
    assert share(replace(rates, launch_s=factor * rates.launch_s)) <= here + 1e-12
    assert rates.share(tiles, metadata, cpu_bytes + int(factor * 1e6), hits) >= here - 1e-12
    if rates.hot >= max(rates.link, rates.stage):
        assert rates.share(tiles, metadata, cpu_bytes, min(1.0, hits * factor)) >= here - 1e-12


@given(rates=RATES, tiles=BYTES, metadata=BYTES, cpu_bytes=BYTES)
def test_layers_that_wake_nobody_are_those_of_share_0(rates: Rates, tiles: int, metadata: int, cpu_bytes: int) -> None:
    least = function("device_least_bytes")(rates.tensor())
    total = tiles + metadata + cpu_bytes
    assume(abs(total - least) > 1 + 1e-9 * least)
    assert (rates.share(tiles, metadata, cpu_bytes) > 0) <= (total >= least)
    if tiles > 0:
        assert (rates.share(tiles, metadata, cpu_bytes) > 0) >= (total >= least)


@given(rates=RATES, size=BYTES)
def test_a_stage_is_used_from_where_it_is_faster(rates: Rates, size: int) -> None:
    least = function("device_stage_from")(rates.tensor())
    in_place = rates.launch_s + size / rates.link
    staged = max(rates.stage_s, rates.launch_s) + size / rates.stage if rates.stage else math.inf
    if staged < in_place * (1 - 1e-9) - 1e-15:
        assert size >= least
    if size >= least:
        assert staged <= in_place * (1 + 1e-9) + 1e-15


def test_what_cannot_be_done_is_given_to_nobody() -> None:
    rates = Rates(1e9, 1e9, 1e9, 1e-5, 0.0, 0.0)
    assert rates.share(0, 0) == 0
    assert rates.share(1 << 30, 1 << 20) > 0
    nothing = replace(rates, link=0.0, hot=0.0)
    assert nothing.share(1 << 30, 0) == 0
    assert function("device_least_bytes")(nothing.tensor()) == 1 << 62
    assert replace(rates, launch_s=math.inf).share(1 << 30, 0) == 0
    assert replace(rates, launch_s=math.nan).share(1 << 30, 0) == 0
    assert replace(rates, cpu=0.0).share(1 << 30, 0) == 0, "no rate of the CPU: nothing to compare with"


@given(fixed=st.floats(0, 1e-3), rate=st.floats(1e6, 1e12), sizes=st.lists(st.integers(1, 1 << 30), min_size=2))
def test_a_line_is_found_again(fixed: float, rate: float, sizes: list[int]) -> None:
    assume(max(sizes) > 2 * min(sizes))
    points = [(float(n), fixed + n / rate) for n in sizes]
    got_fixed, got_rate = fit(points)
    for n, seconds in points:
        assert got_fixed + n / got_rate == pytest.approx(seconds, rel=1e-3)


def test_times_that_do_not_rise_have_no_rate() -> None:
    fixed, rate = fit([(1e6, 1e-3), (2e6, 1e-3), (4e6, 1e-3)])
    assert fixed == pytest.approx(1e-3) and rate > 1e15
    fixed, rate = fit([(1e6, 3e-3), (2e6, 2e-3), (4e6, 1e-3)])
    assert rate == math.inf, "less time for more"
    fixed, rate = fit([(1e6, 1e-3), (2e6, 2e-3), (4e6, 4e-3)])
    assert fixed == pytest.approx(0, abs=1e-6) and rate == pytest.approx(1e9, rel=1e-3)


def pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


@pytest.mark.parametrize("head_dim", [32, 80])  # of which 4 MiB have a whole number of tiles, and have not
def test_a_machine_is_measured(monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
    monkeypatch.setattr(calibration, "TASKS", (1, 2))
    monkeypatch.setattr(calibration, "TASK_PAGES", 2)
    monkeypatch.setattr(calibration, "RUNS", 3)
    monkeypatch.setattr(calibration, "CPU_BYTES", 1 << 22)
    rogue = Rogue()
    before = rogue.held
    isa = str(native.topology()["isa"])
    rates = measure(rogue.api(), Workers(1), isa, pinned, group=2, head_dim=head_dim, dtype=torch.float32, flash=True)
    assert all(value > 0 for value in (rates.cpu, rates.link, rates.hot, rates.stage)) and rates.launch_s >= 0
    assert rogue.calls("attend") == 3 * 2 * 3 and rogue.hot_reads == 2 * (1 + 2) * 2 * 3, "in place, staged, hot"
    assert rogue.held == before
    rogue.fail("attend", 2)
    with pytest.raises(RuntimeError, match="could not take a batch of attention"):
        measure(rogue.api(), Workers(1), isa, pinned, group=2, head_dim=head_dim, dtype=torch.float32, flash=True)


def test_a_device_that_hangs_is_not_waited_for_for_ever() -> None:
    rogue = Rogue()
    rogue.hang()
    q, tiles, ns = torch.zeros(1, 2, 32), torch.zeros(4, 2, 16, 32), torch.empty(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="did not finish"):
        function("time_attend")(rogue.api(), q, tiles, 4, 0, True, 0.05, ns)
    rogue.release()
    with pytest.raises(ValueError, match="cannot be timed with 4 tiles"):
        function("time_attend")(rogue.api(), q, tiles, 5, 0, True, 0.05, ns)


def test_a_measurement_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "deep" / "calibration.json"
    rates, calls = Rates(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), 0

    def count() -> Rates:
        nonlocal calls
        calls += 1
        return rates

    assert cached("a", count, file) == cached("a", count, file) == rates and calls == 1
    assert cached("b", count, file) == rates and calls == 2
    assert sorted(json.loads(file.read_text())) == ["a", "b"] and len(list(file.parent.iterdir())) == 1
    for broken in ("", "[]", '{"a": 3}', '{"a": {"cpu": 1.0}}', '{"a": {"cpu": "x"}}', "\0"):
        file.write_text(broken)
        before = calls
        assert cached("a", count, file) == rates and calls == before + 1
        assert cached("a", count, file) == rates and calls == before + 1
    # A folder that cannot be made costs a measurement, nothing else.
    assert cached("a", count, tmp_path / "deep" / "calibration.json" / "x") == rates
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration.cache_file() == tmp_path / "fluxion" / "calibration.json"


def test_a_measurement_is_good_for_one_device_and_shape() -> None:
    keys = {
        cache_key(device, workers, isa, group, dim, dtype, flash)
        for device in ("a", "b")
        for workers in (1, 2)
        for isa in ("avx2", "avx512")
        for group in (4, 7)
        for dim in (64, 128)
        for dtype in (torch.float32, torch.bfloat16)
        for flash in (False, True)
    }
    assert len(keys) == 128


LLAMA = KVShape(32, 8, 128, torch.bfloat16)
H100 = Rates(cpu=200e9, link=50e9, hot=3000e9, launch_s=20e-6, stage=0.0, stage_s=0.0)


def test_where_plain_sglang_is_faster_is_said() -> None:
    assert LLAMA.layers * LLAMA.token_bytes == 128 << 10
    short = crossover(LLAMA, Placement(), H100, context=4096, device_bytes=40 << 30)
    assert short.requests == 80 and short.plain_is_faster
    assert "80 requests of 4096 tokens fit on the device" in short.sentence()
    assert "plain SGLang is faster" in short.sentence()
    none = crossover(LLAMA, Placement(), H100, context=1 << 20, device_bytes=40 << 30)
    assert none.requests == 0 and not none.plain_is_faster
    assert "cannot serve them" in none.sentence()
    fast = crossover(
        LLAMA, Placement(), replace(H100, cpu=2000e9), context=65536, device_bytes=40 << 30, read_share=0.01
    )
    assert not fast.plain_is_faster and "even there" in fast.sentence()


@given(context=st.integers(1, 1 << 20), memory=st.integers(0, 1 << 40), share=st.floats(0, 1))
def test_more_memory_never_helps_fluxion(context: int, memory: int, share: float) -> None:
    less, more = (
        crossover(LLAMA, Placement(), H100, context=context, device_bytes=bytes_, read_share=share)
        for bytes_ in (memory, 2 * memory)
    )
    assert less.requests <= more.requests
    assert less.fluxion_s >= 0 and less.sentence().count("\n") == 0
