"""Write-through of chunks behind the launching thread: order, back-pressure, failures, shutdown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fluxion_sglang.device.offload import STAGES, Offload
from fluxion_sglang.device.streams import Side, Streams


class HostSide(Side):
    handle = 0

    def follow_main(self) -> None: ...
    def mark(self) -> None: ...
    def main_waits(self, mark: None) -> None: ...
    def host_waits(self, mark: None) -> None: ...
    def run(self, launch: Callable[[int], None], reads: tuple[torch.Tensor, ...]) -> None:
        launch(self.handle)

    def copy_out(self, source: torch.Tensor, pinned: torch.Tensor) -> None:
        pinned.copy_(source)


class HostStreams(Streams):
    main = 0

    def __init__(self) -> None:
        self.taken = 0

    def side(self) -> Side:
        return HostSide()

    def settle(self) -> None: ...
    def pinned(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.taken += 1
        return torch.full(size, 255, dtype=dtype)


def put(offload: Offload, tensors: tuple[torch.Tensor, ...], write: Callable[..., Any]) -> None:
    offload.put(lambda stream: None, (), tensors, write)


def test_everything_is_written_once_and_in_order() -> None:
    streams, written = HostStreams(), []
    offload = Offload(streams)
    want = []
    for i in range(50):
        # All sizes, odd and empty ones included, as views of a wider tensor.
        size = (7 * i) % 23
        k, queries = torch.randn(40, 3, 8)[:size, 1:], torch.randn(2, 5).to(torch.bfloat16)
        want.append((i, k.clone(), queries.clone()))
        put(offload, (k, queries), lambda k, q, i=i: written.append((i, k.clone(), q.clone())))
        k.fill_(-1)  # the memory is the model's again
    offload.drain()
    assert [i for i, *_ in written] == list(range(50))
    for (_, *got), (_, *wanted) in zip(written, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    taken = streams.taken
    assert taken <= STAGES * 23
    for _ in range(2 * STAGES):
        put(offload, (torch.zeros(1),), lambda zero: None)
    offload.drain()
    assert streams.taken == taken, "memory that is there is taken again"
    offload.close()


def test_who_brings_more_than_there_is_room_for_waits() -> None:
    offload, go = Offload(HostStreams()), threading.Event()
    for _ in range(STAGES):
        put(offload, (torch.zeros(4),), lambda zero: go.wait())
    late = threading.Thread(target=lambda: put(offload, (torch.zeros(4),), lambda zero: None))
    late.start()
    time.sleep(0.05)
    assert late.is_alive()
    go.set()
    late.join(timeout=300)
    assert not late.is_alive()
    offload.drain()
    offload.close()


def test_a_failure_is_raised_once_and_stops_what_follows() -> None:
    offload, written = Offload(HostStreams()), []

    def fail(k: torch.Tensor) -> None:
        raise ValueError("page 7 is not there")

    put(offload, (torch.zeros(4),), lambda k: written.append(1))
    put(offload, (torch.zeros(4),), fail)
    put(offload, (torch.zeros(4),), lambda k: written.append(2))
    with pytest.raises(ValueError, match="page 7"):
        offload.drain()
    assert written == [1]
    put(offload, (torch.zeros(4),), lambda k: written.append(3))
    offload.drain()
    assert written == [1, 3]
    offload.close()
    offload.close()


def test_what_cannot_be_launched_is_nobodys() -> None:
    offload, written = Offload(HostStreams()), []

    def refuse(stream: int) -> None:
        raise RuntimeError("the device is lost")

    for _ in range(STAGES + 1):  # more than there is room for
        with pytest.raises(RuntimeError, match="lost"):
            offload.put(refuse, (), (torch.zeros(4),), written.append)
    put(offload, (torch.zeros(4),), written.append)
    offload.drain()
    assert len(written) == 1
    offload.close()


class RecordingSide(HostSide):
    """Raises once as configured, and records its calls and the number of free stages in each."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.offload: Offload | None = None
        self.raises: dict[str, BaseException] = {}
        self.copies = 0

    def note(self, name: str) -> None:
        assert self.offload is not None
        self.calls.append((name, len(self.offload._free)))
        if error := self.raises.pop(name, None):
            raise error

    def copy_out(self, source: torch.Tensor, pinned: torch.Tensor) -> None:
        self.copies += 1
        self.note(f"copy {self.copies}")
        super().copy_out(source, pinned)

    def mark(self) -> None:
        self.note("mark")

    def host_waits(self, mark: None) -> None:
        self.note("host_waits")


class RecordingStreams(HostStreams):
    def side(self) -> Side:
        return RecordingSide()


def recording(raises: dict[str, BaseException]) -> tuple[Offload, RecordingSide]:
    offload = Offload(RecordingStreams())
    side = offload._side
    assert isinstance(side, RecordingSide)
    side.offload, side.raises = offload, raises
    return offload, side


def all_stages_work(offload: Offload) -> None:
    assert len(offload._free) == STAGES
    written: list[torch.Tensor] = []
    for _ in range(STAGES + 1):
        put(offload, (torch.ones(4),), lambda one: written.append(one.clone()))
    offload.drain()
    assert len(written) == STAGES + 1 and all(one.tolist() == [1] * 4 for one in written)
    offload.close()


def test_a_stage_is_free_again_only_when_the_copies_into_it_are_done() -> None:
    offload, side = recording({"copy 2": RuntimeError("no second copy")})
    with pytest.raises(RuntimeError, match="no second copy"):
        put(offload, (torch.zeros(4), torch.zeros(4)), lambda a, b: None)
    assert side.calls == [(name, STAGES - 1) for name in ("copy 1", "copy 2", "mark", "host_waits")]
    all_stages_work(offload)


@pytest.mark.parametrize("where", ["mark", "host_waits"])
@pytest.mark.parametrize("what", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_while_copies_are_waited_for_takes_no_stage_away(where: str, what: type[BaseException]) -> None:
    offload, _ = recording({"copy 2": RuntimeError("no second copy"), where: what()})
    # The copy's error explains the failure, unless the process is being ended.
    with pytest.raises(KeyboardInterrupt if what is KeyboardInterrupt else RuntimeError) as raised:
        put(offload, (torch.zeros(4), torch.zeros(4)), lambda a, b: None)
    assert what is KeyboardInterrupt or "no second copy" in str(raised.value)
    all_stages_work(offload)


def test_kernels_are_launched_before_the_copies_and_written_after() -> None:
    offload, order = Offload(HostStreams()), []
    source = torch.zeros(1)

    def launch(stream: int) -> None:
        order.append("launched")
        source.fill_(7)

    offload.put(launch, (source,), (source,), lambda copy: order.append(f"wrote {copy.item():g}"))
    offload.drain()
    assert order == ["launched", "wrote 7"]
    offload.close()
