"""Finding the guilty request among several, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxion_sglang.sglang.containment import ledger
from fluxion_sglang.sglang.containment.suspects import Suspects, TrialEnds, calc_priority


class Request:
    def __init__(self, name: int) -> None:
        self.name, self.output_ids, self.finished_output = name, [], False

    def finished(self) -> bool:
        return self.finished_output


def taken_in(count: int) -> list[Any]:
    requests = [Request(i) for i in range(count)]
    for request in requests:
        ledger.create_generation_req(lambda scheduler, made: (setattr(made, "session", None), made)[1], None, request)
    return requests


def run(requests: list[Any], guilty: Any, fails_at: int, length: int) -> tuple[list[Any], int]:
    """Requests ended as guilty, and the number of failures, for a scheduler whose passes with `guilty` fail once it has
    `fails_at` tokens."""
    suspects, waiting, ended, failures = Suspects(), list(requests), [], 0
    running: list[Any] = []
    for _ in range(10_000):
        if not waiting and not running:
            break
        try:
            trial = suspects.on_trial
            if trial in waiting:
                waiting.remove(trial)
                waiting.insert(0, trial)
            for request in list(waiting):
                if not suspects.admits(request, running):
                    break
                waiting.remove(request)
                running.append(request)
        except TrialEnds:
            suspects.end_trial()
            waiting, running = [*running, *waiting], []
            continue
        if guilty in running and len(guilty.output_ids) >= fails_at:
            failures += 1
            if len(running) == 1:
                guilty.finished_output = True
                ended += running
                suspects.clear()
                running = []
            else:
                suspects.accuse(running)
            waiting, running = [*running, *waiting], []
            continue
        for request in running:
            request.output_ids.append(0)
            request.finished_output = len(request.output_ids) >= length
        running = [request for request in running if not request.finished_output]
    else:
        pytest.fail("it never ends")
    return ended, failures


@given(st.integers(2, 6), st.integers(0, 5), st.integers(0, 30))
def test_the_guilty_one_alone_ends(count: int, place: int, fails_at: int) -> None:
    requests = taken_in(count)
    guilty = requests[place % count]
    ended, failures = run(requests, guilty, fails_at, length=40)
    assert ended == [guilty]
    assert failures <= 8, "the tokens that clear a suspect double with each failure"
    assert all(len(request.output_ids) == 40 for request in requests if request is not guilty)


def test_a_fault_that_goes_away_ends_nobody() -> None:
    requests = taken_in(3)
    suspects = Suspects()
    suspects.accuse(requests)
    assert suspects.on_trial is requests[-1], "the newest comes first"
    assert not suspects.admits(requests[0], []) and suspects.admits(requests[-1], [])
    assert not suspects.admits(requests[0], [requests[-1]])
    requests[-1].output_ids += [0, 0]
    with pytest.raises(TrialEnds):
        suspects.admits(requests[0], [requests[-1]])


def test_a_suspect_that_is_answered_meanwhile_is_passed_over() -> None:
    requests = taken_in(2)
    suspects = Suspects()
    suspects.accuse(requests)
    requests[1].finished_output = True
    assert suspects.on_trial is requests[0]
    requests[0].finished_output = True
    assert suspects.on_trial is None and suspects.admits(requests[0], requests)


def test_a_trial_has_the_queue_for_itself_while_it_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = taken_in(3)
    suspects = Suspects()
    monkeypatch.setattr("fluxion_sglang.sglang.containment.suspects.suspects", suspects)
    seen: list[list[Any]] = []
    waiting = list(requests)
    calc_priority(lambda policy, queue: seen.append(list(queue)), None, waiting)
    suspects.accuse(requests[:2])
    calc_priority(lambda policy, queue: seen.append(list(queue)), None, waiting)
    assert seen == [requests, [requests[1]]] and waiting == [requests[1], requests[0], requests[2]]
