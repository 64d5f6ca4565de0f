"""What a request may ask of Fluxion: keys of its `sampling_params.custom_params`.

SGLang carries these to the scheduler's request, on every rank, from /generate and from OpenAI's completions and chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

POLICY: Final = "fluxion_policy"
"""A policy spec: what is read for this request."""

RECORD: Final = "fluxion_record"
"""What is to be recorded of it: {"id": int, "samples": [[anchor, [step, ...]], ...]} (`training/recorder.py`)."""

CHECK: Final = "fluxion_check"
"""true: the whole host pool is to be checked (option `canary`)."""


def of(request: Any) -> Mapping[str, Any]:
    """The custom_params of SGLang's request, or nothing where they are no JSON object."""
    params = request.sampling_params.custom_params
    return params if isinstance(params, Mapping) else {}


def spec_of(request: Any, server: str) -> object:
    """What the request names as its policy; the spec `server` where it names none, or null."""
    spec = of(request).get(POLICY)
    return server if spec is None else spec
