"""Policies of single requests (`wishes.POLICY`).

The policies of a pass are read from its batch; SGLang's own state does not change. A request with an illegal spec is
ended; the others of the batch continue.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any

from fluxion_sglang import wishes
from fluxion_sglang.policy import BARE, LONGEST, Context, Policy, check_spec, legal, parse_spec
from fluxion_sglang.sglang.containment.ending import end_request, keep_out_of_tree
from fluxion_sglang.sglang.hooking import attention_of
from fluxion_sglang.sglang.requests import asked, sessions

logger = logging.getLogger(__name__)

_PARSED_SPECS = 64


class _Approximates:
    """A request whose policy is not exact. SGLang reads it as the request's `skip_radix_cache_insert`: it is true if
    the request has KV that the policy approximated.

    The object keeps the request's policy to its end: a new instance would lack its state, and answer differently.

    SGLang reads the flag just before an insertion. A flag set at the start of a pass would be wrong in two cases. With
    overlap scheduling the first decode step runs before the prompt is inserted, and after the last token there is no
    further pass.
    """

    def __init__(self, request: Any, policy: Policy) -> None:
        self.policy = policy
        self.decoding = False  # a decode step has run under the policy
        self._request = weakref.ref(request)
        self._inherits = sessions.is_approximated(request)

    def __bool__(self) -> bool:
        request = self._request()
        if self._inherits or request is None or len(request.output_ids) > 1:
            return True
        # The prompt is inserted with its first token. But a request that ends with that token is asked only once, and a
        # decode step in flight may have added the token's KV by then.
        return self.decoding and bool(request.finished())


class RequestPolicies:
    """The policies of the requests of the current pass.

    Only exact KV is inserted into the radix tree. If a request's policy is not exact, its prompt is inserted, because
    prefill is exact, but not its decoded tokens. So no request reuses approximated KV, and `full` is full attention.

    Args:
        server: the default policy of requests.
        allowed: whether a request may name another policy, or the specs that it may name. Others end the request.
        context: resolves predictors.
        yardsticks: whether a request may name a policy that reads every key to decide; its whole batch waits for that.
        sketched: whether the host pool has sketches of keys.
        check: check(wishes, prompt tokens) raises ValueError for illegal recording wishes.
        one: specs of requests are checked, but all requests follow the server's policy.
        canary: whether a request may ask for a check of the whole host pool.
        mixes: decode steps that ride in a prefill pass follow their policies, too (`Device.mixes`).

    Attributes:
        current: one policy per request of the batch; None outside a pass, and if all follow the server's.
        riding: batch indices of requests that decode in a prefill pass of others (a mixed chunk).
        checks: batch indices of requests that ask for a check of the whole host pool.
        refused: number of requests that named no legal policy.
        recorded: for each request of the batch, its recording wishes (`training/recorder.py`) or None.
    """

    def __init__(
        self,
        server: Policy,
        allowed: bool | Collection[str] = True,
        context: Context = BARE,
        yardsticks: bool = False,
        check: Callable[[object, int], None] = lambda wishes, tokens: None,
        one: bool = False,
        canary: bool = False,
        sketched: bool = False,
        mixes: bool = False,
    ) -> None:
        self.server = server
        self._mixes = mixes
        self.allowed = allowed
        self.yardsticks = yardsticks
        self.sketched = sketched
        self.refused = 0
        self.current: Sequence[Policy] | None = None
        self.riding: Collection[int] = ()
        self.checks: Collection[int] = ()
        self.recorded: Sequence[Mapping[str, Any] | None] = ()
        # Failed specs are not cached: what they lack may exist the next time.
        self._parse = lru_cache(_PARSED_SPECS)(partial(_made, context=context))
        self._check, self._one, self._canary = check, one, canary
        self._approximating: weakref.WeakKeyDictionary[Any, _Approximates] = weakref.WeakKeyDictionary()
        self._checked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._swept: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ending = server if server.exact else parse_spec("full")  # for requests that are ending
        legal()  # imports every policy's module now, so that a wrong spec of a client does not delay requests

    @contextmanager
    def of(self, requests: Sequence[Any], decoding: bool, riding: Sequence[Any] = ()) -> Iterator[dict[int, str]]:
        """Make the policies of `requests` (SGLang's) current, and end those without a legal one.

        Args:
            decoding: the pass is a decode step; any other is exact.
            riding: those of `requests` that decode in a prefill pass.

        Yields:
            The reasons of the requests that were ended here, by batch index.
        """
        before = [request.to_finish for request in requests]
        ids = {id(request) for request in riding}
        self.riding = {i for i, request in enumerate(requests) if id(request) in ids}
        steps = [decoding or (self._mixes and i in self.riding) for i in range(len(requests))]
        policies = [self._policy(request, step) for request, step in zip(requests, steps, strict=True)]
        if any(policy is not self.server for policy in policies):
            self.current = policies
        self.recorded = [
            None if step else self._recorded(request) for request, step in zip(requests, steps, strict=True)
        ]
        self.checks = [i for i, request in enumerate(requests) if self._wants_check(request)]
        try:
            yield {
                place: str(getattr(request.to_finish, "message", ""))
                for place, request in enumerate(requests)
                if before[place] is None and request.to_finish is not None
            }
        finally:
            self.current, self.riding, self.checks, self.recorded = None, (), (), ()

    def _policy(self, request: Any, decoding: bool) -> Policy:
        try:
            return self._policy_of(request, decoding)
        except Exception as error:  # raised by a policy; uncontained, it would end the scheduler
            logger.exception("Fluxion: the policy of a request failed, and the request is ended")
            sentence = f"the policy of this request failed ({_said(error)}); use another one."
            end_request(request, sentence, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
            if (kept := self._approximating.get(request)) is not None:
                kept.policy = self._ending  # the failed policy is not asked again
            return self._ending

    def _policy_of(self, request: Any, decoding: bool) -> Policy:
        kept = self._approximating.get(request)
        if kept is None:
            if request.to_finish is not None:  # it is in every pass until it has ended
                return self._ending
            try:
                policy = self._wanted(request)
            except ValueError as error:
                self.refused += 1
                end_request(request, str(error), HTTPStatus.BAD_REQUEST, "BadRequestError")
                return self._ending  # for work that is already in flight
            if policy.exact:
                return policy
            kept = self._approximating[request] = _Approximates(request, policy)
            if not request.skip_radix_cache_insert:  # SGLang keeps some requests out itself
                keep_out_of_tree(request, kept)
        if decoding:
            kept.decoding = True
            # Store the spec as the request gives it, because the session's next turn is compared with the same form.
            sessions.approximated(request, str(wishes.spec_of(request, self.server.spec)), self.server.spec)
        return kept.policy

    def _recorded(self, request: Any) -> Mapping[str, Any] | None:
        """A request's recording wishes; None: there are none, or they are illegal and the request is ended."""
        wish = wishes.of(request).get(wishes.RECORD)
        if wish is None or request.to_finish is not None:
            return None
        if request not in self._checked:  # checked once, although a prompt comes in chunks
            try:
                self._check(wish, len(request.origin_input_ids))
            except ValueError as error:
                end_request(request, str(error), HTTPStatus.BAD_REQUEST, "BadRequestError")
                return None
            except Exception as error:  # the folder cannot be reached; uncontained, it would end the scheduler
                logger.exception("Fluxion: what a request wants recorded could not be looked at; it is ended")
                sentence = f"{wishes.RECORD} cannot be done now ({_said(error)}); send the request without it."
                end_request(request, sentence, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
                return None
            self._checked.add(request)
        return wish if isinstance(wish, Mapping) else None

    def _wants_check(self, request: Any) -> bool:
        """Whether a request asks for a check of the whole host pool, once; ends the request if there is no canary."""
        if wishes.of(request).get(wishes.CHECK) is not True or request in self._swept:
            return False
        self._swept.add(request)
        if not self._canary:
            end_request(
                request,
                f"{wishes.CHECK} needs a server with the option canary; start it with one, or leave it out.",
                HTTPStatus.BAD_REQUEST,
                "BadRequestError",
            )
        return self._canary

    def _wanted(self, request: Any) -> Policy:
        named = self._named(wishes.spec_of(request, self.server.spec))
        return self.server if self._one else named

    def _named(self, named: object) -> Policy:
        spec = asked.text_of(named)
        if spec == self.server.spec:
            return self.server
        asked.check_allowed(spec, self.allowed)
        if len(spec) > LONGEST:
            check_spec(spec)  # raises; keeps long specs out of the cache
        policy = self._parse(spec)
        asked.check_yardstick(policy, self.yardsticks)
        asked.check_sketches(policy, self.sketched)
        return policy


def _made(spec: str, context: Context) -> Policy:
    """Build the policy of a spec.

    Raises:
        ValueError: it cannot be built.
    """
    try:
        return parse_spec(spec, context)
    except ValueError:
        raise
    except Exception as error:
        logger.exception("Fluxion: the policy %r cannot be made; its request is ended", spec)
        raise ValueError(f"{wishes.POLICY} {spec!r} cannot be used ({_said(error)}); use another policy.") from error


def _said(error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {reason}"


def forward_batch_generation(
    original: Callable[..., Any], worker: Any, batch: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """AROUND TpModelWorker.forward_batch_generation: run the pass with the policies of its requests."""
    policies = getattr(attention_of(worker.model_runner), "requests", None)
    if not isinstance(policies, RequestPolicies) or batch is None:
        return original(worker, batch, *args, **kwargs)
    # Read from the batch, because the backend sees a mixed pass as an extend.
    riding = (batch.decoding_reqs or ()) if batch.forward_mode.is_mixed() else ()
    with policies.of(batch.reqs, batch.forward_mode.is_decode(), riding) as ended:
        for place, reason in ended.items():
            attention_of(worker.model_runner).failures.ended(place, reason)
        return original(worker, batch, *args, **kwargs)
