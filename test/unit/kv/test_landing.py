"""KV from a prefill server: runs of the landing zone, receivers that wait for one, and the copy into the host pool."""

from __future__ import annotations

import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation.base import KVPoll

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.kv.host_pool import HostPool, KVShape
from fluxion_sglang.kv.landing import LandingZone, Run
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.sglang.memory import transfer
from fluxion_sglang.sglang.memory.pools import FluxionKVPool
from fluxion_sglang.sglang.requests import rows

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


def test_it_counts_what_arrives_and_how_long_it_waited() -> None:
    zone = LandingZone(SHAPE, 4)
    zone.ask("a", 4)
    zone.ask("b", 1)
    assert zone.stats() == {"arrived_tokens": 0, "arrival_line_ns": 0, "arrival_copy_ns": 0}
    time.sleep(0.01)
    zone.arrived(50, 7)
    zone.leave("a")
    zone.ask("b", 1)
    zone.ask("b", 1)
    stats = zone.stats()
    assert (stats["arrived_tokens"], stats["arrival_copy_ns"]) == (50, 7)
    assert 10e6 <= stats["arrival_line_ns"] < 5e9


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
        assert not waiting or taken, "an empty zone has room for the first request"
    for one in arrived:  # all earlier ones leave, so its turn comes
        run = zone.ask(one, wants[one])
        assert run is not None
        zone.leave(one)


# --- a receiver ---


class Backend:
    """The parts of a transfer backend's receiver that ours uses."""

    conclude_state = None
    bootstrap_room = 7

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.cleared = 0
        self.failures: list[str] = []
        self.kv_mgr = SimpleNamespace(
            record_failure=lambda room, why: self.failures.append(why),
            update_status=lambda room, status: setattr(self, "status", status),
            waiting_timeout=300,
        )
        self.told = False
        self.status: Any = "waiting"

    def send_metadata(self, pages: Any, aux: int | None = None, **more: Any) -> None:
        self.sent.append((pages, aux, more))

    def poll(self) -> Any:
        return self.status

    def clear(self) -> None:
        self.cleared += 1

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        self.told = self.told or force_arm

    def abort(self) -> None:
        self.status = self.conclude_state = KVPoll.Failed

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
    second.poll()
    assert len(second.sent) == 1 and second.run == Run(0, 4)
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


@pytest.mark.parametrize("how", ["abort", "failure_exception", "poll"])
def test_who_waits_and_fails_holds_nobody_up(zone: LandingZone, how: str) -> None:
    """It never had a run that the prefill server could write to."""
    first, second, third = receiver(), receiver(), receiver()
    first.send_metadata(np.arange(6), 0)
    second.send_metadata(np.arange(4), 1)
    third.send_metadata(np.arange(2), 2)
    assert not second.sent and not third.sent
    second.status = KVPoll.Failed if how == "poll" else second.status
    with suppress(RuntimeError):
        getattr(second, how)()
    third.poll()
    assert third.run == Run(6, 2) and not second.sent
    assert second.told == (how == "abort"), "so that SGLang does not wait for an acknowledgement that does not come"


def test_who_has_a_run_keeps_it_through_an_abort(zone: LandingZone) -> None:
    one, other = receiver(), receiver()
    one.send_metadata(np.arange(8), 0)
    other.send_metadata(np.arange(1), 1)
    one.abort()
    one.poll()
    other.poll()
    assert not other.sent and not one.told
    one.clear()
    other.poll()
    assert other.sent


def test_a_server_that_has_failed_gets_no_run(zone: LandingZone) -> None:
    first, second = receiver(), receiver()
    first.send_metadata(np.arange(8), 0)
    second.send_metadata(np.arange(8), 1)
    first.clear()
    second.status = KVPoll.Failed
    assert second.poll() == KVPoll.Failed and not second.sent


