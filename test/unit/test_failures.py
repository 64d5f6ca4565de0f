"""What happens to the requests of a failed pass, without a server."""

from __future__ import annotations

import multiprocessing
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fluxion_sglang.sglang.failures import FailureGuard, Failures, agreed, end_request, forward_batch_generation


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


def run_batch(monkeypatch: pytest.MonkeyPatch, stages: int, guard: FailureGuard, requests: list[Any]) -> str:
    parallel = SimpleNamespace(tp_size=1, pp_size=stages)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
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


def test_in_a_pipeline_a_failure_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="page 7"):
        run_batch(monkeypatch, 2, FailureGuard(), [])


def test_a_request_that_cannot_be_told_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="cannot be told"):
        run_batch(monkeypatch, 1, FailureGuard(), [SimpleNamespace()])


def agree(rank: int, folder: str, mine: list[Failures], out: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(mine))
    assert dist.group.WORLD is not None
    out.put((rank, [agreed(Failures(None, {}), dist.group.WORLD), agreed(mine[rank], dist.group.WORLD)]))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mine", "both"),
    [
        ([Failures(None, {}), Failures("rank 1", {})], Failures("rank 1", {})),
        ([Failures("rank 0", {}), Failures("rank 1", {})], Failures("rank 0", {})),
        ([Failures(None, {1: "a"}), Failures(None, {1: "b", 2: "c"})], Failures(None, {1: "a", 2: "c"})),
    ],
)
def test_ranks_agree_on_what_failed(mine: list[Failures], both: Failures, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    out = context.SimpleQueue()
    ranks = [context.Process(target=agree, args=(rank, str(tmp_path), mine, out)) for rank in range(len(mine))]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert all(process.exitcode == 0 for process in ranks)
    found = dict(out.get() for _ in ranks)
    assert found == {rank: [Failures(None, {}), both] for rank in range(len(mine))}
