"""A forward pass of which something of Fluxion's own failed ends its requests with an error; the server goes on.

A failed task (a worker's error, a time-out) does not interrupt the pass: it is completed with zeros, its requests are
told to finish with the reason, and nothing that the pass computed may enter the radix tree. A prompt of which a chunk
failed is computed no further. Tensor-parallel ranks compute one pass together: what has failed on one has failed on
all. So has a request that one of them ended before the pass (`requests.py`).
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
    """What failed in a pass.

    Attributes:
        reason: why none of its requests has a result; None: they may have.
        lost: requests that failed by themselves, by their place in the batch, each with its reason.
    """

    reason: str | None
    lost: dict[int, str]


class FailureGuard:
    """Contains the failures of one forward pass, where the caller reports them.

    Outside `containing()` (SGLang's offline benchmarks call the model without a scheduler) a failure is raised.

    Args:
        finish: completes a pass of which nothing has failed; it may raise what failed since.
        abort: gives up one that has. report: a pass has failed, and is counted.

    Attributes:
        found: what has failed of the pass.
        failed: passes that have failed, on any rank; the first tensor-parallel rank alone counts them.
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
        """The first failure of the pass on this rank; None while there is none."""
        return self.found.reason

    @contextmanager
    def containing(self) -> Iterator[FailureGuard]:
        self.found, self._contained = Failures(None, {}), True
        try:
            yield self
        except BaseException:  # of SGLang's: the loop contains it, and our step must not stay open
            self._give_up()
            raise
        else:
            self._close()
        finally:
            self._contained = False

    def lose(self, request: int, reason: str) -> None:
        """One request of the pass has failed, and the others go on. Raises RuntimeError outside `containing()`."""
        if not self._contained:
            raise RuntimeError(reason)
        logger.error("Fluxion: a request of this pass is ended: %s", reason)
        self.found.lost.setdefault(request, reason)

    def ended(self, request: int, reason: str) -> None:
        """One request of the pass has been told to end before it was computed; the other ranks are to hear of it."""
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
        """The result of `step`; None when it, or a step of this pass before it, has failed."""
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
    """AROUND TpModelWorker.forward_batch_generation: hand a contained failure to the requests of the batch.

    A request whose last token is still being processed may get the error in its place: it cannot be told here.
    """
    from sglang.srt.runtime_context import get_parallel

    guard = getattr(attention_of(worker.model_runner), "failures", None)
    if not isinstance(guard, FailureGuard) or batch is None:
        return original(worker, batch, *args, **kwargs)
    parallel = get_parallel()
    # The stages of a pipeline are at different passes, so they cannot tell one another in time: there it stays fatal.
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
    """AROUND Scheduler.process_pending_chunked_abort: a prompt that is to end ends before its next chunk.

    SGLang itself looks at `to_finish` after the last chunk only. Where the client has hung up, or KV from an external
    cache did not come, it does what is done here.
    """
    request = scheduler.chunked_req
    if request is not None and request.to_finish is not None:
        _end_chunked(scheduler, request)
    original(scheduler)


def _end_chunked(scheduler: Any, request: Any) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.runtime_context import get_parallel

    # The stages of a pipeline do not hear of one another's failures: each computes the prompt to its end.
    if not isinstance(request.to_finish, FINISH_ABORT) or get_parallel().pp_size > 1:
        return
    if getattr(scheduler, "_pending_chunked_abort_req", request) is None:  # nor has the client hung up
        request.discard_output_reason = request.to_finish
        scheduler._pending_chunked_abort_req = request


def agreed(mine: Failures, ranks: dist.ProcessGroup) -> Failures:
    """What failed on any of the ranks that computed a pass together: every rank, and so its scheduler, finds the same.

    A collective: every rank calls it after every pass. Nothing but one number is exchanged while nothing fails.

    Args:
        mine: what failed on this rank. ranks: their group for CPU tensors.
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
    # Of several reasons, that of the lowest rank.
    lost = {place: reason for each in reversed(found) for place, reason in each.lost.items()}
    return Failures(reasons[0] if reasons else None, lost)
