"""Prompts of all lengths at once: their order, and that it changes no tokens.

Passes have a fixed number of tokens here, so that results do not depend on the machine's speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from faults import scenes
from faults.child import Child
from faults.conftest import Serve
from faults.inprocess import InProcess
from faults.wire import Answer, Call

from fluxion_sglang.sglang.pacing import pacer as pacer_module

CONFIG = {"host_tokens": 12_000, "sketches": True}


def prompt(seed: int, length: int, new: int = 4, policy: str = "full", **extra: Any) -> dict[str, Any]:
    params = {**scenes.greedy(new), "custom_params": {"fluxion_policy": policy}}
    return {"input_ids": scenes.words(seed, length), "sampling_params": params, **extra}


@contextmanager
def passes_of(server: InProcess, tokens: int) -> Iterator[None]:
    """Prefill passes have `tokens` tokens."""
    pacer = pacer_module._here.pacer_of(server.scheduler)
    assert pacer is not None
    times, pacer._times = (
        pacer._times,
        SimpleNamespace(tokens_within=lambda *_: tokens, halves_within=lambda *_: tokens, observe=lambda *_: None),
    )
    try:
        yield
    finally:
        pacer._times = times


@contextmanager
def watched(server: InProcess, size: int = 16) -> Iterator[list[tuple[str, dict[str, int]]]]:
    """The passes, with `size` prompt tokens each: their mode, and the tokens of each request."""
    passes: list[tuple[str, dict[str, int]]] = []
    run_batch = server.scheduler.run_batch

    def watch(batch: Any, *args: Any, **kwargs: Any) -> Any:
        counts = batch.extend_lens if batch.forward_mode.is_extend() else [1] * len(batch.reqs)
        passes.append((batch.forward_mode.name, {r.rid: n for r, n in zip(batch.reqs, counts, strict=True)}))
        return run_batch(batch, *args, **kwargs)

    server.scheduler.run_batch = watch
    try:
        with passes_of(server, size):
            yield passes
    finally:
        server.scheduler.run_batch = run_batch


def finished(passes: Sequence[tuple[str, dict[str, int]]]) -> list[str]:
    """Requests in the order in which their prompts finished: the last pass with prompt tokens."""
    last = {rid: i for i, (mode, counts) in enumerate(passes) if mode != "DECODE" for rid, n in counts.items() if n > 1}
    return sorted(last, key=last.__getitem__)


def all_lengths(server: InProcess) -> None:
    """Long, short and medium prompts, streaming or not, beside one that decodes."""
    sketch = "sketch" if server.args.speculative_algorithm is None else "full"  # drafts are verified without sketches
    bodies = [
        prompt(2, 40, 60, stream=True), prompt(1, 1300), prompt(3, 900, 12, policy="fixed:16:0.2", stream=True),
        prompt(4, 5), prompt(5, 500, 40, policy=sketch), prompt(6, 33), prompt(7, 300, 20),
        prompt(8, 700, return_logprob=True, logprob_start_len=500),
    ]  # fmt: skip
    alone = []
    for body in bodies:
        alone.append(server.ask(body).tokens)
        server.flush()
    with watched(server) as passes:
        answers = server.together([Call(body, at=7 * i) for i, body in enumerate(bodies)])
    for answer, tokens in zip(answers, alone, strict=True):
        assert answer.code == 200 and answer.tokens == tokens, answer.message
    server.idle_check()
    server.flush()
    if server.args.speculative_algorithm is None:
        assert any(mode == "MIXED" for mode, _ in passes)


def a_medium_one_takes_the_place(server: InProcess) -> None:
    with watched(server) as passes:
        server.together([
            Call(prompt(11, 1600, rid="long")), Call(prompt(12, 500, rid="medium"), at=9),
            Call(prompt(13, 10, rid="short"), at=15), Call(prompt(14, 200, rid="small"), at=19),
        ])  # fmt: skip
    server.idle_check()
    server.flush()
    assert finished(passes) == ["short", "small", "medium", "long"]
    while_medium = [counts for _, counts in passes if "medium" in counts or "long" in counts]
    until = next(i for i, counts in enumerate(while_medium) if counts.get("medium") == 1)
    share = sum("long" in counts for counts in while_medium[:until]) / until
    assert share > 0.2, "the oldest prompt waits for all others"
    again = [n for _, counts in passes for rid, n in counts.items() if rid == "long"]
    assert sum(again) < 1600 + 16 * len(passes) / 4 + 4, "what was computed is computed again"


def those_in_one_order(server: InProcess) -> None:
    """Prompts of a higher priority come before all others, at any length."""
    with watched(server) as passes:
        server.together([
            Call(prompt(21, 900, rid="first", priority=1)), Call(prompt(22, 700, rid="urgent", priority=5), at=5),
            Call(prompt(23, 20, rid="short", priority=1), at=6), Call(prompt(24, 300, rid="late", priority=0), at=7),
        ])  # fmt: skip
    server.idle_check()
    server.flush()
    assert finished(passes) == ["urgent", "short", "first", "late"]


def hang_up(server: InProcess) -> list[Answer]:
    """The client of a long prompt hangs up; the computed part is in the tree."""
    long = prompt(31, 3000, stream=True)
    with watched(server) as passes:
        answers = server.together([Call(long, hang_up=40), Call(prompt(32, 50), at=45)])
    server.idle_check()
    assert answers[1].code == 200
    computed = sum(max(counts.values()) for mode, counts in passes if mode != "DECODE")
    assert computed < 1500, "the prompt was computed after its client had left"
    cached = server.ask(prompt(31, 3000)).meta["cached_tokens"]
    server.flush()
    assert cached >= 16 * 35, cached
    return answers


def no_room(server: InProcess) -> None:
    """Prompts fill the pool: a prompt that waits for room is not starved by prompts that fit."""
    calls = [Call(prompt(40 + i, 1500, 30), at=i) for i in range(7)]
    calls += [Call(prompt(60, 6000, rid="large"), at=4)]
    calls += [Call(prompt(70 + i, 100, 40), at=10 + 60 * i) for i in range(30)]
    with watched(server) as passes:
        answers = server.together(calls, patience=500)
    server.idle_check()
    server.flush()
    assert all(answer.code == 200 for answer in answers), [answer.message for answer in answers]
    assert finished(passes).index("large") < len(calls) - 5


def a_crowd_beside_a_long_one(server: InProcess) -> None:
    """Short requests with long answers arrive while a prompt of three quarters of the pool is computed: they leave it
    the room for its rest."""
    calls = [Call(prompt(80, 9000, rid="long"))]
    calls += [Call(prompt(100 + i, 150, 300), at=i) for i in range(90)]
    with watched(server, 256):
        answers = server.together(calls, patience=500)
    server.idle_check()
    server.flush()
    assert all(answer.code == 200 for answer in answers), [answer.message for answer in answers if answer.code != 200]


def answers_that_take_the_room(server: InProcess) -> None:
    """Answers exceed SGLang's reservation while a long prompt is computed."""
    tracker = server.scheduler.new_token_ratio_tracker
    before = tracker.init, tracker.min, tracker.current
    tracker.init = tracker.min = tracker.current = 0.01
    bodies = [prompt(140 + i, 455, 300) for i in range(6)] + [prompt(148, 9000, 8)]
    for body in bodies:
        body["sampling_params"]["ignore_eos"] = False  # for other requests SGLang reserves the whole answer
    alone = [server.ask(body).tokens for body in bodies]
    server.flush()
    with watched(server, 256) as passes:
        answers = server.together([Call(body, at=20 * (i == 6)) for i, body in enumerate(bodies)], patience=500)
    tracker.init, tracker.min, tracker.current = before
    server.idle_check()
    server.flush()
    assert [answer.code for answer in answers] == [200] * 7, [answer.message for answer in answers]
    assert [answer.tokens for answer in answers] == alone
    assert sum(mode == "MIXED" for mode, _ in passes) > 30, "the prompt waited for the others"


