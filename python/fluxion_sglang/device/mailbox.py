"""The host's side of the mailbox, through which a device and the CPU exchange the work of decode layers.

`csrc/device/layout.h` defines the layout and the writer of each word, `csrc/device/protocol.h` the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import torch

from fluxion_sglang.native import function

if TYPE_CHECKING:
    from fluxion_sglang.native import NativeEngine, NativePlan


class Word(IntEnum):
    """The words of a mailbox, with the native library's values."""

    PUBLISHED = 0
    OBSERVED = 1
    LATE = 2
    ANSWERED = 3
    FAILED = 4
    CANCEL = 5
    BATCH = 6


TIMES = 1024
"""Number of layers whose times a mailbox keeps."""


class MailboxError(RuntimeError):
    """The device did not signal in time, gave up or was cancelled; it stays silent until a reset."""


@dataclass(frozen=True)
class MailboxShape:
    """Capacities of a mailbox.

    Attributes:
        max_requests: of a step. q_heads, kv_heads: of this process. head_dim: elements of a key.
        dtype: of q, k and v: torch.bfloat16 or torch.float32.
    """

    max_requests: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class Slot(NamedTuple):
    """A layer's data for a step of B requests; views of the arena.

    Attributes:
        q: [B, Hq, D]. k, v: [B, H, D]. All KV dtype.
        parts: [B, Hq, 5] float32, attention to the residents (`predictor/features.py`, PARTS).
        o: [B, Hq, D] float32, lse: [B, Hq] float32, natural log: of the middle; o is read where lse is not -inf.
        layer: [1] int32.
        published_at: [1], taken_at: [2] int64, nanoseconds of the device's clock: q, k, v were published; the device
            began to wait for the answer, and received it (0: not yet).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    parts: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor
    layer: torch.Tensor
    published_at: torch.Tensor
    taken_at: torch.Tensor


class Mailbox:
    """Owns the arena and waits for the device. The device counts sequence numbers: 1 is the first layer after a reset.

    Waits release the GIL. They end with an error when the device gives up, after `cancel`, or after a time-out.

    Attributes:
        arena: uint8, whole pages of 4096 bytes, page aligned, for the device library.

    Raises:
        ValueError: an invalid shape.
    """

    def __init__(self, shape: MailboxShape) -> None:
        self.shape = shape
        self.handle = function("mailbox_create")(
            shape.max_requests, shape.q_heads, shape.kv_heads, shape.head_dim, shape.dtype.itemsize
        )
        self.arena: torch.Tensor = torch.from_dlpack(function("mailbox_arena")(self.handle))
        self._slots = [self._whole_slot(sequence) for sequence in (0, 1)]
        self._views: dict[tuple[int, int], Slot] = {}
        self._wait = function("mailbox_wait")
        self._answer = function("mailbox_answer")
        self._fail = function("mailbox_fail")
        self._finish = function("mailbox_finish")
        self._serve = function("mailbox_serve")
        self._served = torch.zeros(3, dtype=torch.int64)
        self._times = torch.empty(TIMES, 8, dtype=torch.int64)

    def _whole_slot(self, sequence: int) -> Slot:
        s = self.shape
        queries, keys = (s.max_requests, s.q_heads, s.head_dim), (s.max_requests, s.kv_heads, s.head_dim)
        parts, states = (s.max_requests, s.q_heads, 5), (s.max_requests, s.q_heads)
        real = torch.float32
        shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
        shapes = ((queries, s.dtype), (keys, s.dtype), (keys, s.dtype), (parts, real), (queries, real), (states, real))
        shapes += (((1,), torch.int32), ((1,), torch.int64), ((2,), torch.int64))
        offsets = torch.empty(len(Slot._fields), dtype=torch.int64)
        function("mailbox_offsets")(self.handle, sequence, offsets)

        def view(offset: int, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            count = torch.Size(size).numel() * dtype.itemsize
            return self.arena[offset : offset + count].view(dtype).view(size)

        return Slot(*(view(at, *what) for at, what in zip(offsets.tolist(), shapes, strict=True)))

    def slot(self, sequence: int, batch: int) -> Slot:
        """The slot of a sequence number for a step of `batch` requests; views are cached by batch size."""
        key = (sequence % 2, batch)
        slot = self._views.get(key)
        if slot is None:
            whole = self._slots[sequence % 2]
            slot = self._views[key] = Slot._make([*(rows[:batch] for rows in whole[:6]), *whole[6:]])
        return slot

    def wait(self, sequence: int, timeout_s: float) -> None:
        """Wait until the layer of this sequence number is published. Then q, k, v and layer of its slot may be read.

        Raises:
            MailboxError: the device gave up, the step was cancelled, or the time is over.
        """
        self._wait_for(Word.PUBLISHED, sequence, timeout_s)

    def wait_observed(self, sequence: int, timeout_s: float) -> None:
        """Wait until the slot's parts may be read, too. Raises as `wait`."""
        self._wait_for(Word.OBSERVED, sequence, timeout_s)

    def _wait_for(self, word: Word, sequence: int, timeout_s: float) -> None:
        self._check(word, self._wait(self.handle, int(word), sequence, _nanoseconds(timeout_s)), timeout_s)

    def _check(self, word: Word, outcome: int, timeout_s: float) -> None:
        if outcome == 0:
            return
        if outcome == 1:
            raise MailboxError(self.late_sentence())
        if outcome == 2:
            raise MailboxError("The step was cancelled.")
        what = "publish a layer" if word is Word.PUBLISHED else "attend to what is resident"
        raise MailboxError(
            f"The device did not {what} within {timeout_s:g} s; look for its error, or raise FLUXION_TASK_TIMEOUT_S."
        )

    def late_sentence(self) -> str:
        """One sentence about why the device gave up."""
        return (
            f"The device waited too long for the CPU's part of a layer (number {self.load(Word.LATE)} since the last "
            "reset) and gave up; use less of the middle, or raise FLUXION_TASK_TIMEOUT_S."
        )

    def answer(self, sequence: int) -> bool:
        """Signal that o and lse of the slot are written. False: the device has given up and may not take them."""
        return bool(self._answer(self.handle, sequence))

    def fail(self, sequence: int) -> bool:
        """Answer a layer that could not be computed with an empty result for all requests. Returns as `answer`."""
        return bool(self._fail(self.handle, sequence))

    def finish(self, engine: NativeEngine, sequence: int, planned_ns: int = 0) -> bool:
        """`engine.layer_finish`, then `answer`, without Python between the two.

        Args:
            planned_ns: `time.monotonic_ns()` when the layer was planned; 0: its plan took no time.

        Raises:
            RuntimeError: the layer failed and is not answered.
        """
        return engine.finish_by(lambda handle: bool(self._finish(self.handle, handle, sequence, planned_ns)))

    def serve(
        self,
        engine: NativeEngine,
        plans: tuple[NativePlan, NativePlan],
        sequence: int,
        layers: int,
        scale: float,
        timeout_s: float,
    ) -> tuple[int, bool]:
        """Wait for the layers of a step and answer them, without Python between them (csrc/device/steady_step.h).

        Args:
            plans: of layers with an even and with an odd sequence number. sequence: of the first layer.

        Returns:
            The number of answered layers, and whether the device took the last answer.

        Raises:
            MailboxError: as for `wait`; fewer layers are answered. RuntimeError: a layer failed; its answer is empty.
        """
        even, odd = plans
        self._served.zero_()
        self._serve(
            self.handle, engine.handle, even.handle, odd.handle, sequence, layers, scale, _nanoseconds(timeout_s),
            self._served,
        )  # fmt: skip
        answered, outcome, taken = self._served.tolist()
        self._check(Word.PUBLISHED, outcome, timeout_s)
        return answered, bool(taken)

    def times(self) -> torch.Tensor:
        """[n, 8] int64: `LayerTimes` of the answered layers that the device has taken since the last call.

        It includes the newest layer after the wait for the next one, or after `settled`. For the server's thread.
        """
        return self._times[: function("mailbox_times")(self.handle, self._times)].clone()

    def settled(self) -> None:
        """The device has completed all its work, so the times of its last layer may be read."""
        function("mailbox_settled")(self.handle)

    @property
    def late(self) -> bool:
        """Whether the device has given up."""
        return self.load(Word.LATE) != 0

    def cancel(self) -> None:
        """End all waits of both sides until `reset`. Any thread may call it."""
        function("mailbox_cancel")(self.handle)

    def reset(self) -> None:
        """Reset the mailbox. Neither side may use it meanwhile."""
        function("mailbox_reset")(self.handle)

    def load(self, word: Word) -> int:
        """Load a word with acquire semantics: data that its writer wrote before it may be read. Any thread."""
        return int(function("mailbox_load")(self.handle, int(word)))

    def store(self, word: Word, value: int) -> None:
        """Store a word with release semantics, for a device that is simulated in Python."""
        function("mailbox_store")(self.handle, int(word), value)


def _nanoseconds(seconds: float) -> int:
    return min(int(seconds * 1e9), 2**62)
