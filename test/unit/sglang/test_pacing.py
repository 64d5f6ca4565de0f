"""Sizes of prefill passes and the order of prompts."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxion_sglang.sglang.pacing.order import TURN, Turns, rest, share
from fluxion_sglang.sglang.pacing.pacer import HELD_UP, Pacer, _attended
from fluxion_sglang.sglang.pacing.times import FIRST, GROWTH, PassTimes

PAGE = 16


def seconds(reading: float, product: float, attention: float) -> Callable[[int, float], float]:
    return lambda tokens, attended: reading + product * tokens + attention * attended


MACHINES = st.tuples(st.floats(0, 0.5), st.floats(1e-5, 1e-2), st.floats(0, 1e-6)).map(lambda them: seconds(*them))


def run(times: PassTimes, took: Callable[[int, float], float], target: float, length: int) -> list[float]:
    """Times of the passes of one prompt."""
    passes, start = [], 0
    while start < length:
        tokens = times.tokens_within(target, lambda count, start=start: _attended(start, count), PAGE, 4096)
        tokens = min(tokens, length - start)
        passes.append(took(tokens, _attended(start, tokens)))
        times.observe(tokens, _attended(start, tokens), passes[-1])
        start += tokens
    return passes


class TestPassTimes:
    def test_knows_nothing_at_first(self) -> None:
        times = PassTimes()
        assert times.predict(100, 1000) == 0
        assert times.tokens_within(0.2, lambda count: 0, PAGE, 4096) == FIRST
        assert times.halves_within(0.2, lambda count: 0, PAGE, 4096) == 4096

    @given(MACHINES, st.floats(0.01, 1))
    def test_passes_come_to_take_the_target(self, took: Callable[[int, float], float], target: float) -> None:
        times = PassTimes()
        run(times, took, target, 4_000)
        for passes in (run(times, took, target, 4_000), run(times, took, target, 1_000)):
            least = took(PAGE, _attended(4_000, PAGE))  # at least a page, whatever its time
            assert max(passes) <= max(1.25 * target, least)

    @given(MACHINES)
    def test_predicts_what_it_has_seen(self, took: Callable[[int, float], float]) -> None:
        times, generator = PassTimes(), random.Random(1)
        for _ in range(100):
            tokens, start = generator.randrange(1, 4096), generator.randrange(30_000)
            times.observe(tokens, _attended(start, tokens), took(tokens, _attended(start, tokens)))
        assert times.predict(1000, _attended(9000, 1000)) == pytest.approx(took(1000, _attended(9000, 1000)), rel=0.05)

    def test_a_pass_that_was_held_up_counts_little(self) -> None:
        times, took = PassTimes(), seconds(0.01, 0.001, 1e-7)
        times.observe(6, _attended(0, 6), 3.0)  # the first pass may have compiled something
        run(times, took, 0.2, 4_000)
        run(times, took, 0.2, 20_000)
        usual = run(times, took, 0.2, 20_000)
        times.observe(160, _attended(0, 160), 5.0)
        later = run(times, took, 0.2, 20_000)
        assert sum(usual[:5]) > 0.9 and sum(later[10:]) / len(later[10:]) > 0.18

    def test_grows_step_by_step(self) -> None:
        times = PassTimes()
        times.observe(16, 128, 0.001)
        assert times.tokens_within(1.0, lambda count: 0, PAGE, 4096) == 16 * GROWTH

    @given(MACHINES, st.floats(0.01, 10), st.integers(1, 300), st.integers(0, 30_000))
    def test_halves_are_the_largest_in_time(
        self, took: Callable[[int, float], float], target: float, pages: int, start: int
    ) -> None:
        times, most = PassTimes(), pages * PAGE
        run(times, took, 0.2, 4_000)
        predict = lambda tokens: times.predict(tokens, _attended(start, tokens))  # noqa: E731
        tokens = times.halves_within(target, lambda count: _attended(start, count), PAGE, most)
        assert tokens % PAGE == 0 and PAGE <= tokens <= most
        assert tokens == PAGE or predict(tokens) <= target
        assert tokens == most or predict(tokens * 2 + PAGE) > target

    def test_what_was_measured_seldom_divides_a_lone_prompt_anew(self) -> None:
        """The limit is halfway between the times of two sizes, and measurements differ by a seventh."""
        generator, took, sizes = random.Random(3), seconds(0.01, 0.001, 0), set()
        for _ in range(20):
            times = PassTimes()
            for _ in range(10):
                tokens, noise = generator.randrange(16, 2048), generator.uniform(0.85, 1.15)
                times.observe(tokens, _attended(0, tokens), noise * took(tokens, 0))
            sizes.add(times.halves_within(1.45, lambda count: _attended(0, count), PAGE, 4096))
        assert sizes == {1024}

    def test_the_second_pass_replaces_the_first(self) -> None:
        times, took = PassTimes(), seconds(0.01, 0.001, 0)
        times.observe(7, _attended(0, 7), 3.0)  # caches are cold, or something is compiled
        times.observe(16, _attended(0, 16), took(16, 0))
        assert times.predict(16, _attended(0, 16)) == pytest.approx(took(16, 0), rel=0.01)

    def test_follows_a_machine_that_slows_down(self) -> None:
        times = PassTimes()
        run(times, seconds(0, 0.0005, 0), 0.2, 20_000)
        slow = run(times, seconds(0, 0.002, 0), 0.2, 20_000)
        assert max(slow[10:]) <= 0.24, slow


def request(tokens: int, arrival: int, rank: int = 0, matched: int = 0, **more: Any) -> Any:
    return SimpleNamespace(
        origin_input_ids=[0] * tokens, output_ids=[], num_matched_prefix_tokens=matched, n=arrival, rank=rank, **more
    )


def turns() -> Turns:
    return Turns(lambda one: int(one.n), lambda one: int(one.rank))


class TestOrder:
    def test_the_shortest_rest_is_first(self) -> None:
        long, short, known = request(900, 0), request(100, 1), request(950, 2, matched=940)
        waiting = [long, short, known]
        turns().sort(waiting, None)
        assert waiting == [known, short, long]

    def test_equal_ones_in_the_order_in_which_they_came(self) -> None:
        waiting = [request(100, n) for n in (2, 0, 1)]
        turns().sort(waiting, None)
        assert [one.n for one in waiting] == [0, 1, 2]

    def test_priority_comes_before_all(self) -> None:
        urgent, short, oldest = request(900, 2, rank=-5), request(10, 1), request(500, 0)
        order, waiting = turns(), [short, oldest, urgent]
        for _ in range(TURN):
            assert order.oldest(waiting) is urgent
            order.sort(waiting, order.oldest(waiting) if order.due else None)
            assert waiting[0] is urgent
            order.passed(urgent, [])

    def test_the_oldest_has_its_turn_until_it_is_served(self) -> None:
        order, long = turns(), request(900, 0)
        for n in range(TURN - 1):
            assert not order.due
            order.passed(long, [request(10, n + 1)])
        for n in range(5):  # there is no room for it
            assert order.due
            order.passed(long, [])
            waiting = [request(10, n), long]
            order.sort(waiting, long)
            assert waiting[0] is long
        order.passed(long, [long])
        assert not order.due

    @given(st.integers(0, 5000).map(lambda pages: pages * PAGE))
    def test_a_share_leaves_something(self, budget: int) -> None:
        beside = share(budget, PAGE)
        assert beside % PAGE == 0 and beside >= 0
        assert budget < PAGE or budget - beside >= max(budget // TURN, PAGE)

    def test_a_request_has_always_something_to_do(self) -> None:
        assert rest(request(10, 0, matched=10)) == 1


def scheduler(**more: Any) -> Any:
    """The fields of SGLang's scheduler that a pacer reads."""
    values = {
        "page_size": PAGE,
        "spec_algorithm": SimpleNamespace(is_none=lambda: True),
        "schedule_low_priority_values_first": False,
        "enable_priority_scheduling": False,
        "policy": SimpleNamespace(policy=SimpleNamespace(value="fcfs")),
        "waiting_queue": [],
        "result_queue": [],
    }
    return type("Scheduler", (), {**values, **more})()


