"""Counters of what was contained, in whichever process of the server."""

from __future__ import annotations

from fluxion_sglang.executor import metrics


def contained(ring: str) -> None:
    """One failure that ended its request and not the server."""
    if _published():
        metrics.count_contained(ring)


def suspected(requests: int) -> None:
    """Requests that are tried alone, because a pass of several failed and nothing names the guilty one."""
    if _published():
        metrics.count_suspects(requests)


def rebuilt() -> None:
    """The pools were emptied, because they were not sound after a failure."""
    if _published():
        metrics.count_rebuilt()


def _published() -> bool:
    from sglang.srt.runtime_context import get_observability

    try:
        return bool(get_observability().enable_metrics)
    except ValueError:  # no server
        return False