def test_nobody_waits_for_ever(zone: LandingZone) -> None:
    first, second = receiver(), receiver()
    first.send_metadata(np.arange(8), 0)
    second.kv_mgr.waiting_timeout = -1
    second.send_metadata(np.arange(1), 1)
    assert "for too long" in second.failures[0] and second.poll() == KVPoll.Failed


def test_a_prompt_that_never_fits_fails(zone: LandingZone) -> None:
    one = receiver()
    one.send_metadata(np.arange(9), 0)
    assert not one.sent and "too long for this server" in one.failures[0]
    assert one.status != "waiting"


def test_receivers_of_a_backend_have_one_class() -> None:
    assert transfer.landing(Backend) is transfer.landing(Backend)
    assert transfer.landing(Backend).__name__ == "LandingBackend"


# --- into the host pool ---

HEADS, DIM, LAYERS, PAGES = 2, 32, 2, 40


class World:
    """A host pool with a request in row 1, and the SGLang objects around it."""

    def __init__(self, dtype: torch.dtype, int8: bool, pages: list[int], stop: int) -> None:
        shape = KVShape(LAYERS, HEADS, DIM, dtype, int8, sketched=True)
        self.pool = FluxionKVPool(shape, PAGES * PAGE, 2, FluxionConfig(workers=2, canary=1.0), "cpu", 0, 0, 1)
        self.pool.host.memory.fill_(255)  # NaN, and the tag of nothing
        self.zone = self.pool.zone = LandingZone(shape, PAGES)
        table = torch.zeros(2, PAGES * PAGE, dtype=torch.int32)
        slots = (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()
        table[1, : len(slots)] = slots
        runner = SimpleNamespace(token_to_kv_pool=self.pool)
        self.scheduler = SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=runner), req_to_token_pool=SimpleNamespace(req_to_token=table)
        )
        self.request = SimpleNamespace(kv=SimpleNamespace(kv_committed_len=stop, req_pool_idx=1, cache_protected_len=0))
        random = torch.Generator().manual_seed(stop)
        size = (LAYERS, len(pages) * PAGE, HEADS, DIM)
        self.k, self.v = (torch.randn(size, generator=random).to(dtype) for _ in "kv")
        self.pages, self.stop = torch.tensor(pages, dtype=torch.int32), stop

    @property
    def host(self) -> HostPool:
        return self.pool.host

    def append(self, start: int, stop: int) -> None:
        """Append as a prefill of this server does."""
        for layer in range(LAYERS):
            self.host.append(layer, self.pages, start, self.k[layer, start:stop], self.v[layer, start:stop])

    def send(self, start: int) -> Any:
        """A receiver whose run holds the tokens from `start` on, with garbage behind them."""
        one = receiver()
        one.send_metadata(self.pages[start // PAGE :].numpy(), 0)
        first = one.run.first * PAGE
        for layer in range(LAYERS):
            for sent, at in ((self.k, self.zone.keys), (self.v, self.zone.values)):
                flat = at[layer].flatten(0, 1)
                flat[first : first + len(self.pages) * PAGE - start] = torch.nan
                flat[first : first + self.stop - start] = sent[layer, start : self.stop]
        return one


DTYPES = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]


@pytest.mark.parametrize(("dtype", "int8"), DTYPES)
@settings(deadline=None, max_examples=examples(20))
@given(data=st.data())
def test_what_lands_is_byte_for_byte_what_a_prefill_makes(dtype: torch.dtype, int8: bool, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 30), label="pages")
    stop = count * PAGE - data.draw(st.integers(0, PAGE - 1), label="tokens that the last page lacks")
    there = data.draw(st.integers(0, count - 1), label="pages of a cached prefix")
    pages = data.draw(st.permutations(range(1, PAGES)), label="numbers")[:count]
    want, got = (World(dtype, int8, pages, stop) for _ in range(2))
    want.append(0, stop)
    got.append(0, there * PAGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "_zone", got.zone)
        if busy := data.draw(st.integers(0, PAGES - count), label="pages of another transfer"):
            got.zone.ask("other", busy)
        transfer._land(got.scheduler, got.send(there * PAGE), got.request)
    assert torch.equal(got.host.memory, want.host.memory)


