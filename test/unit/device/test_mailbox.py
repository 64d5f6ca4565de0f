"""The host's side of the mailbox, and layers of the native engine whose residents belong to a device."""

from __future__ import annotations

import math
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_world import NativeWorld, layer_begin, take

from fluxion_sglang.device.mailbox import Mailbox, MailboxError, MailboxShape, Slot, Word
from fluxion_sglang.native import function

SHAPE = MailboxShape(max_requests=3, q_heads=8, kv_heads=2, head_dim=32, dtype=torch.bfloat16)


def span(mailbox: Mailbox, tensor: torch.Tensor) -> range:
    start = tensor.data_ptr() - mailbox.arena.data_ptr()
    return range(start, start + tensor.nbytes)


@given(
    st.integers(1, 70),
    st.sampled_from([(1, 1), (8, 2), (7, 1), (32, 8)]),
    st.sampled_from([32, 80, 128, 256]),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_slots_lie_apart_in_whole_pages(requests: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    mailbox = Mailbox(MailboxShape(requests, *heads, dim, dtype))
    assert mailbox.arena.data_ptr() % 4096 == 0 and mailbox.arena.nbytes % 4096 == 0
    assert not mailbox.arena.any()
    slots = [mailbox.slot(sequence, requests) for sequence in (0, 1)]
    spans = sorted((span(mailbox, tensor) for slot in slots for tensor in slot), key=lambda at: at.start)
    assert spans[0].start >= 16 * 128 and spans[-1].stop <= mailbox.arena.nbytes
    assert all(a.stop <= b.start and b.start % 256 == 0 for a, b in pairwise(spans))
    q, keys, states = (requests, heads[0], dim), (requests, heads[1], dim), (requests, heads[0])
    for slot in slots:
        assert [tuple(t.shape) for t in slot] == [q, keys, keys, (*states, 5), q, states, (1,), (1,), (2,)]
        assert [t.dtype for t in slot] == [dtype] * 3 + [torch.float32] * 3 + [torch.int32] + [torch.int64] * 2


def test_views_of_a_batch_are_made_once() -> None:
    mailbox = Mailbox(SHAPE)
    slot = mailbox.slot(7, 2)
    assert mailbox.slot(9, 2) is slot and mailbox.slot(8, 2) is not slot
    assert slot.q.data_ptr() == mailbox.slot(7, 3).q.data_ptr() and slot.q.shape[0] == 2
    assert all(t.numel() == 0 for t in mailbox.slot(1, 0)[:6])
    arena = mailbox.arena
    del mailbox, slot
    assert arena.sum() == 0  # a view keeps the memory


@pytest.mark.parametrize("field, value", [("max_requests", 0), ("q_heads", 7), ("kv_heads", -1), ("head_dim", 0)])
def test_a_shape_that_cannot_be(field: str, value: int) -> None:
    with pytest.raises(ValueError, match="cannot be; every size must be at least 1"):
        Mailbox(MailboxShape(**(vars(SHAPE) | {field: value})))
    with pytest.raises(ValueError, match="has no word 16"):
        function("mailbox_load")(Mailbox(SHAPE).handle, 16)


@pytest.mark.parametrize("before", [0.0, 0.0005, 0.02])  # while it spins, yields, sleeps
def test_a_wait_ends_when_the_word_is_there(before: float) -> None:
    mailbox = Mailbox(SHAPE)

    def publish() -> None:
        time.sleep(before)
        mailbox.slot(1, 1).layer.fill_(5)
        mailbox.store(Word.PUBLISHED, 1)

    thread = threading.Thread(target=publish)  # runs, because a wait releases the GIL
    thread.start()
    mailbox.wait(1, 20)
    assert int(mailbox.slot(1, 1).layer) == 5
    mailbox.wait(0, 0)  # earlier publications count too
    thread.join()


def test_waits_end_without_the_word() -> None:
    mailbox = Mailbox(SHAPE)
    start = time.monotonic()
    with pytest.raises(MailboxError, match=r"^The device did not publish a layer within 0\.05 s"):
        mailbox.wait(1, 0.05)
    assert 0.05 <= time.monotonic() - start < 5
    with pytest.raises(MailboxError, match="did not attend to what is resident within 0 s"):
        mailbox.wait_observed(1, 0)
    timer = threading.Timer(0.05, mailbox.cancel)
    timer.start()
    with pytest.raises(MailboxError, match=r"^The step was cancelled\.$"):
        mailbox.wait(1, 20)
    mailbox.store(Word.PUBLISHED, 1)
    mailbox.wait(1, 20)  # earlier publications count
    timer.join()
    mailbox.reset()
    assert all(mailbox.load(word) == 0 for word in Word)
    mailbox.store(Word.LATE, 4)
    with pytest.raises(MailboxError, match=r"a layer \(number 4 since the last reset\) and gave up"):
        mailbox.wait(1, 20)
    assert mailbox.late and not mailbox.answer(1) and not mailbox.fail(1)


def test_sequence_numbers_wrap() -> None:
    mailbox = Mailbox(SHAPE)
    mailbox.store(Word.PUBLISHED, 2**32 - 1)
    mailbox.wait(2**32 - 1, 0)
    mailbox.wait(2**32 - 2, 0)
    with pytest.raises(MailboxError):
        mailbox.wait(2**32, 0)
    mailbox.store(Word.PUBLISHED, 2**32)
    mailbox.wait(2**32, 0)
    assert mailbox.fail(2**32) and mailbox.load(Word.ANSWERED) == 0
    assert mailbox.load(Word.FAILED) == 1  # 0 would mean that nothing failed


def test_answers() -> None:
    mailbox = Mailbox(SHAPE)
    mailbox.slot(1, 3).lse.fill_(1.0), mailbox.slot(2, 3).lse.fill_(2.0)
    assert mailbox.answer(1)
    assert (mailbox.load(Word.ANSWERED), mailbox.load(Word.FAILED)) == (1, 0)
    assert mailbox.fail(2)
    assert (mailbox.load(Word.ANSWERED), mailbox.load(Word.FAILED)) == (2, 2)
    assert (mailbox.slot(2, 3).lse == -math.inf).all() and (mailbox.slot(1, 3).lse == 1).all()


# ---- The native engine's half of a layer on a device.


def mailbox_of(world: NativeWorld, requests: int) -> Mailbox:
    return Mailbox(MailboxShape(requests, world.q_heads, world.heads, world.dim, world.dtype))


def draw(world: NativeWorld, slot: Slot) -> None:
    for tensor in (slot.q, slot.k, slot.v):
        tensor.copy_(world.randn(*tensor.shape))
    slot.o.fill_(math.nan), slot.lse.fill_(math.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [False, True])
def test_the_middle_alone(dtype: torch.dtype, first: bool) -> None:
    """first: the token is appended before the plan."""
    world = NativeWorld(dtype=dtype)
    requests = [world.add(n) for n in (300, 20, 95, 160)]
    mailbox = mailbox_of(world, 5)
    for sequence in range(1, 21):
        world.begin_step(requests)
        slot = mailbox.slot(sequence, len(requests))
        draw(world, slot)
        plan = world.plan(requests)
        plan.budget[0, 0] = 0.0  # a streaming head; with attend_union it reads the others' blocks
        plan.blk[3] = 0
        k, v = (None, None) if first else (slot.k, slot.v)
        if first:
            world.engine.layer_append(0, slot.k, slot.v)
        layer_begin(world.engine, 0, slot.q, k, v, None, plan, world.scale, None, middle=(slot.o, slot.lse))
        assert mailbox.finish(world.engine, sequence) and mailbox.load(Word.ANSWERED) == sequence
        with pytest.raises(RuntimeError, match="residents are a device's"):
            world.engine.result(torch.empty(4, world.q_heads, world.dim))
        take(requests, 0, slot.k, slot.v)
        for b, request in enumerate(requests):
            at = torch.tensor(world.middle(request) if b != 3 else [], dtype=torch.long)
            for head in range(world.q_heads):
                keys, values = (t[at, head // world.group].double() for t in (request.keys[0], request.values[0]))
                scores = (keys @ slot.q[b, head].double()) * world.scale
                lse = scores.logsumexp(0) if len(at) else torch.tensor(-math.inf, dtype=torch.float64)
                torch.testing.assert_close(slot.lse[b, head].double(), lse, atol=1e-3, rtol=1e-3)
                if len(at):
                    torch.testing.assert_close(
                        slot.o[b, head].double(), scores.softmax(0) @ values, **world.tolerance()
                    )
        # The host pool has the token.
        page, offset = divmod(requests[0].length - 1, 16)
        tile = world.pool.tensor("tiles", 0)[:, requests[0].pages[page]]
        assert torch.equal(tile[:, 0, offset], slot.k[0]) and torch.equal(tile[:, 1, offset], slot.v[0])


def test_what_a_layer_on_a_device_refuses() -> None:
    world = NativeWorld()
    requests = [world.add(300)]
    slot = mailbox_of(world, 1).slot(1, 1)
    world.begin_step(requests)
    draw(world, slot)
    plan = world.plan(requests)
    stop = torch.full((1, world.heads), 0.5)

    def begin(**more: object) -> None:
        arguments: dict[str, Any] = {"k": slot.k, "v": slot.v, "windows": None, "middle": (slot.o, slot.lse)} | more
        k, v, windows = (arguments.pop(name) for name in ("k", "v", "windows"))
        layer_begin(world.engine, 0, slot.q, k, v, windows, plan, world.scale, None, **arguments)

    with pytest.raises(ValueError, match=r"^o has the shape"):
        begin(middle=(slot.o[:, 1:], slot.lse))
    with pytest.raises(ValueError, match=r"parts has the shape \[1, 4, 4\]"):
        begin(parts=torch.zeros(1, 4, 4))
    begin()
    world.engine.layer_finish()
    begin(stop=stop)
    with pytest.raises(RuntimeError, match="what its residents weigh is not known"):
        world.engine.layer_finish()
    begin(stop=stop, parts=torch.zeros(1, world.q_heads, 5))
    world.engine.layer_finish()


def test_a_failed_layer_is_not_answered() -> None:
    world = NativeWorld()
    request = world.add(300)
    mailbox = mailbox_of(world, 1)
    slot = mailbox.slot(1, 1)
    world.begin_step([request])
    draw(world, slot)
    plan = world.plan([request], blk=17)
    layer_begin(world.engine, 0, slot.q, slot.k, slot.v, None, plan, world.scale, None, middle=(slot.o, slot.lse))
    with pytest.raises(RuntimeError, match="asks for blocks of 17 tokens"):
        mailbox.finish(world.engine, 1)
    assert mailbox.load(Word.ANSWERED) == 0


@pytest.mark.parametrize("stop", [0.5, 0.9, 0.99])
def test_early_exit_by_a_devices_parts_is_bit_for_bit_the_same(stop: float) -> None:
    """With the parts that the CPU finds, the middle equals the CPU's, bit for bit."""
    ours, theirs = (NativeWorld(seed=3, rows=3, attend_union=False) for _ in range(2))
    requests = [[world.add(n) for n in (900, 400)] for world in (ours, theirs)]
    mailbox = mailbox_of(theirs, 2)
    for sequence in range(1, 6):
        slot = mailbox.slot(sequence, 2)
        for world, own in zip((ours, theirs), requests, strict=True):
            world.begin_step(own)
        draw(theirs, slot)
        plan = theirs.plan(requests[1], budget=0.3 if sequence % 2 else 1.0)
        stops = torch.full((2, theirs.heads), stop if sequence % 2 == 0 else 0.0)
        parts, out = torch.empty(2, ours.q_heads, 5), torch.empty_like(slot.q)
        ours.engine.layer_resident(ours.at(), slot.q, slot.k, slot.v, parts)
        layer_begin(ours.engine, 0, slot.q, None, None, None, plan, ours.scale, out, stop=stops)
        ours.engine.layer_finish()
        slot.parts.copy_(parts)
        layer_begin(
            theirs.engine, 0, slot.q, slot.k, slot.v, None, plan, ours.scale, None,
            stop=stops, middle=(slot.o, slot.lse), parts=slot.parts,
        )  # fmt: skip
        theirs.engine.layer_finish()
        for own in requests:
            for request in own:
                request.keys[0] = torch.cat([request.keys[0], request.keys[0][-1:]])
        # The same microbatches, the same bytes.
        assert ours.engine.stats() == theirs.engine.stats()
    assert theirs.engine.stats()["tokens_read"] > 0
