"""Answers the layers that a device publishes: the CPU's half of a decode step on a device.

The thread that launches the model's kernels never waits for a layer. It passes every step to the server before it
launches the step's kernels (`begin`), and asks once for the outcome after the pass is launched (`finish`).
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fluxion_sglang.device.mailbox import Mailbox, MailboxError, Slot, Word
from fluxion_sglang.device.timeline import Timeline
from fluxion_sglang.executor.decode import DecodeEngine, Layer
from fluxion_sglang.native import AttentionLayer, NativeEngine, NativePlan
from fluxion_sglang.policy.base import Policy

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 1e-4
"""Python's switch interval while a server exists. It bounds the time that a published layer waits for a launching
thread that runs Python. The default is 5 ms, the time of a dozen layers."""


@dataclass(frozen=True)
class _Step:
    rows: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    scale: float
    policies: Sequence[Policy] | None
    far: tuple[NativePlan, NativePlan] | None


@dataclass(kw_only=True)
class MailboxLayer(Layer):
    """A layer that a device has published. The device holds its residents; the CPU answers with the middle.

    Attributes:
        slot: of the mailbox. The device writes q, k, v and parts; o and lse are written here. Valid until the next
            answer.
        timeout_s: longest wait for the parts.
        taken: False: the device has given up, and may not take the answer.
    """

    slot: Slot
    mailbox: Mailbox
    sequence: int
    timeout_s: float
    taken: bool = False
    planned_ns: int = 0

    def look(self, native: NativeEngine) -> torch.Tensor:
        """Append the token and wait for the parts. Raises MailboxError if they will not come."""
        native.layer_append(self.index, self.k, self.v)  # while the device attends to the residents
        self.mailbox.wait_observed(self.sequence, self.timeout_s)
        return self.slot.parts

    def begin(self, native: NativeEngine, plan: NativePlan, parts: torch.Tensor | None) -> None:
        self.planned_ns = time.monotonic_ns()
        k, v = (self.k, self.v) if parts is None else (None, None)
        native.middle_begin(plan, self.of, self.q, k, v, self.slot.o, self.slot.lse, parts)

    def finish(self, native: NativeEngine) -> None:
        self.taken = self.mailbox.finish(native, self.sequence, self.planned_ns)


class LayerServer:
    """One thread that answers every layer of every step it is given, in order.

    From `begin` to the end of `finish` the engine, its policies and its host pool belong to the server's thread.

    A layer that fails (a task, a policy, an executor) gets an empty answer, and so do all later layers of the steps
    given so far. The device completes them, `finish` raises, and the server continues. If the two sides are out of
    step, no layer is answered any more, and `finish` raises for every step until `reset`. This happens if the device
    waits or publishes too late, or if the step is aborted.

    Attributes:
        timeline: the device's waiting times by step; it includes the newest step when the next one begins, or after
            `settled`.

    Args:
        timeout_s: longest wait for the device to publish a layer, from the previous layer or from `begin`. None:
            FLUXION_TASK_TIMEOUT_S, or 60.
    """

    def __init__(self, engine: DecodeEngine, mailbox: Mailbox, timeout_s: float | None = None) -> None:
        self.engine = engine
        self.mailbox = mailbox
        self.layers = engine.pool.shape.layers
        self.timeout_s = float(os.environ.get("FLUXION_TASK_TIMEOUT_S") or 60) if timeout_s is None else timeout_s
        self.timeline = Timeline(self.layers)
        self._sequence = 0  # of the last awaited layer
        # State guarded by _changed.
        self._changed = threading.Condition()
        self._steps: deque[_Step] = deque()  # the first one is being served
        self._failure: str | None = None  # the first since the last finish()
        self._lost: str | None = None  # why no layer is answered; None: layers are
        self._closing = False
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread = threading.Thread(target=self._main, name="fluxion-layers", daemon=True)
        self._thread.start()
        # The interpreter's end may stop a daemon thread anywhere, and the native engine must not run then.
        atexit.register(self.close)

    def begin(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        scale: float,
        policies: Sequence[Policy] | None = None,
        far: tuple[NativePlan, NativePlan] | None = None,
    ) -> None:
        """Queue a step of B requests whose layers the device will publish; returns at once.

        Args:
            rows, seq_lens, page_table, policies: as in `DecodeEngine.begin_step`; copied. B = 0 gives empty answers, to
                warm up graphs.
            scale: multiplies q.k, in every layer.
            far: the CPU's plans for even and for odd sequence numbers of layers, if the device selects; else None.

        Raises:
            ValueError: more requests than the mailbox has room for. RuntimeError: the server is closed.
        """
        if rows.numel() > self.mailbox.shape.max_requests:
            raise ValueError(
                f"the step has {rows.numel()} requests and the mailbox room for {self.mailbox.shape.max_requests}."
            )
        step = _Step(rows.clone(), seq_lens.clone(), page_table.clone(), scale, policies and list(policies), far)
        with self._changed:
            if self._closing:
                raise RuntimeError("The layer server is closed; it takes no more steps.")
            self._steps.append(step)
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until all layers of all steps are answered.

        Raises:
            RuntimeError: one of them failed; the sentence names the first failure.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._steps)
            failure, self._failure = self._failure or self._lost, None
        if failure is not None:
            raise RuntimeError(failure)

    def abort(self) -> None:
        """Drop the queued steps and end the current layer and `finish` as soon as possible. Call `reset` next."""
        self._lose("The step was aborted.")
        with self._changed:
            while len(self._steps) > 1:
                self._steps.pop()
            self._changed.wait_for(lambda: not self._steps)

    def reset(self) -> None:
        """Restart after a fatal failure, mailbox included. The device must be idle and reset, too.

        Raises:
            RuntimeError: steps are still being served.
        """
        with self._changed:
            if self._steps:
                raise RuntimeError("The layer server still serves a step; finish or abort it before the reset.")
            self.mailbox.reset()
            self._sequence = 0
            self._failure = self._lost = None

    def settled(self) -> None:
        """Wait for all answers and complete `timeline`. The device must have done all its work."""
        with self._changed:
            self._changed.wait_for(lambda: not self._steps)
            self.mailbox.settled()
            self.timeline.add(self.mailbox.times().tolist())

    @property
    def lost(self) -> bool:
        """Whether the server needs a `reset`."""
        return self._lost is not None

    def close(self) -> None:
        """End the thread and its current work."""
        atexit.unregister(self.close)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._steps:
            self.abort()
        self._thread.join()

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._steps or self._closing)
                if not self._steps:
                    return
                step = self._steps[0]
            try:
                self._serve(step)
            except BaseException as error:
                self._lose(_sentence(error))
            with self._changed:
                self._steps.popleft()
                self._changed.notify_all()

    def _serve(self, step: _Step) -> None:
        """Wait for and answer all layers of a step, each once."""
        if self._failure is None and self._lost is None and step.rows.numel() > 0:
            try:
                self.engine.begin_step(step.rows, step.seq_lens, step.page_table, step.policies)
            except Exception as error:
                self._fail(error)
        first = 0
        if self._failure is None and self._lost is None and step.rows.numel() > 0:
            plans = step.far
            looks = self.engine.looks(step.policies)
            if plans is None and not looks and (steady := self.engine.steady_plan()) is not None:
                plans = steady, steady
            if plans is not None:
                first = self._serve_steady(step, plans)
        for layer in range(first, self.layers):
            if self._lost is not None:
                return
            self._sequence += 1
            try:
                self.mailbox.wait(self._sequence, self.timeout_s)
                taken = self._answer(step, layer)
            except MailboxError as error:
                return self._lose(str(error))
            if not taken:
                return self._lose(self.mailbox.late_sentence())
        # Read the times after the last answer, so that the device does not wait for this.
        self.timeline.add(self.mailbox.times().tolist())

    def _serve_steady(self, step: _Step, plans: tuple[NativePlan, NativePlan]) -> int:
        """Answer the layers of a step whose plans are known in advance. Returns the number of answered layers."""
        engine, before = self.engine, self.mailbox.load(Word.ANSWERED)
        taken = True
        try:
            _, taken = self.mailbox.serve(
                engine.native, plans, self._sequence + 1, self.layers, step.scale, self.timeout_s
            )
        except MailboxError as error:
            self._lose(str(error))
        except Exception as error:
            self._fail(error)
        answered = (self.mailbox.load(Word.ANSWERED) - before) & 0xFFFFFFFF
        self._sequence += answered
        if not taken:
            self._lose(self.mailbox.late_sentence())
        engine.served(answered)
        return answered

    def _answer(self, step: _Step, layer: int) -> bool:
        """Answer the published layer. False: the device has given up."""
        sequence = self._sequence
        if self._failure is not None:
            return self.mailbox.fail(sequence)
        if step.rows.numel() == 0:
            return self.mailbox.answer(sequence)
        slot = self.mailbox.slot(sequence, step.rows.numel())
        try:
            if int(slot.layer) != layer:
                raise RuntimeError(f"The device published layer {int(slot.layer)} where layer {layer} comes next.")
            at = MailboxLayer(
                index=layer, of=AttentionLayer(self.engine.native, layer, step.scale),
                q=slot.q, scale=step.scale, k=slot.k, v=slot.v,
                slot=slot, mailbox=self.mailbox, sequence=sequence, timeout_s=self.timeout_s,
            )  # fmt: skip
            self.engine.attend(at)
        except MailboxError:
            raise
        except Exception as error:
            self._fail(error)
            return self.mailbox.fail(sequence)
        try:
            self.engine.attended(at)
        except Exception as error:
            self._fail(error)
        return at.taken

    def _fail(self, error: BaseException) -> None:
        logger.error("Fluxion: a layer failed on the CPU's side", exc_info=error)
        with self._changed:
            self._failure = self._failure or _sentence(error)

    def _lose(self, sentence: str) -> None:
        with self._changed:
            self._failure = self._failure or sentence
            self._lost = self._lost or sentence
        # Wake a device that is only slow: its answers will not come.
        self.mailbox.cancel()


def _sentence(error: BaseException) -> str:
    return str(error) or type(error).__name__