def progress(server: InProcess) -> None:
    """The computed part of a parked prompt is evicted for others; the prompt still advances."""
    calls = [Call(prompt(150, 9000, rid="long"))]
    calls += [Call(prompt(160 + i, 500, 900), at=20 + 150 * i) for i in range(18)]
    with watched(server, 256) as passes:
        answers = server.together(calls, patience=500)
    server.idle_check()
    server.flush()
    assert all(answer.code == 200 for answer in answers)
    ended = finished(passes)
    assert ended.index("long") < len(calls) - 5, "the long prompt waited for nearly all others"


def few_slots(server: InProcess) -> None:
    """All running slots but one decode: the oldest prompt, which has that slot, advances."""
    calls = [Call(prompt(200, 1600, rid="long"))]
    calls += [Call(prompt(210 + i, 40, 60), at=5 + 4 * i) for i in range(30)]
    with watched(server) as passes:
        server.together(calls, patience=300)
    server.idle_check()
    server.flush()
    assert finished(passes).index("long") < 20


def parked_and_counted(server: InProcess) -> None:
    """Tokens that a parked prompt finds of itself in the radix tree do not count as cached."""
    with watched(server):
        answers = server.together(
            [Call(prompt(250, 1600)), Call(prompt(251, 500), at=9), Call(prompt(252, 300), at=15)]
        )
    server.flush()
    assert [answer.meta["cached_tokens"] for answer in answers] == [0, 0, 0]


