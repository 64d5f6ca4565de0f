"""Starts an SGLang engine without a server, for training and scoring."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from fluxion_sglang import openmp

CHUNK: Final = 4096
"""Default tokens of a prefill chunk. It bounds the memory of its queries, and on a CPU the time of a pass. SGLang's
default depends on the memory of a GPU."""


def engine_options(
    model: str, dtype: str, device: str | None, config: Mapping[str, Any] | None, **more: Any
) -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine`.

    Args:
        device: None: SGLang chooses.
        config: the object of --fluxion-config; None leaves the flag out.
        more: further arguments.
    """
    return {
        "model_path": model,
        "dtype": dtype,
        "chunked_prefill_size": CHUNK,
        "log_level": "error",
        **({} if device is None else {"device": device}),
        **({} if config is None else {"enable_fluxion": True, "fluxion_config": json.dumps(dict(config))}),
        **more,
    }


def start_engine(options: Mapping[str, Any]) -> Any:
    """Start a `sglang.Engine`, with or without the flag."""
    openmp.wait_passively()  # before the engine's processes import torch; also for plain SGLang
    import sglang

    return sglang.Engine(**options)
