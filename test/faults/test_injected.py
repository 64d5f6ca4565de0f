"""Faults where SGLang handles requests: whichever function raises, the guilty request gets one answer, its neighbours
get the same tokens as alone, and nothing is lost."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from effort import examples
from faults import scenes
from faults.child import Child
from faults.conftest import Serve
from faults.injection import GUILTY, SITES, Fault, injected
from faults.inprocess import InProcess
from faults.wire import Call, Spoiled

NEW = 12
OFTEN = 10**6
"""Number of raises of a permanent fault."""


_numbers = itertools.count()


def guilty(**extra: Any) -> Call:
    """The guilty request: a grammar chooses its tokens, and it asks for log probabilities, so it passes every site.

    Its id is new: two seconds after the end of a stream, SGLang aborts any request with the stream's id.
    """
    params = {**scenes.greedy(NEW), "regex": "(w[0-9]+)+"}
    body = {
        "rid": f"{GUILTY}-{next(_numbers)}",
        "input_ids": scenes.words(3),
        "sampling_params": params,
        "return_logprob": True,
    }
    return Call({**body, **extra})


def scene(name: str, server: InProcess) -> tuple[int, Call]:
    """(neighbours, the guilty request) of a scene."""
    match name:
        case "alone":
            return 0, guilty()
        case "beside":
            return 3, scenes.running(guilty())
        case "together":
            return 3, guilty()
        case "streaming":
            return 3, scenes.running(guilty(stream=True))
        case "chunked":
            return 2, scenes.running(guilty(input_ids=scenes.words(4, 150)))
        case "session":
            session = server.open_session(streaming=bool(server.args.enable_streaming_session))
            first = guilty(
                rid=f"first-{next(_numbers)}", session_params={"id": session}, sampling_params=scenes.greedy(4)
            )
            assert server.ask(first.body).code == 200
            return 2, scenes.running(guilty(session_params={"id": session}))
    raise ValueError(name)


def play(server: InProcess, site: str, name: str, after: bool, named: bool, skip: int, times: int) -> None:
    """One case. The fault is active while the guilty request and its neighbours run."""
    for which in range(3):
        scenes.alone(server, which)
    if server.args.enable_unified_cache_external_linker:
        server.flush()  # the next prefill reads from files again
    neighbours, call = scene(name, server)
    fault = Fault(after, named, skip, times)
    try:
        with injected(site, fault):
            answer = scenes.beside(server, [call], neighbours, check=False)[0]
        assert answer.code in (200, 500), f"{answer.code} {answer.message}"
        # A pass may fail after it has sent the last output: the first failing pass, or the only one of a trial.
        late = after and fault.raised <= 2
        if times == OFTEN and fault.raised and site in DEADLY and not late:
            assert answer.code != 200, "it cannot have passed"
        if session := (call.body.get("session_params") or {}).get("id"):
            # The session continues, or reports that it does not.
            then = server.ask(
                {"input_ids": [300], "sampling_params": scenes.greedy(2), "session_params": {"id": session}}
            )
            if not (then.whole and then.code in (200, 400, 500)):
                raise Spoiled(f"the session's next turn: {then.code} {then.message}")
            server.close_session(session)
        scenes.beside(server, [], neighbours)
    except AssertionError as error:
        case = f"{site}, {name}, after={after}, named={named}, skip={skip}, times={times}, raised {fault.raised}"
        raise type(error)(f"{case}: {error}") from error


DEADLY = (
    "prepare_for_extend", "from_schedule_batch", "forward_batch_generation", "sample", "init_next_round_input",
    "update_finish_state", "add_logprob_return_values", "process_batch_result", "add_one_req",
)  # fmt: skip
"""Sites that every request passes: with a permanent fault, it cannot be answered."""

CASES = [
    dict(zip(("after", "named", "skip", "times"), case, strict=True))
    for case in itertools.product((False, True), (True, False), (0, 3), (1, OFTEN))
]


def cases(site: str) -> list[dict[str, Any]]:
    if site == "on_idle":  # no request can end a recurring fault
        return [case for case in CASES if case["times"] == 1 and case["named"]]
    if site == "calc_priority":  # a queue is inspected only while a request waits in it
        return [case for case in CASES if not case["skip"]]
    return CASES


def play_all(server: InProcess, site: str, name: str) -> None:
    """Play as many of a site's cases as the effort allows."""
    found = cases(site)
    for case in random.Random(f"{site} {name}").sample(found, min(examples(len(found)), len(found))):
        play(server, site, name, **case)


def sites(*names: str) -> list[Any]:
    """Each site in each scene; the quick tests have a few of them."""
    return [
        pytest.param(site, name, id=f"{site}-{name}", marks=() if (site, name) in QUICK else pytest.mark.full)
        for site in SITES
        for name in names
    ]


QUICK = {
    ("prepare_for_extend", "together"), ("forward_batch_generation", "beside"), ("sample", "streaming"),
    ("accept", "beside"), ("release_kv_cache", "session"), ("on_idle", "beside"),
}  # fmt: skip


class TestDefaults:
    FLAGS = ("--enable-streaming-session",)

    @pytest.mark.parametrize(("site", "name"), sites("alone", "beside", "together", "streaming", "session"))
    def test_a_fault_costs_its_request_alone(self, server: Child, site: str, name: str) -> None:
        server.run(play_all, site, name)


@pytest.mark.full
class TestChunkedAndSerial:
    FLAGS = ("--chunked-prefill-size", "32", "--enable-mixed-chunk", "--disable-overlap-schedule")

    @pytest.mark.parametrize(("site", "name"), sites("chunked", "session", "streaming"))
    def test_a_fault_costs_its_request_alone(self, server: Child, site: str, name: str) -> None:
        server.run(play_all, site, name)


@pytest.mark.full
class TestChunked:
    FLAGS = ("--chunked-prefill-size", "32", "--enable-streaming-session")

    @pytest.mark.parametrize(("site", "name"), sites("chunked", "session"))
    def test_a_fault_costs_its_request_alone(self, server: Child, site: str, name: str) -> None:
        server.run(play_all, site, name)


@pytest.mark.full
class TestDrafts:
    FLAGS = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")

    @pytest.mark.parametrize(("site", "name"), sites("beside", "streaming"))
    def test_a_fault_costs_its_request_alone(self, server: Child, site: str, name: str) -> None:
        server.run(play_all, site, name)


@pytest.mark.full
class TestDisk:
    """KV is read from files while others decode."""

    @pytest.fixture(scope="class")
    def server(self, serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Child:
        return serve(config={"disk": str(tmp_path_factory.mktemp("disk"))})

    @pytest.mark.parametrize(("site", "name"), sites("beside", "together"))
    def test_a_fault_costs_its_request_alone(self, server: Child, site: str, name: str) -> None:
        server.run(play_all, site, name)
