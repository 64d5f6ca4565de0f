"""The device side of the mailbox, with a host that answers from another thread: order, time-outs, graphs, failures."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from device_world import Mail, Shape, Stream, merged, pinned, poison, sim, tolerance
from places import python

from fluxion_sglang.device.library import DeviceError

INT = torch.int32


@pytest.fixture
def working() -> Iterator[None]:
    """Restore the device after the test."""
    yield
    sim().inject("none", 0)


class Layers:
    """Buffers of a layer's launches in a captured graph: written before every step, read after it."""

    def __init__(self, mail: Mail, rows: int) -> None:
        s = mail.shape
        self.mail = mail
        self.q, self.k, self.v = mail.tokens(rows)
        self.o, self.lse = poison(rows, s.q_heads, s.head_dim), poison(rows, s.q_heads)
        self.out = poison(rows, s.q_heads, s.head_dim, dtype=s.dtype)

    def launch(self, stream: int, layer: int, want_parts: bool = False) -> None:
        mail, library = self.mail, sim()
        library.publish(mail.port, stream, layer, self.q, self.k, self.v, mail.windows)
        library.resident(mail.port, stream, self.q, mail.windows, mail.shape.scale, self.o, self.lse, want_parts)
        library.take(mail.port, stream, self.o, self.lse, False, self.out)

    def check(self, batch: int, given: torch.Tensor, given_lse: torch.Tensor) -> None:
        close = tolerance(self.mail.shape.dtype)
        for b in range(len(self.out)):
            for head in range(self.mail.shape.q_heads):
                want = self.o[b, head].double()
                if b < batch:
                    want = merged((self.o[b, head], self.lse[b, head]), (given[b, head], given_lse[b, head]))[0]
                torch.testing.assert_close(self.out[b, head].double(), want, atol=close, rtol=close)


def step(mail: Mail, stream: int, rows: list[int], lengths: list[int]) -> None:
    sim().port_step(mail.port, stream, torch.tensor(rows, dtype=INT), torch.tensor(lengths, dtype=INT))


