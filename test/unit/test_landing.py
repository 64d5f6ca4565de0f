"""The landing zone: runs that do not overlap, first come first served, and a receiver that waits for one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxion_sglang.kv.host_pool import KVShape
from fluxion_sglang.kv.landing import LandingZone, Run
from fluxion_sglang.sglang import transfer

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=8, dtype=torch.bfloat16)


def test_its_memory_is_what_it_says() -> None:
    zone = LandingZone(SHAPE, 3)
    buffers = [*zone.keys, *zone.values]
    assert [buffer.shape for buffer in buffers] == [(3, 16, 2, 8)] * 4
    assert sum(buffer.nbytes for buffer in buffers) == LandingZone.nbytes(SHAPE, 3)


def test_a_runs_tokens_are_its_pages() -> None:
    zone = LandingZone(SHAPE, 4)
    zone.keys[1][:] = torch.arange(4 * 16 * 16).view(4, 16, 2, 8)
    zone.values[1][:] = -zone.keys[1]
    k, v = zone.tokens(1, Run(1, 2), 20)
    assert k.shape == v.shape == (20, 2, 8) and k.is_contiguous()
    assert torch.equal(k, zone.keys[1].view(64, 2, 8)[16:36]) and torch.equal(v, -k)


def test_who_asks_again_has_the_same_run() -> None:
    zone = LandingZone(SHAPE, 4)
    assert zone.ask("a", 3) == zone.ask("a", 3) == Run(0, 3)


def test_a_short_prompt_does_not_overtake_a_long_one() -> None:
    zone = LandingZone(SHAPE, 10)
    assert zone.ask("a", 6) == Run(0, 6)
    assert zone.ask("long", 7) is None
    assert zone.ask("short", 2) is None, "or the long one might never have its turn"
    zone.leave("a")
    assert zone.ask("short", 2) is None
    assert zone.ask("long", 7) == Run(0, 7)
    assert zone.ask("short", 2) == Run(7, 2)


def test_who_leaves_the_line_holds_nobody_up() -> None:
    zone = LandingZone(SHAPE, 4)
    zone.ask("a", 4)
    zone.ask("b", 1)
    zone.ask("c", 1)
    zone.leave("b")
    zone.leave("a")
    zone.leave("nobody")
    assert zone.ask("c", 1) == Run(0, 1)


def test_what_can_never_land_is_refused() -> None:
    zone = LandingZone(SHAPE, 4)
    with pytest.raises(ValueError, match="5 pages cannot land where there is room for 4"):
        zone.ask("a", 5)
    assert zone.ask("b", 4) == Run(0, 4), "it does not wait in line"


@settings(max_examples=examples(100))
@given(st.integers(1, 30), st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(1, 12)), max_size=60))
def test_runs_lie_apart_and_everybody_has_a_turn(size: int, moves: list[tuple[bool, int, int]]) -> None:
    zone, wants, have = LandingZone(SHAPE, size), {}, {}
    arrived: list[int] = []
    for comes, who, pages in moves:
        if comes and who not in wants and pages <= size:
            wants[who] = pages
            arrived.append(who)
        elif not comes and who in wants:
            zone.leave(who)
            del wants[who]
            have.pop(who, None)
            arrived.remove(who)
        for one in list(arrived):
            if (run := zone.ask(one, wants[one])) is not None:
                have[one] = run
        taken = [page for run in have.values() for page in range(run.first, run.first + run.pages)]
        assert len(taken) == len(set(taken)) and all(0 <= page < size for page in taken)
        assert all(have[one].pages == wants[one] for one in have)
        waiting = [one for one in arrived if one not in have]
        assert not waiting or taken, "an empty zone has room for whoever is first"
    for one in arrived:  # all those before it go, so it has its turn
        run = zone.ask(one, wants[one])
        assert run is not None
        zone.leave(one)


# --- a receiver ---


class Backend:
    """What a receiver of a transfer backend is, as far as ours goes."""

    conclude_state = None
    bootstrap_room = 7

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.cleared = 0
        self.failures: list[str] = []
        self.kv_mgr = SimpleNamespace(
            record_failure=lambda room, why: self.failures.append(why),
            update_status=lambda room, status: setattr(self, "status", status),
        )
        self.status: Any = "waiting"

    def send_metadata(self, pages: Any, aux: int | None = None, **more: Any) -> None:
        self.sent.append((pages, aux, more))

    def poll(self) -> Any:
        return self.status

    def clear(self) -> None:
        self.cleared += 1

    def failure_exception(self) -> None:
        self.clear()
        raise RuntimeError("failed")


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> LandingZone:
    zone = LandingZone(SHAPE, 8)
    monkeypatch.setattr(transfer, "_zone", zone)
    return zone


def receiver() -> Any:
    return transfer.landing(Backend)()


def test_the_prefill_server_is_told_pages_of_the_zone(zone: LandingZone) -> None:
    one = receiver()
    one.send_metadata(np.array([70, 12, 55], dtype=np.int32), 4, decode_prefix_len=16)
    ((pages, aux, more),) = one.sent
    assert pages.tolist() == [0, 1, 2] and pages.dtype == np.int32
    assert (aux, more) == (4, {"decode_prefix_len": 16})
    assert one.run == Run(0, 3)


def test_it_is_told_when_there_is_room(zone: LandingZone) -> None:
    first, second = receiver(), receiver()
    first.send_metadata(np.arange(6), 0)
    second.send_metadata(np.arange(4), 1)
    assert second.poll() == "waiting" and not second.sent
    first.clear()
    assert second.poll() == "waiting" and len(second.sent) == 1 and second.run == Run(0, 4)
    second.poll()
    assert len(second.sent) == 1


def test_nothing_to_send_needs_no_room(zone: LandingZone) -> None:
    first, second = receiver(), receiver()
    first.send_metadata(np.arange(8), 0)
    second.send_metadata(np.arange(0), 1)
    assert len(second.sent) == 1 and second.run.pages == 0


def test_a_failure_frees_nothing_until_it_is_over(zone: LandingZone) -> None:
    """The prefill server may still be writing."""
    one = receiver()
    one.send_metadata(np.arange(8), 0)
    with pytest.raises(RuntimeError, match="failed"):
        one.failure_exception()
    assert one.cleared == 1 and zone.ask("other", 1) is None
    zone.leave("other")
    one.clear()
    assert zone.ask("other", 8) == Run(0, 8)


def test_who_waits_and_is_cleared_sends_nothing_any_more(zone: LandingZone) -> None:
    first, second = receiver(), receiver()
    first.send_metadata(np.arange(8), 0)
    second.send_metadata(np.arange(1), 1)
    second.clear()
    first.clear()
    second.poll()
    assert not second.sent and zone.ask("other", 8) == Run(0, 8)


def test_a_prompt_that_never_fits_fails(zone: LandingZone) -> None:
    one = receiver()
    one.send_metadata(np.arange(9), 0)
    assert not one.sent and "too long for this server" in one.failures[0]
    assert one.status != "waiting"


def test_receivers_of_a_backend_have_one_class() -> None:
    assert transfer.landing(Backend) is transfer.landing(Backend)
    assert transfer.landing(Backend).__name__ == "LandingBackend"
