"""Per-request options of Fluxion: keys of a request's `sampling_params.custom_params`.

SGLang passes these to the scheduler's request on every rank, from /generate and from OpenAI's completions and chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

POLICY: Final = "fluxion_policy"
"""The policy spec for this request."""

RECORD: Final = "fluxion_record"
"""Samples to record: {"id": int, "samples": [[anchor, [step, ...]], ...]} (`training/recorder.py`)."""

CHECK: Final = "fluxion_check"
"""true: check the whole host pool (option `canary`)."""


def of(request: Any) -> Mapping[str, Any]:
    """The custom_params of SGLang's request; {} if they are no JSON object."""
    params = request.sampling_params.custom_params
    return params if isinstance(params, Mapping) else {}


def spec_of(request: Any, server: str) -> object:
    """The policy spec that the request names; `server` if it names none or null."""
    spec = of(request).get(POLICY)
    return server if spec is None else spec
