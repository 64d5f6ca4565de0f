"""Inject faults into SGLang's functions: a call that concerns one request raises, before or after its work.

`injected` wraps a function where SGLang looks it up. The traceback names the request, as a parameter of the function
that raises, or it does not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

GUILTY = "guilty"
"""Prefix of the guilty request's id."""

MANAGERS = "sglang.srt.managers"
COMPONENTS = f"{MANAGERS}.scheduler_components"

SITES: dict[str, tuple[str, ...]] = {
    "prepare_for_extend": (f"{MANAGERS}.schedule_batch:ScheduleBatch.prepare_for_extend",),
    "prepare_for_decode": (f"{MANAGERS}.schedule_batch:ScheduleBatch.prepare_for_decode",),
    "from_schedule_batch": ("sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.from_schedule_batch",),
    "forward_batch_generation": (f"{MANAGERS}.tp_worker:TpModelWorker.forward_batch_generation",),
    "sample": ("sglang.srt.model_executor.model_runner:ModelRunner.sample",),
    "update_regex_vocab_mask": ("sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.update_regex_vocab_mask",),
    "update_finish_state": (f"{MANAGERS}.schedule_batch:Req.update_finish_state",),
    "accept_token": ("sglang.srt.constrained.xgrammar_backend:XGrammarGrammar.accept_token",),
    "add_logprob_return_values": (
        f"{COMPONENTS}.logprob_result_processor:SchedulerLogprobResultProcessor.add_logprob_return_values",
    ),
    "process_batch_result": (f"{MANAGERS}.scheduler:Scheduler.process_batch_result",),
    "release_kv_cache": (
        f"{COMPONENTS}.batch_result_processor:release_kv_cache",
        f"{MANAGERS}.scheduler:release_kv_cache",
    ),
    "accept": (f"{COMPONENTS}.output_streamer:_GenerationStreamAccumulator.accept",),
    "to_payload": (f"{COMPONENTS}.output_streamer:_GenerationStreamAccumulator.to_payload",),
    "init_next_round_input": (f"{MANAGERS}.schedule_batch:Req.init_next_round_input",),
    "add_one_req": (f"{MANAGERS}.schedule_policy:PrefillAdder.add_one_req",),
    "calc_priority": (f"{MANAGERS}.schedule_policy:SchedulePolicy._determine_active_policy",),
    "handle_generate_request": (f"{MANAGERS}.scheduler:Scheduler.handle_generate_request",),
    "handle_batch_token_id_out": (f"{MANAGERS}.detokenizer_manager:DetokenizerManager._decode_batch_token_id_output",),
    "on_idle": (f"{MANAGERS}.scheduler:Scheduler.on_idle",),
}
"""Places where SGLang looks up each function."""

ANONYMOUS = ("on_idle",)
"""Sites that concern no request."""


class Injected(RuntimeError):
    """Raised by the wrapped function."""


@dataclass
class Fault:
    """When a wrapped function raises.

    Args:
        after: raise after the work. named: the traceback names the request. skip: calls concerning the request that
            succeed first. times: number of calls that fail.
    """

    after: bool
    named: bool
    skip: int
    times: int
    raised: int = 0

    def due(self) -> bool:
        if self.skip > 0:
            self.skip -= 1
            return False
        return self.raised < self.times


def _fail(fault: Fault, batch: Any) -> None:
    """Raise with the batch as a parameter, as in SGLang's function; the wrapper's own parameters do not show it."""
    fault.raised += 1
    raise Injected("injected")


def _fail_for(fault: Fault, batch: Any, req: Any) -> None:
    """Raise with the request as a parameter too."""
    _fail(fault, batch)


def _guilty(value: Any) -> Any | None:
    """The guilty request, if `value` is it or a batch with it."""
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    if isinstance(value, Req):
        return value if str(value.rid).startswith(GUILTY) else None
    requests = value.reqs if isinstance(value, ScheduleBatch) else value if isinstance(value, list) else ()
    return next((one for one in requests or () if isinstance(one, Req) and str(one.rid).startswith(GUILTY)), None)


def _concerned(arguments: tuple[Any, ...]) -> Any | None:
    """The guilty request, if a call concerns it: by its arguments, else by the batch in the callers' frames.

    A message between processes counts like the request."""
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    for value in arguments:
        if (found := _guilty(value)) is not None:
            return found
        rids = getattr(value, "rids", None)
        if isinstance(rids, list):
            return value if any(str(rid).startswith(GUILTY) for rid in rids) else None
        if not isinstance(value, Req) and str(getattr(value, "rid", "")).startswith(GUILTY):
            return value
    if any(isinstance(value, Req | ScheduleBatch) for value in arguments):
        return None
    frame = sys._getframe(2)
    while frame is not None:
        batches = [value for value in frame.f_locals.values() if isinstance(value, ScheduleBatch)]
        if batches:
            return next(filter(None, map(_guilty, batches)), None)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _wrapped(original: Callable[..., Any], fault: Fault, anonymous: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values())
        found = True if anonymous else _concerned(arguments)
        failing = found is not None and fault.due()

        def fail() -> None:
            from sglang.srt.managers.schedule_batch import ScheduleBatch

            batch = next((value for value in arguments if isinstance(value, ScheduleBatch)), None)
            (_fail_for(fault, batch, found) if fault.named else _fail(fault, batch))

        if failing and not fault.after:
            fail()
        result = original(*args, **kwargs)
        if failing:
            fail()
        return result

    return wrapper


@contextmanager
def injected(site: str, fault: Fault) -> Iterator[Fault]:
    with ExitStack() as stack:
        for path in SITES[site]:
            module, _, name = path.partition(":")
            owner: Any = import_module(module)
            *outer, name = name.split(".")
            for part in outer:
                owner = getattr(owner, part)
            kept = vars(owner)[name]
            inner = kept.__func__ if isinstance(kept, classmethod) else kept
            wrapper: Any = _wrapped(inner, fault, site in ANONYMOUS)
            if isinstance(kept, classmethod):
                wrapper = classmethod(wrapper)
            stack.enter_context(mock.patch.object(owner, name, wrapper))
        yield fault
