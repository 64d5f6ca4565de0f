"""Checks the policy that a request names. Checks without the model run in the process that tokenizes prompts, so a
wrong spec costs no forward pass; the others run in the scheduler's process (`requests.py`)."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from fluxion_sglang import wishes
from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.policy import AUTO, Policy, check_spec

_SHOWN = 60
"""Characters of a wrong value that the error message repeats."""

_AUTO_IS = ("full", "fluxion")
"""Possible policies of the server under `auto`; only the scheduler's process knows which one it is."""


def check(params: object, config: FluxionConfig) -> None:
    """Refuse a policy that no server with these options takes.

    Args:
        params: the request's sampling_params as the client sent them.

    Raises:
        ValueError: one sentence for the client.
    """
    custom = params.get("custom_params") if isinstance(params, dict) else None
    named = custom.get(wishes.POLICY) if isinstance(custom, dict) else None
    if named is None:
        return
    spec = text_of(named)
    if spec == config.policy or (config.policy == AUTO and spec in _AUTO_IS):
        return
    check_allowed(spec, config.request_policies)
    try:
        policy = check_spec(spec)
    except ValueError:
        raise
    except Exception:  # raised by another package; the scheduler's process contains and reports it
        return
    if policy is not None:
        check_yardstick(policy, config.audit is not None)
        check_sketches(policy, config.sketched)


def text_of(spec: Any) -> str:
    """Return `spec`; raises ValueError if it is no string."""
    if isinstance(spec, str):
        return spec
    # A list or an object may be huge, and all requests would wait until it is formatted.
    shown = "a JSON list" if isinstance(spec, list) else "a JSON object" if isinstance(spec, dict) else ""
    shown = shown or json.dumps(spec, default=repr)[:_SHOWN]
    raise ValueError(f'{wishes.POLICY} is {shown}, but it takes a policy spec in a string, such as "fixed:16:0.05".')


def check_allowed(spec: str, allowed: bool | Collection[str]) -> None:
    """Raise ValueError if request_policies forbids a spec that is not the server's own."""
    if not allowed:
        raise ValueError(
            f"{wishes.POLICY} is not taken by this server, where all requests follow one policy; leave it out."
        )
    if allowed is not True and spec not in allowed:
        shown = json.dumps(spec if len(spec) <= _SHOWN else spec[:_SHOWN] + "...")
        takes = ", ".join(map(json.dumps, allowed))
        raise ValueError(f"{wishes.POLICY} {shown} is not one that this server takes; use {takes}, or leave it out.")


def check_yardstick(policy: Policy, audited: bool) -> None:
    """Raise ValueError for a policy, not the server's own, that reads every key to decide, unless the server has the
    option audit."""
    if policy.yardstick and not audited:
        raise ValueError(
            f"{wishes.POLICY} {policy.spec!r} is not taken by this server, because it reads everything to decide, "
            "which all requests wait for; use another policy, or start the server with the option audit to measure."
        )


def check_sketches(policy: Policy, sketched: bool) -> None:
    """Raise ValueError for a policy that needs sketches on a server without them."""
    if policy.sketches and not sketched:
        raise ValueError(
            f"{wishes.POLICY} {policy.spec!r} is not taken by this server, because it keeps no sketches of keys; use "
            'another policy, or start the server with {"sketches": true}.'
        )
