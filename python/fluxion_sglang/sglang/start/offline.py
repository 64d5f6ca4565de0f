"""An engine of SGLang without a server: training and scoring ask it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from fluxion_sglang import openmp

CHUNK: Final = 4096
"""Tokens of a prefill chunk, unless somebody says otherwise: bounds what its queries take, and on a CPU how long a pass
is. SGLang would size it by the memory of a GPU."""


def engine_options(
    model: str, dtype: str, device: str | None, config: Mapping[str, Any] | None, **more: Any
) -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine`.

    Args:
        device: None leaves it to SGLang.
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
    """A running `sglang.Engine`, with the flag or without it."""
    openmp.wait_passively()  # before torch is imported by the engine's processes; for plain SGLang too
    import sglang

    return sglang.Engine(**options)
