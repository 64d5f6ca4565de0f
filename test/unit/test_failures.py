"""What happens to the requests of a failed pass, without a server."""

from __future__ import annotations

from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

from fluxion_sglang.sglang.failures import FailureGuard, end_request, forward_batch_generation


def fail() -> None:
    raise ValueError("page 7 is not one")


def test_a_failure_is_raised_where_nobody_reports_it() -> None:
    with pytest.raises(ValueError, match="page 7"):
        FailureGuard().run(fail)


def test_a_contained_failure_skips_the_rest_of_its_pass_and_no_more() -> None:
    guard = FailureGuard()
    calls: list[int] = []
    with guard.containing():
        assert guard.run(lambda: 3) == 3
        assert guard.run(fail) is None
        assert guard.run(lambda: calls.append(1)) is None
        assert guard.reason == "page 7 is not one" and not calls
    with guard.containing():
        assert guard.run(lambda: 4) == 4 and guard.reason is None
    assert guard.failed == 1


def test_a_pass_that_fails_at_its_end_is_counted_too() -> None:
    guard = FailureGuard(finish=fail)
    with guard.containing():
        assert guard.run(lambda: 3) == 3
    assert guard.reason == "page 7 is not one" and guard.failed == 1


def run_batch(monkeypatch: pytest.MonkeyPatch, ranks: int, guard: FailureGuard, requests: list[Any]) -> str:
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(launch_world_size=ranks))
    worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=SimpleNamespace(failures=guard)))

    def original(worker: Any, batch: Any) -> str:
        guard.run(fail)
        return "logits"

    return forward_batch_generation(original, worker, SimpleNamespace(reqs=requests))  # type: ignore[no-any-return]


def test_every_request_of_the_batch_is_told_and_kept_out_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [SimpleNamespace(to_finish=None, skip_radix_cache_insert=False) for _ in range(3)]
    assert run_batch(monkeypatch, 1, FailureGuard(), requests) == "logits"
    for request in requests:
        assert request.skip_radix_cache_insert
        assert "page 7 is not one" in request.to_finish.message and request.to_finish.status_code == 500


def test_a_request_that_is_to_end_keeps_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    request = SimpleNamespace(to_finish=None, skip_radix_cache_insert=False)
    end_request(request, "no such policy", HTTPStatus.BAD_REQUEST, "BadRequestError")
    aborted = SimpleNamespace(to_finish="the client left", skip_radix_cache_insert=False)
    run_batch(monkeypatch, 1, FailureGuard(), [request, aborted])
    assert request.to_finish.message == "no such policy" and request.to_finish.status_code == 400
    assert aborted.to_finish == "the client left"
    assert request.skip_radix_cache_insert and aborted.skip_radix_cache_insert


def test_with_several_ranks_a_failure_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="page 7"):
        run_batch(monkeypatch, 2, FailureGuard(), [])


def test_a_request_that_cannot_be_told_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="cannot be told"):
        run_batch(monkeypatch, 1, FailureGuard(), [SimpleNamespace()])
