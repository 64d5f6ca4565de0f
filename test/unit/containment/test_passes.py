"""The requests of a failed pass, without a server."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_MATCHED_TOKEN

from fluxion_sglang.sglang.containment import passes
from fluxion_sglang.sglang.containment.passes import (
    FailureGuard,
    Failures,
    agreed,
    end_request,
    forward_batch_generation,
    process_pending_chunked_abort,
)


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


def test_a_pass_may_fail_at_its_end() -> None:
    guard = FailureGuard(finish=fail)
    with guard.containing():
        assert guard.run(lambda: 3) == 3
    assert guard.reason == "page 7 is not one"


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that agree on this rank's findings."""
    monkeypatch.setattr(passes, "agreed", lambda mine, ranks: mine)


def run_batch(
    monkeypatch: pytest.MonkeyPatch, stages: int, guard: FailureGuard, requests: list[Any], rank: int = 0,
    step: Callable[[], None] = fail,
) -> str:  # fmt: skip
    ranks = SimpleNamespace(cpu_group="the ranks")
    parallel = SimpleNamespace(tp_size=2, tp_rank=rank, tp_group=ranks, pp_size=stages)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=SimpleNamespace(failures=guard)))

    def original(worker: Any, batch: Any) -> str:
        guard.run(step)
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


def test_in_a_pipeline_a_failure_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="page 7"):
        run_batch(monkeypatch, 2, FailureGuard(), [])


def test_a_request_that_cannot_be_told_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="cannot be told"):
        run_batch(monkeypatch, 1, FailureGuard(), [SimpleNamespace()])


@pytest.mark.parametrize("rank", [0, 1])
def test_what_failed_on_another_rank_ends_requests_here(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [SimpleNamespace(to_finish=None, skip_radix_cache_insert=False) for _ in range(3)]
    told: list[Failures] = []
    theirs = Failures("theirs", {})

    def agreed_on(mine: Failures, ranks: object) -> Failures:
        assert ranks == "the ranks"
        told.append(mine)
        return theirs

    monkeypatch.setattr(passes, "agreed", agreed_on)
    guard = FailureGuard()
    run_batch(monkeypatch, 1, guard, requests, rank, step=lambda: None)
    assert told == [Failures(None, {})] and guard.failed == (rank == 0)
    assert all(request.to_finish.message == "the pass failed: theirs" for request in requests)
    theirs = Failures(None, {1: "lost there"})
    requests = [SimpleNamespace(to_finish=None, skip_radix_cache_insert=False) for _ in range(3)]
    run_batch(monkeypatch, 1, guard, requests, rank, step=lambda: None)
    assert [request.to_finish is None for request in requests] == [True, False, True]


CASES = [
    ([Failures(None, {}), Failures(None, {})], Failures(None, {})),
    ([Failures(None, {}), Failures("b", {})], Failures("b (rank 1)", {})),
    ([Failures("a", {}), Failures("b", {})], Failures("a (rank 0)", {})),
    ([Failures(None, {1: "a"}), Failures(None, {1: "b", 2: "c"})], Failures(None, {1: "a", 2: "c"})),
]
"""Failures on each of two ranks, and the result that both agree on."""


def agree(rank: int, folder: str, out: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    out.put([agreed(mine[rank], dist.group.WORLD) for mine, _ in CASES])
    dist.destroy_process_group()


def test_ranks_agree_on_what_failed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # SGLang is imported already
    out = context.SimpleQueue()
    ranks = [context.Process(target=agree, args=(rank, str(tmp_path), out)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=300)
        process.kill()
    assert all(process.exitcode == 0 for process in ranks)
    assert [out.get() for _ in ranks] == [[both for _, both in CASES]] * 2


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("reason", [None, FINISH_ABORT("page 7 is not one", 500), FINISH_MATCHED_TOKEN(3)])
def test_a_prompt_that_is_to_end_is_computed_no_further(
    stages: int, reason: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(pp_size=stages))
    request = SimpleNamespace(to_finish=reason, discard_output_reason=None)
    scheduler = SimpleNamespace(chunked_req=request, _pending_chunked_abort_req=None)
    seen: list[Any] = []
    process_pending_chunked_abort(lambda it: seen.append(it._pending_chunked_abort_req), scheduler)
    ends = stages == 1 and isinstance(reason, FINISH_ABORT)
    assert seen == [request if ends else None]
    assert request.discard_output_reason is (reason if ends else None)


def test_a_prompt_that_the_client_aborted_keeps_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(pp_size=1))
    request = SimpleNamespace(to_finish=FINISH_ABORT("ours"), discard_output_reason=None)
    for pending in (request, None):
        scheduler = SimpleNamespace(chunked_req=request if pending else None, _pending_chunked_abort_req=pending)
        process_pending_chunked_abort(lambda _: None, scheduler)
        assert scheduler._pending_chunked_abort_req is pending and request.discard_output_reason is None