def grammars(server: InProcess) -> None:
    """A prompt whose grammar must be compiled has passes of the normal size."""
    asked = prompt(270, 900, 6, rid="asked")
    asked["sampling_params"]["regex"] = ".{1,9}"
    with watched(server) as passes:
        answers = server.together([Call(prompt(271, 40, 150)), Call(asked, at=12)])
    server.flush()
    assert all(answer.code == 200 for answer in answers), [answer.message for answer in answers]
    assert max(counts["asked"] for _, counts in passes if "asked" in counts) <= 16


class Cases:
    FLAGS: tuple[str, ...] = ()

    @pytest.fixture(scope="class")
    def server(self, serve: Serve) -> Child:
        return serve(*self.FLAGS, config=CONFIG)

    def test_nobody_gets_other_tokens(self, server: Child) -> None:
        server.run(all_lengths, patience=300)

    def test_a_medium_prompt_takes_a_long_ones_place(self, server: Child) -> None:
        server.run(a_medium_one_takes_the_place, patience=300)

    def test_a_client_that_leaves_holds_nobody(self, server: Child) -> None:
        server.run(hang_up, patience=300)

    def test_cached_tokens_are_counted_once(self, server: Child) -> None:
        server.run(parked_and_counted, patience=300)

    def test_a_grammar_does_not_make_a_pass_larger(self, server: Child) -> None:
        server.run(grammars, patience=300)


class TestOverlapped(Cases):
    """SGLang's default: the result of a pass is processed after the next one has begun."""

    @pytest.mark.full
    def test_answers_take_the_room_of_a_long_prompt(self, server: Child) -> None:
        server.run(answers_that_take_the_room, patience=600)

    @pytest.mark.full
    def test_a_prompt_that_needs_room_gets_it(self, server: Child) -> None:
        server.run(no_room, patience=600)

    @pytest.mark.full
    def test_a_prompt_whose_pages_are_evicted_gets_further(self, server: Child) -> None:
        server.run(progress, patience=600)


@pytest.mark.full
class TestSerial(Cases):
    FLAGS = ("--disable-overlap-schedule",)


@pytest.mark.full
class TestOtherFlags:
    """One server for each."""

    def test_others_leave_room_for_the_rest_of_a_long_prompt(self, serve: Serve) -> None:
        serve("--max-running-requests", "32", config=CONFIG).run(a_crowd_beside_a_long_one, patience=600)

    def test_the_oldest_prompt_keeps_its_place(self, serve: Serve) -> None:
        serve("--max-running-requests", "4", config=CONFIG).run(few_slots, patience=300)

    def test_priorities_are_honoured(self, serve: Serve) -> None:
        serve("--enable-priority-scheduling", config=CONFIG).run(those_in_one_order, patience=300)

    def test_drafts_change_no_tokens(self, serve: Serve) -> None:
        """SGLang does not mix drafts into prefills: a decode step follows each pass."""
        flags = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")
        serve(*flags, config=CONFIG).run(all_lengths, patience=300)
