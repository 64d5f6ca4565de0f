"""Policies that remember requests: their declared memory, its release, and requests without room."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from world import World

from fluxion_lab.bounded import Bounded, Remembering
from fluxion_lab.hgca import HgcaPolicy
from fluxion_lab.lfps import LfpsPolicy
from fluxion_sglang.kv.host_pool import GIB
from fluxion_sglang.policy.base import DecodeStep, LayerPlan, Observed
from fluxion_sglang.policy.testing import Request, Rig

MAKERS = {"hgca": HgcaPolicy, "lfps": lambda: LfpsPolicy(0.05)}
both = pytest.mark.parametrize("name", MAKERS)


@both
def test_a_request_takes_no_more_than_the_policy_says_and_gives_it_back(name: str) -> None:
    policy = MAKERS[name]()
    rig = Rig(policy)
    assert policy.state_bytes == 0
    for seed in range(6):
        request = Request(30 + seed)
        sizes = []
        for count in (500, 70):
            rig.prefill(request, count)
            sizes.append(policy.state_bytes)
            for _ in range(2):
                rig.run(request, 1)
                sizes.append(policy.state_bytes)
        assert 0 < max(sizes) <= policy.remembers(rig.engine.world, request.length)
        rig.release(request)
        assert policy.state_bytes == 0


@both
def test_a_request_without_room_reads_everything_and_the_others_as_ever(name: str) -> None:
    """It is served with full attention. When the request that held the room ends, the next one is remembered."""
    rig = Rig(MAKERS[name]())
    first, second = Request(1), Request(2)
    rig.prefill(first, 500)
    alone = rig.run(first, 10)

    inner = MAKERS[name]()
    policy = Bounded(inner, limit=inner.remembers(rig.engine.world, 900))
    rig, first = Rig(policy), Request(1)
    rig.prefill(first, 500)
    rig.prefill(second, 600)
    outs = [rig.decode(first, second) for _ in range(10)]
    assert all(torch.equal(a, b) for (a, _), b in zip(outs, alone, strict=True))
    k, v = (x[:, : second.length].repeat_interleave(2, 2).double() for x in (second.k, second.v))
    scores = torch.einsum("lhd,lnhd->lhn", second.q[:, second.length - 1].double(), k) * 32**-0.5
    want = torch.einsum("lhn,lnhd->lhd", scores.softmax(-1), v)
    torch.testing.assert_close(outs[-1][1].double(), want, atol=1e-5, rtol=1e-5)
    assert inner.state_bytes <= inner.remembers(rig.engine.world, first.length)
    rig.release(first)
    rig.run(second, 1)
    assert inner.state_bytes > 0
    rig.release(second)
    assert inner.state_bytes == 0


def test_by_default_it_is_a_share_of_the_pool_and_no_less_than_a_gib() -> None:
    policy = Bounded(HgcaPolicy())
    World().engine._bind(policy)
    assert policy._limit == GIB


class Byte(Remembering):
    """Remembers one byte per token."""

    def remembers(self, world: object, tokens: int) -> int:
        return tokens

    @property
    def state_bytes(self) -> int:
        return 0

    def begin_step(self, step: DecodeStep) -> None: ...

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = Observed()) -> LayerPlan:  # noqa: B008
        raise NotImplementedError


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60) | st.none())))
def test_what_is_taken_is_what_the_rows_have(calls: list[tuple[int, int | None]]) -> None:
    policy = Bounded(Byte(), 100)
    policy.world = object()  # type: ignore[assignment]
    policy._limit = 100
    rows: dict[int, int] = {}
    for row, tokens in calls:
        if tokens is None:
            policy.released(row)
            rows.pop(row, None)
            continue
        grown = {**rows, row: max(tokens, rows.get(row, 0))}
        fits = sum(grown.values()) <= 100
        assert policy._fits(row, tokens) == fits
        rows = grown if fits else {key: size for key, size in rows.items() if key != row}
        assert policy._rows == rows
