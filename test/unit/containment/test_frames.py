"""The request that a traceback names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fluxion_sglang.sglang.containment import frames


class Request:
    """Replaces SGLang's class."""

    def fail(self) -> None:
        raise ValueError("it is the request's method")


class Batch(list[Request]):
    def fail(self) -> None:
        fail()


A, B, C = Request(), Request(), Request()


def fail() -> None:
    raise ValueError("here")


def of_parameter(req: Request) -> None:
    fail()


def in_loop(requests: list[Request]) -> None:
    for req in requests:
        if req is B:
            fail()


def in_inner_loop(requests: list[Request]) -> None:
    for i, req in enumerate(requests):
        for _ in range(2):
            if i == 1 and req:
                fail()


def in_comprehension(requests: list[Request]) -> None:
    _ = [fail() for req in requests if req is B]


def after_loop(requests: list[Request]) -> None:
    for req in requests:
        assert req
    fail()


def in_both(requests: list[Request]) -> None:
    for _ in requests:
        of_parameter(C)


def of_method(request: Request) -> None:
    request.fail()


def raised(function: Callable[..., Any], *args: Any) -> Exception:
    with pytest.raises(ValueError) as caught:
        function(*args)
    return caught.value


@pytest.mark.parametrize(
    ("function", "argument", "named"),
    [
        (of_parameter, A, A),
        (of_method, B, B),
        (in_loop, [A, B, C], B),
        (in_inner_loop, [A, B, C], B),
        (in_comprehension, [A, B, C], B),
        (after_loop, [A, B, C], None),  # the loop's last request is not at fault
        (in_both, [A], C),
        (lambda _: fail(), [A], None),
    ],
)
def test_the_request_that_a_frame_was_busy_with(function: Any, argument: Any, named: Request | None) -> None:
    assert frames.culprit(raised(function, argument), Request) is named


def test_a_function_without_source_names_its_parameters_alone() -> None:
    scope: dict[str, Any] = {"fail": fail}
    exec("def hidden(requests):\n    for req in requests:\n        fail()", scope)
    exec("def shown(req):\n    fail()", scope)
    assert frames.culprit(raised(scope["hidden"], [A]), Request) is None
    assert frames.culprit(raised(scope["shown"], A), Request) is A


def test_the_batch_of_the_innermost_frame_that_has_one() -> None:
    def outer(batch: Batch) -> None:
        Batch([A, B]).fail()

    assert list(frames.passed_down(raised(outer, Batch([C])), Batch)) == [[A, B]]
    assert list(frames.passed_down(raised(fail), Batch)) == []


def test_a_local_of_a_function() -> None:
    def scan(requests: list[Request]) -> None:
        adder = requests[0]
        assert adder
        fail()

    error = raised(scan, [A])
    assert frames.local(error, "scan", "adder") is A
    assert frames.local(error, "scan", "nothing") is None and frames.local(error, "nowhere", "adder") is None


def test_of_outputs_that_are_sent_one_by_one_the_failing_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from fluxion_sglang.sglang.containment import outputs

    monkeypatch.setattr(outputs, "_unsend", lambda message: None)

    def _stream_output_generation(requests: list[Request]) -> None:
        acc = requests  # noqa: F841 (the hook looks for it)
        if B in requests:
            fail()

    def stream(streamer: Any, requests: list[Request], logprobs: bool, skip: Any = None) -> None:
        _stream_output_generation(requests)

    with pytest.raises(ValueError) as error:
        outputs.stream_output(stream, None, [A, B, C], False)
    assert frames.culprit(error.value, Request) is B