def wait_for(mail: Mail, word: str, value: int) -> None:
    end = time.monotonic() + 30
    while mail.word(word) != value:
        assert time.monotonic() < end, f"{word} is {mail.word(word)}, not {value}"
        time.sleep(0.0002)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_steps_go_to_and_fro(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mail = Mail(Shape(dtype=dtype, head_dim=32))
    shape, buffers = mail.shape, Layers(mail, 3)
    steps = [([1, 3], [5, 400]), ([3], [401]), ([], []), ([0, 1, 3], [1, 6, 402])]
    with Stream() as stream:
        sequence = 0
        for rows, lengths in steps:
            batch = len(rows)
            step(mail, stream, rows, lengths)
            for layer in range(3):
                buffers.launch(stream, layer, want_parts=True)
                sequence += 1
                wait_for(mail, "published", sequence)
                assert mail.layer(sequence) == layer and mail.word("batch") == batch
                assert torch.equal(mail.slot("q", sequence, batch), buffers.q[:batch])
                assert torch.equal(mail.slot("k", sequence, batch), buffers.k[:batch])
                wait_for(mail, "observed", sequence)
                assert not bool(mail.slot("parts", sequence, batch).isnan().any())
                o, lse = torch.randn(batch, shape.q_heads, shape.head_dim), torch.randn(batch, shape.q_heads)
                mail.answer(sequence, o, lse)
                sim().stream_synchronize(stream)
                buffers.check(batch, o, lse)
                # The next layer must get its own results.
                for tensor in (buffers.o, buffers.lse, buffers.out):
                    tensor.fill_(math.nan)
    assert mail.word("late") == 0


def test_slots_alternate_and_keep_what_the_host_reads() -> None:
    mail = Mail(Shape(head_dim=32))
    with Stream() as stream:
        step(mail, stream, [0], [1])
        first, second = Layers(mail, 1), Layers(mail, 1)
        first.launch(stream, 0)
        second.launch(stream, 1)
        wait_for(mail, "published", 1)
        time.sleep(0.01)
        assert mail.word("published") == 1, "the second layer waits for the first one's answer"
        o, lse = torch.randn(1, 8, 32), torch.randn(1, 8)
        mail.answer(1, o, lse)
        wait_for(mail, "published", 2)
        assert torch.equal(mail.slot("q", 2, 1), second.q) and torch.equal(mail.slot("q", 1, 1), first.q)
        mail.answer(2, 2 * o, lse)
        sim().stream_synchronize(stream)
        first.check(1, o, lse)
        second.check(1, 2 * o, lse)


def test_an_answer_in_time_is_taken_from_the_calling_threads_stream() -> None:
    """Stream 0 executes in the calling thread; the GIL is free meanwhile."""
    mail = Mail(Shape(head_dim=32))
    step(mail, 0, [2], [9])
    buffers = Layers(mail, 1)
    o, lse = torch.randn(1, 8, 32), torch.randn(1, 8)
    thread = mail.answer_later(1, o, lse)
    buffers.launch(0, 4)
    thread.join()
    buffers.check(1, o, lse)


def test_a_late_answer_gives_the_mailbox_up_until_the_reset() -> None:
    mail = Mail(Shape(head_dim=32), timeout_s=1)
    buffers = Layers(mail, 2)
    with Stream() as stream:
        step(mail, stream, [0, 1], [3, 300])
        buffers.launch(stream, 0)
        sim().stream_synchronize(stream)
        assert mail.word("late") == 1 and torch.equal(buffers.out, buffers.o)
        before, windows = mail.arena.clone(), mail.windows.clone()
        start = time.monotonic()
        for layer in range(1, 4):
            buffers.launch(stream, layer, want_parts=True)
        sim().stream_synchronize(stream)
        assert time.monotonic() - start < 3, "each of three layers waited again"
        assert torch.equal(mail.arena, before), "a mailbox that was given up is written"
        assert torch.equal(mail.windows, windows)
        sim().port_reset(mail.port, stream)
        sim().stream_synchronize(stream)
        step(mail, stream, [0, 1], [3, 300])
        buffers.launch(stream, 5)
        wait_for(mail, "published", 1)
        o, lse = torch.randn(2, 8, 32), torch.randn(2, 8)
        mail.answer(1, o, lse)
        sim().stream_synchronize(stream)
        assert mail.word("late") == 0
        buffers.check(2, o, lse)


def test_cancel_ends_the_wait() -> None:
    mail = Mail(Shape(head_dim=32), timeout_s=1000)
    buffers = Layers(mail, 1)
    with Stream() as stream:
        step(mail, stream, [0], [3])
        buffers.launch(stream, 0)
        wait_for(mail, "published", 1)
        mail.write("cancel", 1)
        buffers.launch(stream, 1)
        sim().stream_synchronize(stream)
        assert mail.word("late") == 1 and mail.word("published") == 1
        assert torch.equal(buffers.out, buffers.o)


def test_a_failed_layer_is_the_devices_own_part() -> None:
    mail = Mail(Shape(head_dim=32))
    buffers = Layers(mail, 1)
    step(mail, 0, [0], [3])
    mail.slot("o", 1, 1).fill_(math.nan)
    thread = mail.answer_later(1, poison(1, 8, 32), torch.full((1, 8), -math.inf))
    buffers.launch(0, 0)
    thread.join()
    torch.testing.assert_close(buffers.out, buffers.o)


def test_sequence_numbers_wrap() -> None:
    """Sequence numbers are compared as int32 differences; slots continue to alternate."""
    mail = Mail(Shape(head_dim=32))
    slots = [mail.mailbox._whole_slot(sequence) for sequence in (0, 1, 2**32, 2**32 - 1, 2**31)]
    first, second, *again = [(slot.q.data_ptr(), slot.o.data_ptr()) for slot in slots]
    assert first != second and again == [first, second, first]


@pytest.mark.parametrize("padded", [2, 3])
def test_a_graph_replays_with_the_steps_own_requests(padded: int) -> None:
    torch.manual_seed(1)
    mail = Mail(Shape(head_dim=32, dtype=torch.bfloat16))
    buffers, layers = Layers(mail, padded), 2
    with Stream() as stream:
        sim().graph_begin(stream)
        for layer in range(layers):
            buffers.launch(stream, layer)
        graph = sim().graph_end(stream)
        assert mail.word("published") == 0, "recording runs nothing"
        sequence = 0
        for rows, lengths in [([0], [1]), ([3, 1], [700, 40]), ([], []), ([1, 2], [41, 64])]:
            batch = len(rows)
            for fresh, into in zip(mail.tokens(padded), (buffers.q, buffers.k, buffers.v), strict=True):
                into.copy_(fresh)
            step(mail, stream, rows, lengths)
            sim().graph_launch(graph, stream)
            for layer in range(layers):
                sequence += 1
                wait_for(mail, "published", sequence)
                assert mail.layer(sequence) == layer and mail.word("batch") == batch
                assert torch.equal(mail.slot("q", sequence, batch), buffers.q[:batch])
                o, lse = torch.randn(batch, 8, 32), torch.randn(batch, 8)
                mail.answer(sequence, o, lse)
            sim().stream_synchronize(stream)
            buffers.check(batch, o, lse)


def test_steps_may_be_given_far_ahead_of_the_device() -> None:
    """A step's requests are copied when it is submitted, and used in stream order."""
    mail = Mail(Shape(head_dim=32))
    buffers, steps = Layers(mail, 1), 7
    seen = []

    def serve() -> None:
        for sequence in range(1, steps + 1):
            wait_for(mail, "published", sequence)
            seen.append(mail.slot("k", sequence, 1).clone())
            mail.answer(sequence, torch.zeros(1, 8, 32), torch.full((1, 8), -math.inf))

    thread = threading.Thread(target=serve)
    with Stream() as stream:
        mail.windows.zero_()
        rows, lengths = torch.zeros(1, dtype=INT), torch.zeros(1, dtype=INT)
        thread.start()
        for n in range(1, steps + 1):
            rows[0], lengths[0] = n % 4, n
            sim().port_step(mail.port, stream, rows, lengths)
            buffers.launch(stream, 0)
        sim().stream_synchronize(stream)
    thread.join()
    slot_pages = mail.shape.placement.slot_pages
    for n in range(1, steps + 1):
        assert torch.equal(mail.windows[:, n % 4 * slot_pages, 0, n - 1], buffers.k[0])
    written = mail.windows.abs().sum(-1) > 0
    assert int(written[0, :, 0].sum()) == steps


def test_memory_that_runs_out_is_a_sentence(working: None) -> None:
    mail = Mail(Shape())
    for nth in (1, 2):
        sim().inject("memory", nth)
        with pytest.raises(DeviceError, match=r"failed at the allocation of .*out of memory .*\.$"):
            sim().port_create(mail.arena, **mail._sizes, sinks=64, window=256, timeout_s=1)
    sim().inject("memory", 1)
    with pytest.raises(DeviceError, match="pinned memory"):
        sim().pinned_empty(4096)
    assert len(sim().pinned_empty(4096)) == 4096


def test_a_refused_launch_is_a_sentence_and_nothing_ran(working: None) -> None:
    mail = Mail(Shape(head_dim=32))
    buffers = Layers(mail, 1)
    step(mail, 0, [0], [3])
    sim().inject("launch", 1)
    with pytest.raises(DeviceError, match="failed at the launch of publish: too many resources"):
        buffers.launch(0, 0)
    assert mail.word("published") == 0
    thread = mail.answer_later(1, torch.zeros(1, 8, 32), torch.zeros(1, 8))
    buffers.launch(0, 0)
    thread.join()


def test_a_lost_device_hangs_nobody(working: None) -> None:
    mail = Mail(Shape(head_dim=32), timeout_s=1000)
    buffers = Layers(mail, 1)
    stream = sim().stream_create()
    step(mail, stream, [0], [3])
    sim().inject("lost", 3)
    # The error is asynchronous: the next call after the loss reports it.
    end, layer = time.monotonic() + 60, 0
    with pytest.raises(DeviceError, match="the device is lost to this process"):
        while time.monotonic() < end:
            buffers.launch(stream, layer)
            layer += 1
            mail.write("answered", layer)
            time.sleep(0.001)  # time to run what was launched
    with pytest.raises(DeviceError, match="unspecified launch failure"):
        sim().stream_synchronize(stream)
    with pytest.raises(DeviceError):
        sim().port_step(mail.port, stream, torch.zeros(1, dtype=INT), torch.ones(1, dtype=INT))
    del mail, buffers
    sim().inject("none", 0)
    sim().stream_destroy(stream)


def test_environment_injects() -> None:
    code = (
        "from fluxion_sglang.device.library import load, DeviceError\n"
        "try:\n    load('sim').pinned_empty(4096)\nexcept DeviceError as error:\n    print(error)"
    )
    assert "out of memory" in python("-c", code, env={"FLUXION_SIM_FAIL": "memory:1"}).stdout


def test_registered_memory_is_pinned_until_it_is_not() -> None:
    raw = torch.zeros(3 * 4096, dtype=torch.uint8)
    start = -raw.data_ptr() % 4096
    memory = raw[start : start + 2 * 4096]
    with pytest.raises(ValueError, match="multiples of 4096"):
        sim().host_register(raw[1:4097])
    sim().host_register(memory)
    tiles = memory.view(torch.float32)[: 2 * 16 * 32].view(1, 1, 2, 16, 32)
    k, v = poison(16, 1, 32), poison(16, 1, 32)
    sim().gather(0, tiles, pinned(torch.zeros(1, dtype=INT)), k, v)
    assert torch.equal(k, torch.zeros_like(k)) and torch.equal(v, k)
    with pytest.raises(DeviceError, match="already mapped"):
        sim().host_register(memory)
    sim().host_unregister(memory)
    with pytest.raises(ValueError, match="not pinned"):
        sim().gather(0, tiles, pinned(torch.zeros(1, dtype=INT)), k, v)
    with pytest.raises(DeviceError, match="registered"):
        sim().host_unregister(memory)
