"""Runs SGLang engines that serve every policy.

A request names its policy, so one engine serves them all, and its radix tree shares the prefilled document among them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fluxion_sglang import wishes
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.scoring.forced import NOTES, serialized
from fluxion_sglang.scoring.kl import Distribution
from fluxion_sglang.sglang.start.offline import engine_options, start_engine

OFF: Final = "off"
"""Name for plain SGLang without the flag."""

IDLE_S: Final = 30
"""Longest time in seconds from an engine's last answer until it is idle."""


class EngineFailed(Exception):
    """The engine did not start; the message is one line from the engine."""


class RequestFailed(Exception):
    """The engine refused or aborted a request, or its result cannot be compared. The message gives the reason."""


@dataclass(frozen=True)
class Request:
    """One greedy completion.

    Attributes:
        forced: true tokens to decode instead of the most probable ones; () for a free answer.
    """

    prompt: tuple[int, ...]
    policy: str
    max_new_tokens: int
    forced: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reply:
    """The result of a request.

    Attributes:
        tokens: the completion; if forced, the targets.
        steps: the next-token distribution at each of its tokens.
        logprobs: of each token.
    """

    tokens: list[int]
    steps: list[Distribution]
    logprobs: list[float]


@dataclass(frozen=True)
class Needs:
    """Required capacity of an engine.

    Attributes:
        tokens: of all concurrent requests, prompts and answers; shared tokens count once.
        batch: concurrent requests.
        forced: whether requests force tokens.
    """

    tokens: int
    batch: int
    forced: bool


class Server:
    """An engine and the audit file that it writes.

    Args:
        engine: has SGLang's `Engine.generate` and `shutdown`.
        top: tokens that a distribution lists.
        audit: file that the engine appends to; None: it does not audit.
    """

    def __init__(self, engine: Any, top: int, audit: Path | None = None) -> None:
        self._engine, self._top, self._audit = engine, top, audit

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        """Serve requests together, up to the engine's batch size at a time.

        Raises:
            RequestFailed: the engine did not serve one of them.
        """
        if not requests:
            return []
        processors = [serialized() if request.forced else None for request in requests]
        try:
            replies = self._engine.generate(
                input_ids=[list(request.prompt) for request in requests],
                sampling_params=[self._sampling(request) for request in requests],
                return_logprob=True,
                top_logprobs_num=[0 if request.forced else self._top for request in requests],
                **({"custom_logit_processor": processors} if any(processors) else {}),
            )
        except ValueError as error:  # the engine refuses a request
            raise RequestFailed(f"The engine refused a request: {error}") from error
        return [self._reply(request, reply) for request, reply in zip(requests, replies, strict=True)]

    def audited(self) -> list[NDArray[Any]]:
        """The audit records since the last call, one array per decode step."""
        if self._audit is None or not self._audit.exists():
            return []
        from fluxion_sglang.scoring.audit_file import read

        arrays, _ = read(self._audit)
        # A run writes gigabytes, so empty the file. The engine appends, and is idle between two calls of `generate`.
        os.truncate(self._audit, 0)
        return list(arrays)

    def forget(self) -> None:
        """Flush the radix tree, so that the next request prefills its whole prompt."""
        until = time.monotonic() + IDLE_S
        while not self._engine.flush_cache().success:
            if time.monotonic() > until:
                raise RequestFailed("The engine did not flush its radix tree.")
            time.sleep(0.01)

    def close(self) -> None:
        self._engine.shutdown()
        if self._audit is not None:
            shutil.rmtree(self._audit.parent, ignore_errors=True)

    def _sampling(self, request: Request) -> dict[str, Any]:
        params: dict[str, Any] = {}
        if request.policy != OFF:
            params[wishes.POLICY] = request.policy
        if request.forced:
            params |= {"forced": list(request.forced), "top": self._top}
        return {
            "temperature": 0,
            "max_new_tokens": request.max_new_tokens,
            "ignore_eos": bool(request.forced),
            **({"custom_params": params} if params else {}),
        }

    def _reply(self, request: Request, reply: dict[str, Any]) -> Reply:
        meta = reply.get("meta_info") or {}
        reason = meta.get("finish_reason") or {}
        if not meta or reason.get("type") == "abort":
            raise RequestFailed(f"A request under policy {request.policy!r} failed: {reason.get('message') or reply}")
        if meta.get("num_retractions"):
            # After a retraction, decoded tokens are prefilled again, exactly under any policy. `Needs` is sized to
            # avoid this.
            raise RequestFailed(
                f"A request under policy {request.policy!r} was retracted: the engine ran out of memory for KV; give a "
                "smaller --batch, and another --out, because what is there is of this one."
            )
        tokens = list(reply["output_ids"])
        if request.forced:
            notes = meta.get(NOTES) or []
            if len(notes) != len(request.forced) or tokens != list(request.forced):
                raise RequestFailed(
                    f"A request under policy {request.policy!r} was to decode {len(request.forced)} given tokens, and "
                    f"decoded {len(tokens)} with {len(notes)} notes."
                )
            steps = [_distribution(ids, values) for _, ids, values in notes]
            return Reply(tokens, steps, [logprob for logprob, _, _ in notes])
        top = [
            _distribution([entry[1] for entry in step], [entry[0] for entry in step])
            for step in meta["output_top_logprobs"]
        ]
        return Reply(tokens, top, [entry[0] for entry in meta["output_token_logprobs"]])