class Held:
    """A request that a WeakKeyDictionary can hold."""

    inflight_middle_chunks = 1


class TestPacer:
    DECODE = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True))

    def test_a_scheduler_that_was_paused_did_not_work(self) -> None:
        of = scheduler()
        pacer, at = Pacer(of, 0.2, 4096, None), 0.0
        for _ in range(50):
            pacer.measure(self.DECODE, at + 0.001, at + 0.01)
            at += 0.01
        assert pacer._step == pytest.approx(0.01, rel=0.01)
        pacer.measure(self.DECODE, at + 60, at + 60.01)
        assert pacer._step < 0.015
        pacer.measure(self.DECODE, at + 60.011, at + 75)
        assert pacer._step < 0.015 * (1 + 0.1 * HELD_UP)

    @pytest.mark.parametrize(
        ("step", "decoding", "prompts", "limit"),
        [
            (0.01, False, 1, 1.6),  # ALONE times the target
            (0.50, False, 1, 5.0),  # STEPS decode steps
            (0.01, False, 2, 0.2),
            (0.01, True, 1, 0.9 * 0.22),  # AIM times the target and two steps
        ],
    )
    def test_how_long_a_pass_may_take(self, step: float, decoding: bool, prompts: int, limit: float) -> None:
        of = scheduler(chunked_req=None)
        pacer = Pacer(of, 0.2, 4096, None)
        asked = []
        at_most = lambda seconds, *_: asked.append(seconds) or 160  # noqa: E731
        pacer._times = SimpleNamespace(tokens_within=at_most, halves_within=at_most)
        pacer._step = pacer._fastest_step = step
        assert pacer._tokens(decoding, [request(900, n) for n in range(prompts)]) == 160
        assert asked == [pytest.approx(limit)]

    def test_a_parked_prompt_does_not_wait_for_a_result_that_a_failure_dropped(self) -> None:
        lost, awaited, other = Held(), Held(), Held()
        of = scheduler(waiting_queue=[lost, awaited, other], result_queue=[(SimpleNamespace(reqs=[awaited]), None)])
        pacer = Pacer(of, 0.2, 4096, None)
        pacer._parked.update({lost: 160, awaited: 320})
        pacer._forget_lost_results()
        assert [each.inflight_middle_chunks for each in (lost, awaited, other)] == [0, 1, 1]
