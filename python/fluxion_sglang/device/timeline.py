"""Times of the layers of decode steps: the device's waiting for the CPU, and the work of both sides meanwhile.

The mailbox records the times (`csrc/device/layout.h`): by a store each on the device, which also works in a CUDA graph,
and by clock reads on the host. Sums are always kept; single layers only after `keep`.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class LayerTimes(NamedTuple):
    """Times of one layer that the device completed, in nanoseconds; the columns of `Mailbox.times`.

    Attributes:
        sequence: of the mailbox. layer: of the model.
        published, wait_begin, wait_end: by the device's clock: q, k, v were published; the device began to wait for the
            CPU's part, and received it.
        seen, planned, answered: by the host's clock (`time.monotonic_ns`): the host saw the layer, had a plan, had the
            results.
    """

    sequence: int
    layer: int
    published: int
    wait_begin: int
    wait_end: int
    seen: int
    planned: int
    answered: int

    @property
    def wait_ns(self) -> int:
        """Idle time of the device."""
        return self.wait_end - self.wait_begin


class Offset(NamedTuple):
    """The difference host clock minus device clock: `ns`, with an error of at most `error_ns`."""

    ns: int
    error_ns: int


def clock_offset(layers: Iterable[LayerTimes]) -> Offset:
    """The offset of the host's clock, from events that one side causes and the other side notices.

    The method is that of NTP (RFC 5905), applied to the fastest pairs. A layer is seen after it is published, so the
    offset is at most `seen - published`. An answer is taken after it is given, so the offset is at least
    `answered - wait_end`. The midpoint of the tightest bounds is wrong by at most half their distance, unless the
    clocks drifted between these layers.

    Raises:
        ValueError: there are no layers.
    """
    layers = list(layers)
    most = min(layer.seen - layer.published for layer in layers)
    least = max(layer.answered - layer.wait_end for layer in layers)
    return Offset((most + least) // 2, (abs(most - least) + 1) // 2)


def idle_ms(steps: Sequence[Sequence[LayerTimes]]) -> float:
    """The device's mean waiting time per layer over all these steps (Fluxion, Table 5), in milliseconds.

    Raises:
        statistics.StatisticsError: there are no layers.
    """
    return statistics.fmean(layer.wait_ns for step in steps for layer in step) / 1e6


class Timeline:
    """Sums the times of whole steps, and keeps the last steps on request.

    Args:
        layers: of a step. A step with a layer that failed or was not taken is ignored.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._open: list[LayerTimes] = []
        self._kept: deque[tuple[LayerTimes, ...]] = deque(maxlen=0)
        self._steps = self._wait_ns = self._step_ns = 0

    def keep(self, steps: int) -> None:
        """Keep the last `steps` steps from here on; drop those kept so far."""
        self._kept = deque(maxlen=steps)

    @property
    def kept(self) -> list[tuple[LayerTimes, ...]]:
        """The layers of each kept step, in order."""
        return list(self._kept)

    def add(self, rows: Iterable[Sequence[int]]) -> None:
        """Add the rows of `Mailbox.times`, in order."""
        for row in rows:
            times = LayerTimes._make(row)
            if times.layer != len(self._open) or (self._open and times.sequence != self._open[-1].sequence + 1):
                self._open.clear()
            if times.layer == len(self._open):
                self._open.append(times)
            if len(self._open) == self._layers:
                self._steps += 1
                self._wait_ns += sum(layer.wait_ns for layer in self._open)
                self._step_ns += self._open[-1].wait_end - self._open[0].published
                self._kept.append(tuple(self._open))
                self._open.clear()

    def stats(self) -> dict[str, int]:
        """Cumulative counts over whole steps: device_layers; device_wait_ns, the device's waiting time in them;
        device_step_ns, from the first layer's publication until the last answer was taken."""
        return {
            "device_layers": self._steps * self._layers,
            "device_wait_ns": self._wait_ns,
            "device_step_ns": self._step_ns,
        }
