"""All ranks of a host share memory and cores; the options apply to all of them together."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.executor.workers import create_workers, share_of
from fluxion_sglang.native import topology
from fluxion_sglang.sglang.memory import capacity
from fluxion_sglang.sglang.start.options import options_of, rank_options


def args(**changes: Any) -> Any:
    defaults = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "nnodes": 1, "fluxion_config": None, "max_total_tokens": None}
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
    gb = rank_options(args(fluxion_config='{"host_memory_gb": 24}', **changes)).host_memory_gb
    assert gb == pytest.approx(24 / ranks)


def test_max_total_tokens_is_the_default_capacity() -> None:
    assert rank_options(args()).host_tokens is None
    assert rank_options(args(max_total_tokens=40000)).host_tokens == 40000
    both = args(max_total_tokens=40000, fluxion_config='{"host_tokens": 90000}')
    assert rank_options(both).host_tokens == 90000
    assert rank_options(args(max_total_tokens=40000, fluxion_config='{"host_memory_gb": 1}')).host_tokens is None


def test_a_file_is_read_once_until_the_next_server(tmp_path: Path) -> None:
    path = tmp_path / "fluxion.json"
    server = args(fluxion_config=f"@{path}")
    for window in (256, 512):
        path.write_text(json.dumps({"window": window}))
        assert options_of(server, again=True).window == window
        path.write_text('{"window": 1024}')
        assert options_of(server) is options_of(server) and rank_options(server).window == window


def test_a_policy_that_is_none_is_refused_with_the_options() -> None:
    with pytest.raises(ConfigError, match=r"""^policy 'ful' is not one .*; or "auto"\.$"""):
        options_of(args(fluxion_config='{"policy": "ful"}'))
    assert options_of(args(fluxion_config='{"policy": "auto"}')) == FluxionConfig()
    with pytest.raises(ConfigError, match=r"in request_policies, policy 'ful' is not one that"):
        options_of(args(fluxion_config='{"request_policies": ["ful"]}'))
    with pytest.raises(ConfigError, match=r"'oracle:0.1', which reads everything to decide"):
        options_of(args(fluxion_config='{"request_policies": ["full", "oracle:0.1"]}'))
    own = '{"policy": "oracle:0.1", "request_policies": ["oracle:0.1"]}'
    assert options_of(args(fluxion_config=own)).policy == "oracle:0.1"
    audited = '{"request_policies": ["full", "oracle:0.1"], "audit": "/tmp/audit.npy"}'
    assert options_of(args(fluxion_config=audited)).request_policies == ["full", "oracle:0.1"]


@pytest.mark.parametrize(
    ("changes", "replicas", "expected"),
    [
        ({}, [None], [0]),
        ({"tp_size": 2, "pp_size": 2}, [None], [0, 1, 2, 3]),
        ({"tp_size": 2, "dp_size": 3}, [0, 1, 2], [0, 1, 2, 3, 4, 5]),
        ({"tp_size": 4, "nnodes": 2}, [None], [0, 1, 0, 1]),
    ],
)
def test_no_two_processes_of_a_host_are_the_same_rank(
    changes: dict[str, int], replicas: list[int | None], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    found = []
    for replica in replicas:
        monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda r=replica: SimpleNamespace(dp_rank=r))
        for rank in range(args(**changes).tp_size * args(**changes).pp_size):  # torch's ranks: those of one replica
            monkeypatch.setattr(torch.distributed, "get_rank", lambda r=rank: r)
            found.append(capacity.rank_on_host(args(**changes)))
    assert found == expected


@given(st.integers(1, 40), st.integers(1, 12))
def test_cores_are_divided(count: int, ranks: int) -> None:
    shares = [share_of(list(range(100, 100 + count)), rank, ranks) for rank in range(ranks)]
    assert {len(share) for share in shares} == {max(count // ranks, 1)}
    dealt = [core for share in shares for core in share]
    assert set(dealt) <= set(range(100, 100 + count))
    assert len(set(dealt)) == min(len(dealt), count)


@pytest.mark.parametrize("named", [False, True])
def test_workers_are_pinned_to_their_ranks_cores(named: bool) -> None:
    allowed = [int(core) for core in topology()["cores"]][:2]
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    config = FluxionConfig(cores=",".join(map(str, reversed(allowed))) if named else None)
    got = [create_workers(config, rank, 2) for rank in range(2)]
    assert all(workers.count == len(workers.cores) for workers in got)
    assert not set(got[0].cores) & set(got[1].cores)
    if named:
        assert [workers.cores for workers in got] == [[allowed[1]], [allowed[0]]]
    assert create_workers(config).cores[:2] == (allowed[::-1] if named else allowed)


@pytest.mark.parametrize(
    ("context", "pool", "drafts", "most"), [(512, 8192, False, 513), (512, 400, False, 384), (512, 8192, True, 511)]
)
def test_an_answer_may_fill_the_context(context: int, pool: int, drafts: bool, most: int) -> None:
    """SGLang limits an answer to `max_req_len` - 1 minus the prompt's tokens, and admits requests that leave a page
    free."""
    scheduler = SimpleNamespace(
        spec_algorithm=SimpleNamespace(is_none=lambda: not drafts),
        model_config=SimpleNamespace(context_len=context),
        max_total_num_tokens=pool,
        max_req_len=min(context, pool) - 1,
        max_req_input_len=min(context, pool) - 6,
    )
    capacity.set_lengths(scheduler)
    assert scheduler.max_req_len == most
    assert scheduler.max_req_input_len == min(min(context, pool) - 6, most - 1)