def test_a_request_that_nobody_prefills_has_numbers() -> None:
    """Such as SGLang's health checks, which are never prefilled."""
    got = World(torch.float32, False, [3, 5], 20)
    transfer._land(got.scheduler, object(), got.request)
    for layer in range(LAYERS):
        assert not got.host.tiles(layer)[:, 3].any() and not got.host.page_metadata(layer)[:, 3].any()
        assert not got.host.tiles(layer)[:, 5, :, :4].any()
    there = World(torch.float32, False, [3, 5], 20)
    there.append(0, PAGE)
    there.request.kv.cache_protected_len = PAGE
    before = there.host.tiles(0)[:, 3].clone()
    transfer._land(there.scheduler, object(), there.request)
    assert torch.equal(there.host.tiles(0)[:, 3], before), "a prefix of the radix tree is not its own"


@pytest.mark.parametrize(("dtype", "int8"), DTYPES)
def test_what_was_retracted_comes_back_in_other_pages(dtype: torch.dtype, int8: bool) -> None:
    stop, before, after = 333, list(range(1, 22)), list(range(39, 18, -1))
    first, want = World(dtype, int8, before, stop), World(dtype, int8, after, stop)
    first.append(0, stop)
    want.append(0, stop)
    of = [world.scheduler.req_to_token_pool.req_to_token[1, :stop] for world in (first, want)]
    kept = first.pool.get_cpu_copy(of[0])
    got = World(dtype, int8, after, stop)
    got.append(0, len(after) * PAGE)  # another request, with tokens past the end of this one
    got.pool.load_cpu_copy(kept, of[1])
    assert got.host.sweep()[1] == [], "tokens without an owner are not checked"
    last = slice(0, stop % PAGE)
    for layer in range(LAYERS):
        if not int8:
            one, other = (world.host.tiles(layer)[:, after[-1], :, last] for world in (got, want))
            assert torch.equal(one, other)
        for name in ("meta0", "moments", "sketches"):
            pages = after[:-1]  # the last page is not full
            assert torch.equal(got.host.tensor(name, layer)[:, pages], want.host.tensor(name, layer)[:, pages])
    assert torch.equal(got.host.stored[:, :, after[:-1]], want.host.stored[:, :, after[:-1]])


def test_a_failure_to_take_over_ends_the_request_alone(zone: LandingZone, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[Any, str, int]] = []
    from sglang.srt.disaggregation import utils

    monkeypatch.setattr(
        utils, "prepare_abort", lambda request, why, status_code: ended.append((request, why, status_code))
    )
    monkeypatch.setattr(transfer, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1))
    one, request = receiver(), object()
    one.send_metadata(np.arange(8), 0)
    decode_req = SimpleNamespace(req=request, kv_receiver=one)
    queue = SimpleNamespace(scheduler=None)  # an empty queue
    transfer.commit(lambda *_: pytest.fail("SGLang went on"), queue, decode_req)
    ((who, why, status),) = ended
    assert who is request and "could not be taken over" in why and status == 500
    assert decode_req.kv_receiver is None and zone.ask("next", 8) == Run(0, 8)


def test_the_end_of_a_request_is_told() -> None:
    """The request table of a decode server has its own class."""

    class Table:
        def __init__(self) -> None:
            self.req_to_token = torch.zeros(4, 8)

    class Watcher:
        def __init__(self) -> None:
            self.freed: list[int] = []

        def take(self, freed: Any) -> None:
            self.freed += freed

    table, watcher = Table(), Watcher()
    rows.watch(table, watcher.take)
    request = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=3))

    def free(_: Any, req: Any) -> None:
        req.kv.req_pool_idx = None

    transfer.free_row(free, table, request)
    assert watcher.freed == [3]
