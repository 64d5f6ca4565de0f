"""Parses policy specs: NAME[:ARG...], as in `--fluxion-config`, a request, or the benchmarks."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint
from typing import Final

from fluxion_sglang import plugins
from fluxion_sglang.policy.arguments import NotLegal
from fluxion_sglang.policy.base import Context, Policy
from fluxion_sglang.policy.fixed import FixedPolicy
from fluxion_sglang.policy.fluxion import FluxionPolicy
from fluxion_sglang.policy.full import FullPolicy
from fluxion_sglang.policy.sketch import SketchPolicy
from fluxion_sglang.policy.streaming import StreamingPolicy
from fluxion_sglang.predictor.artifact import LoadedPredictor

AUTO: Final = "auto"
"""The spec that a server resolves at its start: `fluxion` if a predictor fits, else `full`."""

LONGEST: Final = 128
"""Longest spec in characters. Clients send specs, and splitting a long one would delay every request."""

BARE: Final = Context()
"""A context without a predictor."""

CORE: Final[dict[str, type[Policy]]] = {
    "full": FullPolicy,
    "streaming": StreamingPolicy,
    "fixed": FixedPolicy,
    "fluxion": FluxionPolicy,
    "sketch": SketchPolicy,
}
"""Built-in policies by name. Other policies, and more arguments of these, come from entry points `plugins.POLICIES`."""

_SHOWN = 60
"""Characters of a wrong spec that its error message repeats, because a client may have sent it."""


class _Legal(Exception):
    """Raised in place of loading a predictor: the arguments were legal, and the check needs no predictor."""


def _legal(tau: float | None) -> LoadedPredictor:
    raise _Legal


def check_spec(spec: str) -> Policy | None:
    """The policy that `spec` names, or None if it needs a predictor; none is loaded here.

    Raises:
        ValueError: it names no policy; one sentence with the legal specs.
    """
    with suppress(_Legal):
        return parse_spec(spec, Context(predictor=_legal))
    return None


def parse_spec(spec: str, context: Context = BARE) -> Policy:
    """Build the policy that `spec` names; the policy's `spec` is that string.

    Raises:
        ValueError: one sentence with the legal specs, or with what the policy lacks.
    """
    name, *words = spec.split(":") if len(spec) <= LONGEST else ("",)
    policy = None
    if name in CORE:
        with suppress(NotLegal):
            policy = CORE[name].from_spec(context, *words)
    if policy is None and (point := plugins.named(plugins.POLICIES).get(name)) is not None:
        with suppress(NotLegal):
            policy = _from_plugin(point, context, words)
    if policy is None:
        shown = spec if len(spec) <= _SHOWN else spec[:_SHOWN] + "..."
        raise ValueError(
            f"policy {shown!r} is not one that this version knows; use {', '.join(map(json.dumps, legal()))} (in "
            "brackets what may be left out; BLK 16, 32, 64 or 128 tokens; BUDGET, TAU and EPS fractions in (0, 1], as "
            "in fixed:16:0.05), or install its package, such as fluxion-lab (`make lab` in a checkout of Fluxion)."
        )
    policy.spec = spec
    return policy


@cache
def legal() -> list[str]:
    """The forms of all specs. A policy of another package that declares no forms is listed by its name."""
    forms = dict.fromkeys(form for policy in CORE.values() for form in policy.forms)
    for name, point in plugins.named(plugins.POLICIES).items():
        forms |= dict.fromkeys(_forms(name, point))
    return list(forms)


def examples() -> list[str]:
    """A legal example spec for every form, with the fewest arguments."""
    return list(dict.fromkeys(_shortest(form) for form in legal()))


def _shortest(form: str) -> str:
    while "[" in form:  # drop optional arguments
        form = re.sub(r"\[[^\[\]]*\]", "", form)
    return re.sub("BUDGET|TAU|EPS", "0.10", form.replace("BLK", "16"))


def _forms(name: str, point: EntryPoint) -> tuple[str, ...]:
    with suppress(Exception):  # an import may fail; using the policy reports why
        return tuple(map(str, point.load().forms)) or (name,)
    return (name,)


def _from_plugin(point: EntryPoint, context: Context, words: list[str]) -> Policy:
    try:
        kind = point.load()
        policy = None
        if isinstance(kind, type) and issubclass(kind, Policy):
            policy = kind.from_spec(context, *words) if "from_spec" in vars(kind) else kind(*words)
    except (_Legal, ValueError):  # a ValueError already holds a sentence for the user
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"policy {point.name!r} ({point.value}) cannot be made with {words} ({type(error).__name__}: {reason}); "
            "see what its package says."
        ) from error
    if not isinstance(policy, Policy):
        raise ValueError(
            f"policy {point.name!r} ({point.value}) makes no fluxion_sglang.policy.Policy; mend its package."
        )
    return policy
