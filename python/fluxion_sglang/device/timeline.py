"""When every layer of a decode step was where: what the device waited for the CPU, and what either did meanwhile.

The mailbox notes the times (`csrc/device/layout.h`): a store each on the device, which works in a CUDA graph, too, and
a look at the clock on the host. Sums of them are always kept; the layers of some steps where somebody asks (`keep`).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class LayerTimes(NamedTuple):
    """Of one layer that the device took, in nanoseconds; the columns of `Mailbox.times`.

    Attributes:
        sequence: of the mailbox. layer: of the model.
        published, wait_begin, wait_end: by the device's clock: q, k, v were out; it had nothing to do but to wait for
            the CPU's part, and had it.
        seen, planned, answered: by the host's clock (`time.monotonic_ns`): it saw the layer, had a plan, had the
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
        """How long the device stood idle."""
        return self.wait_end - self.wait_begin


class Offset(NamedTuple):
    """What to add to the device's clock for the host's: `ns`, true to `error_ns`."""

    ns: int
    error_ns: int


def clock_offset(layers: Iterable[LayerTimes]) -> Offset:
    """The offset of the host's clock, from pairs of an event and of its being noticed on the other side.

    As NTP has it (RFC 5905), from the packets that were fastest: what was seen had been published before, so no offset
    is larger than `seen - published`; what was taken had been answered before, so none is smaller than
    `answered - wait_end`. The middle between the nearest two is wrong by half their distance at most, unless the clocks
    drifted apart between these layers.

    Raises:
        ValueError: of no layer.
    """
    layers = list(layers)
    most = min(layer.seen - layer.published for layer in layers)
    least = max(layer.answered - layer.wait_end for layer in layers)
    return Offset((most + least) // 2, (abs(most - least) + 1) // 2)


def idle_ms(steps: Sequence[Sequence[LayerTimes]]) -> float:
    """What the device waits in a layer, on average over all of these steps (Fluxion, Table 5), in milliseconds.

    Raises:
        statistics.StatisticsError: of no layer.
    """
    return statistics.fmean(layer.wait_ns for step in steps for layer in step) / 1e6


class Timeline:
    """Adds up the times of whole steps, and keeps the last of them.

    Args:
        layers: of a step. A step of which some layer failed or was not taken counts nothing.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._open: list[LayerTimes] = []
        self._kept: deque[tuple[LayerTimes, ...]] = deque(maxlen=0)
        self._steps = self._wait_ns = self._step_ns = 0

    def keep(self, steps: int) -> None:
        """Keep so many of the steps to come, the last ones; forget those kept until now."""
        self._kept = deque(maxlen=steps)

    @property
    def kept(self) -> list[tuple[LayerTimes, ...]]:
        """The layers of each step that was kept, in their order."""
        return list(self._kept)

    def add(self, rows: Iterable[Sequence[int]]) -> None:
        """What `Mailbox.times` says, in its order."""
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
        """Cumulative counts over whole steps: device_layers; device_wait_ns, what the device waited in them;
        device_step_ns, from the first layer's publication until the last one's answer was taken."""
        return {
            "device_layers": self._steps * self._layers,
            "device_wait_ns": self._wait_ns,
            "device_step_ns": self._step_ns,
        }
