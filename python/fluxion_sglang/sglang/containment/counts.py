"""Counters of contained failures, in any process of the server."""

from __future__ import annotations

from fluxion_sglang.executor import metrics


def contained(ring: str) -> None:
    """Count a failure that ended its request and not the server."""
    if _published():
        metrics.count_contained(ring)


def suspected(requests: int) -> None:
    """Count requests that are tried alone after a pass of several failed for unknown reasons."""
    if _published():
        metrics.count_suspects(requests)


def rebuilt() -> None:
    """Count a rebuild of the pools, which were inconsistent after a failure."""
    if _published():
        metrics.count_rebuilt()


def _published() -> bool:
    from sglang.srt.runtime_context import get_observability

    try:
        return bool(get_observability().enable_metrics)
    except ValueError:  # there is no server
        return False
