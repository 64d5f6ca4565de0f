"""A failure of Fluxion's own code in a forward pass ends the requests of the pass with an error; the server continues.

A failed task (a worker's error, a time-out) does not interrupt the pass. The pass is completed with zeros, its requests
finish with the reason, and its KV does not enter the radix tree. A prompt with a failed chunk is not computed further.
Tensor-parallel ranks compute a pass together, so a failure on one rank counts for all. The same holds for a request
that one of them ends before the pass (`requests.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fluxion_sglang.sglang.containment import budgets, counts
from fluxion_sglang.sglang.containment.ending import end_request
from fluxion_sglang.sglang.hooking import attention_of

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Failures(NamedTuple):
    """The failures of a pass.

    Attributes:
        reason: why none of its requests has a result; None: they may have.
        lost: reasons of requests that failed alone, by batch index.
    """

    reason: str | None
    lost: dict[int, str]


class FailureGuard:
    """Contains the failures of one forward pass.

    Outside `containing()` (SGLang's offline benchmarks call the model without a scheduler) a failure is raised.

    Args:
        finish: completes a pass without failures; it may raise a late failure.
        abort: drops a failed pass. report: called after a failed pass, to publish counts.

    Attributes:
        found: the failures of the pass.
        failed: number of passes that failed on any rank; only the first tensor-parallel rank counts them.
    """

    def __init__(
        self,
        finish: Callable[[], None] = lambda: None,
        abort: Callable[[], None] = lambda: None,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        self.finish, self._abort, self.report = finish, abort, report
        self.found = Failures(None, {})
        self.failed = 0
        self._contained = False

    @property
    def reason(self) -> str | None:
        """The first failure of the pass on this rank, or None."""
        return self.found.reason

    @contextmanager
    def containing(self) -> Iterator[FailureGuard]:
        self.found, self._contained = Failures(None, {}), True
        try:
            yield self
        except BaseException:  # an error of SGLang's, which the loop contains; our step must not stay open
            self._give_up()
            raise
        else:
            self._close()
        finally:
            self._contained = False

    def lose(self, request: int, reason: str) -> None:
        """Note that one request of the pass failed; the others continue. Raises RuntimeError outside `containing()`."""
        if not self._contained:
            raise RuntimeError(reason)
        logger.error("Fluxion: a request of this pass is ended: %s", reason)
        self.found.lost.setdefault(request, reason)

    def ended(self, request: int, reason: str) -> None:
        """Note that one request was ended before the pass computes it, so that the other ranks learn of it."""
        if self._contained:
            self.found.lost.setdefault(request, reason)

    def _close(self) -> None:
        if self.reason is None:
            self.run(self.finish)
        else:
            self._give_up()

    def _give_up(self) -> None:
        try:
            self._abort()
        except Exception:
            logger.exception("Fluxion: what a failed pass left behind could not be cleared; the next may fail, too")

    def run(self, step: Callable[[], T]) -> T | None:
        """The result of `step`; None if it fails, or if an earlier step of this pass failed."""
        if not self._contained:
            return step()
        if self.reason is None:
            try:
                return step()
            except Exception as error:
                self.found = self.found._replace(reason=str(error) or type(error).__name__)
                logger.exception("Fluxion: the pass failed, and its requests are ended")
        return None


def forward_batch_generation(
    original: Callable[..., Any], worker: Any, batch: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """AROUND TpModelWorker.forward_batch_generation: end the requests of a batch with a contained failure.

    A request whose last token is still being processed may get the error instead: the two cases look the same here.
    """
    from sglang.srt.runtime_context import get_parallel

    guard = getattr(attention_of(worker.model_runner), "failures", None)
    if not isinstance(guard, FailureGuard) or batch is None:
        return original(worker, batch, *args, **kwargs)
    parallel = get_parallel()
    # Pipeline stages run different passes and cannot tell one another in time, so there a failure is fatal.
    if parallel.pp_size > 1:
        result = original(worker, batch, *args, **kwargs)
        guard.finish()
        return result
    with guard.containing():
        for place, why in budgets.overspent(batch.reqs):
            end_request(batch.reqs[place], why, HTTPStatus.BAD_REQUEST, "BadRequestError")
            guard.ended(place, why)
        result = original(worker, batch, *args, **kwargs)
    found = guard.found if parallel.tp_size == 1 else agreed(guard.found, parallel.tp_group.cpu_group)
    if found.reason is not None:
        guard.failed += parallel.tp_rank == 0
        guard.report()
        counts.contained("passes")
    every = range(len(batch.reqs))
    failed = found.lost if found.reason is None else dict.fromkeys(every, f"the pass failed: {found.reason}")
    for i, reason in failed.items():
        end_request(batch.reqs[i], reason, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
    return result


def process_pending_chunked_abort(original: Callable[..., None], scheduler: Any) -> None:
    """AROUND Scheduler.process_pending_chunked_abort: a prompt that is ending stops before its next chunk.

    SGLang itself checks `to_finish` only after the last chunk. It treats disconnected clients, and KV that an external
    cache failed to deliver, in the way that is used here.
    """
    request = scheduler.chunked_req
    if request is not None and request.to_finish is not None:
        _end_chunked(scheduler, request)
    original(scheduler)


def _end_chunked(scheduler: Any, request: Any) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.runtime_context import get_parallel

    # Pipeline stages do not learn of one another's failures, so each computes the prompt to its end.
    if not isinstance(request.to_finish, FINISH_ABORT) or get_parallel().pp_size > 1:
        return
    if getattr(scheduler, "_pending_chunked_abort_req", request) is None:  # the client has not disconnected either
        request.discard_output_reason = request.to_finish
        scheduler._pending_chunked_abort_req = request


def agreed(mine: Failures, ranks: dist.ProcessGroup) -> Failures:
    """The failures on any of the ranks that computed a pass together; every rank gets the same result.

    A collective: every rank calls it after every pass. Without a failure only one number is exchanged.

    Args:
        mine: the failures on this rank. ranks: the group for CPU tensors.
    """
    any_failed = torch.tensor(int(mine.reason is not None or bool(mine.lost)), device="cpu")
    dist.all_reduce(any_failed, dist.ReduceOp.MAX, group=ranks)
    if not any_failed:
        return mine
    found: list[Failures] = [mine] * dist.get_world_size(ranks)
    dist.all_gather_object(found, mine, group=ranks)
    reasons = [f"{each.reason} (rank {rank})" for rank, each in enumerate(found) if each.reason is not None]
    if reasons and mine.reason is None:
        logger.error("Fluxion: the pass failed on another rank, and its requests are ended: %s", reasons[0])
    # The reason of the lowest rank takes precedence.
    lost = {place: reason for each in reversed(found) for place, reason in each.lost.items()}
    return Failures(reasons[0] if reasons else None, lost)
