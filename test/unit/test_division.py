"""Who reads a task's tiles: csrc/device/costs.h, over layers whose CPU and device are simulated in plain arithmetic."""

from __future__ import annotations

import ctypes
import heapq
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rogue import native

NS = 1e9


class Division:
    """`Division` of csrc/device/costs.h."""

    def __init__(self, cpu: float, link: float, hot: float, launch_s: float) -> None:
        self.library = native()
        self.library.division_create.restype = ctypes.c_void_p
        rates = map(ctypes.c_double, (cpu, link, hot, launch_s))
        self.handle = ctypes.c_void_p(self.library.division_create(*rates))

    def call(self, name: str, *numbers: int) -> int:
        return int(getattr(self.library, f"division_{name}")(self.handle, *map(ctypes.c_int64, numbers)))

    def expect(self, hit_share: float) -> None:
        self.library.division_expect(self.handle, ctypes.c_double(hit_share))

    def share(self, tasks: int, tile_bytes: int, now: int = 0) -> int:
        """Of so many tasks, offered at one time, those that the device gets."""
        given = 0
        for _ in range(tasks):
            if self.call("asks", now, tile_bytes):
                self.call("given", now, tile_bytes)
                given += 1
        return given


@contextmanager
def division(cpu: float, link: float, hot: float = 1e12, launch_s: float = 5e-5) -> Iterator[Division]:
    made = Division(cpu, link, hot, launch_s)
    yield made
    made.call("destroy")


def layer(
    by: Division,
    start: float,
    tasks: list[int],
    metadata: int,
    guess: float,
    *,
    workers: int,
    cpu: float,
    link: float,
    launch_s: float,
) -> tuple[float, float, int]:
    """Seconds of the CPU and of the device, and bytes the device read, of a layer whose workers share `cpu` evenly.

    Args:
        start: seconds. tasks: bytes of tiles of each. metadata: of each. guess: bytes that the plan foretells for each
            one that is read.
    """
    plan = int(sum(tasks) * guess)
    by.call("open", int(start * NS), plan, metadata * len(tasks), 0)
    free = [(start, worker) for worker in range(workers)]
    device, given = start, 0
    for tiles in tasks:
        at, worker = heapq.heappop(free)
        at += metadata / (cpu / workers)
        by.call("chosen", tiles, int(tiles * guess))
        if by.call("asks", int(at * NS), tiles):
            by.call("given", int(at * NS), tiles)
            device = max(device, at + launch_s) + tiles / link
            given += tiles
        else:
            at += tiles / (cpu / workers)
        heapq.heappush(free, (at, worker))
    # Workers help one another with what is left.
    spent = sum(at for at, _ in free) / workers
    by.call("close", int(spent * NS))
    by.call("returned", int(max(device, spent) * NS), given)
    return spent - start, device - start, given


@settings(max_examples=examples(60))
@given(
    cpu=st.floats(2e10, 4e11), link=st.floats(1e10, 1e11), guess=st.floats(0.5, 2.0), off=st.floats(0.6, 1.6),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_both_are_done_at_the_same_time(cpu: float, link: float, guess: float, off: float, seed: int) -> None:
    """Whatever the plan foretold, and where the CPU is not as fast as it was when it was measured."""
    dice, launch_s, workers = random.Random(seed), 5e-5, 8
    with division(cpu * off, link) as by:
        start, best, took = 1.0, 0.0, 0.0
        for number in range(80):
            tasks = [dice.randrange(1 << 20, 3 << 20) for _ in range(64)]
            metadata = 1 << 19
            spent, device, _ = layer(
                by, start, tasks, metadata, guess, workers=workers, cpu=cpu, link=link, launch_s=launch_s
            )
            start += max(spent, device) + 1e-3
            if number < 60:  # it learns
                continue
            took += max(spent, device)
            # The device reads nothing before the first worker has chosen.
            idle = launch_s + metadata / (cpu / workers)
            best += (sum(tasks) + metadata * len(tasks) + link * idle) / (cpu + link)
    assert took < 1.3 * best


def test_a_slow_device_gets_nothing_and_a_fast_one_everything() -> None:
    for link, share in ((1e3, 0), (1e15, 1)):
        with division(1e11, link, launch_s=1e-9) as by:
            tasks = [1 << 21] * 32
            _, _, given = layer(by, 1.0, tasks, 1 << 19, 1.0, workers=4, cpu=1e11, link=link, launch_s=1e-9)
            assert given == share * sum(tasks)


def test_what_is_hot_counts_at_the_rate_of_the_devices_memory() -> None:
    shares = []
    for hits in (0.0, 0.5, 1.0):
        with division(1e11, 5e10) as by:
            by.expect(hits)
            by.call("open", 0, 32 << 21, 0, 0)
            shares.append(by.share(32, 1 << 21))
    assert shares[0] < shares[1] < shares[2]


def test_a_device_that_is_behind_gets_less() -> None:
    with division(1e11, 5e10) as by:
        by.call("open", 0, 1 << 28, 0, 0)
        assert by.call("asks", 0, 1 << 20)
        by.call("given", 0, 1 << 30)
        assert not by.call("asks", 0, 1 << 20)
        by.call("open", 10**6, 1 << 28, 0, 0)
        assert not by.call("asks", 10**6, 1 << 20), "what it was given in the layer before"
        by.call("returned", 10**6, 1 << 30)
        assert by.call("asks", 10**6, 1 << 20)


@pytest.mark.parametrize("rates", [(0.0, 1e9), (1e9, 0.0), (float("nan"), 1e9), (1e9, float("nan"))])
def test_without_a_rate_nothing_is_given(rates: tuple[float, float]) -> None:
    with division(*rates) as by:
        by.call("open", 0, 1 << 28, 1 << 20, 0)
        assert by.call("asks", 0, 1 << 20) == (rates[0] == 0.0), "a CPU that reads nothing leaves all to the device"


def test_what_the_plan_gave_to_the_device_is_no_part_of_what_is_divided() -> None:
    with division(1e11, 1e11, launch_s=1e-9) as by:
        asked = []
        for alone in (0, 8):
            by.call("open", alone, 16 << 20, 0, 0)
            for _ in range(alone):
                by.call("given_alone", alone, 1 << 20)
            by.call("returned", alone, alone << 20)
            asked.append(by.share(16, 1 << 20, alone))
            by.call("returned", alone, asked[-1] << 20)
        assert asked[0] == asked[1] and asked[0] in (7, 8), "half of them, but for what rounding says of the last"


def test_what_was_taken_back_was_never_given() -> None:
    with division(1e11, 1e11, launch_s=1e-9) as by:
        by.call("open", 0, 16 << 20, 0, 0)
        given = 0
        for turn in range(32):
            if by.call("asks", 0, 1 << 20):
                by.call("given", 0, 1 << 20)
                if turn % 2:
                    by.call("taken_back", 0, 1 << 20)
                else:
                    given += 1
        assert given in (7, 8)