FORCED_AUDITED: Final = 8
"""One in this many steps with forced tokens is audited: such answers have hundreds of steps, and an audit takes a third
of the time."""

Start = Callable[[str, Needs], Server]
"""Starts an engine, given `OFF` or any policy, and its required capacity."""


def starter(
    model: Path, top: int, dtype: str, device: str | None = None, config: Mapping[str, Any] | None = None
) -> Start:
    """A function that starts engines for a model.

    Args:
        top: as for `Server`. dtype, device: as SGLang's. config: further options of `--fluxion-config`.
    """

    def start(policy: str, needs: Needs) -> Server:
        audit = None if policy == OFF else Path(tempfile.mkdtemp(prefix="fluxion-quality-")) / "audit.npy"
        try:
            engine = start_engine(options(model, dtype, device, needs, audit, config or {}))
        except BaseException as error:  # an engine can fail with any exception
            if audit is not None:
                shutil.rmtree(audit.parent, ignore_errors=True)
            if not isinstance(error, (Exception, SystemExit)):
                raise
            reason = [type(error).__name__, *str(error).strip().splitlines()[:1]]
            raise EngineFailed(f"The engine did not start: {': '.join(reason)}") from error
        return Server(engine, top, audit)

    return start


def options(
    model: Path, dtype: str, device: str | None, needs: Needs, audit: Path | None, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine`; without an audit file, those of SGLang without the flag."""
    tokens = -(-needs.tokens // PAGE) * PAGE
    more = {
        "max_running_requests": needs.batch,
        # With the overlap schedule, a step is computed past the end of every answer (and would be audited), and a logit
        # processor sees a request one token late.
        "disable_overlap_schedule": True,
        "enable_custom_logit_processor": needs.forced,
    }
    if audit is None:
        return engine_options(str(model), dtype, device, None, max_total_tokens=tokens, **more)
    every = FORCED_AUDITED if needs.forced else 1
    flag = {
        **config,
        "policy": "full",
        "host_tokens": tokens,
        "audit": {"file": str(audit), "every": every},
    }
    return engine_options(str(model), dtype, device, flag, **more)


def _distribution(ids: Sequence[int], logprobs: Sequence[float]) -> Distribution:
    return Distribution(np.asarray(ids, np.int64), np.asarray(logprobs, np.float64))
