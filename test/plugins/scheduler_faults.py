"""Faults in SGLang's scheduler, for servers with several processes, which find them with this folder on PYTHONPATH."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def load() -> None:
    """On ranks in FAULT_RANKS ("0,1"), decode steps of a request whose id begins with "guilty" fail."""
    ranks = os.environ.get("FAULT_RANKS")
    if ranks is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def prepare_for_decode(original: Callable[..., Any], batch: Any, *args: Any) -> Any:
        from sglang.srt.runtime_context import get_parallel

        guilty = any(request.rid.startswith("guilty") for request in batch.reqs)
        if guilty and str(get_parallel().tp_rank) in ranks.split(","):
            raise RuntimeError("injected fault")
        return original(batch, *args)

    target = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode"
    HookRegistry.register(target, prepare_for_decode, HookType.AROUND)
