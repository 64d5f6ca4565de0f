"""Memory is shared by all ranks of a host; what the options say is for all of them together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fluxion_sglang.sglang import capacity


def args(**changes: Any) -> Any:
    defaults = {
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "nnodes": 1,
        "fluxion_config": None,
        "max_total_tokens": None,
    }
    return SimpleNamespace(**{**defaults, **changes})


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [({}, 1), ({"tp_size": 4}, 4), ({"tp_size": 2, "pp_size": 2, "dp_size": 3}, 12), ({"tp_size": 16, "nnodes": 2}, 8)],
)
def test_ranks_share_the_host(changes: dict[str, int], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sglang.srt.mem_cache.host_memory.available_host_memory_bytes", lambda allow_cgroup_fallback: 1200
    )
    assert capacity.ranks_on_host(args(**changes)) == ranks
    assert capacity.available_bytes(args(**changes)) == 1200 // ranks
    gb = capacity.rank_config(args(fluxion_config='{"host_memory_gb": 24}', **changes)).host_memory_gb
    assert gb == pytest.approx(24 / ranks)


def test_max_total_tokens_is_the_default_capacity() -> None:
    assert capacity.rank_config(args()).host_tokens is None
    assert capacity.rank_config(args(max_total_tokens=40000)).host_tokens == 40000
    both = args(max_total_tokens=40000, fluxion_config='{"host_tokens": 90000}')
    assert capacity.rank_config(both).host_tokens == 90000
    assert (
        capacity.rank_config(args(max_total_tokens=40000, fluxion_config='{"host_memory_gb": 1}')).host_tokens is None
    )
