"""Makes the picture of a running server from its /metrics."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fluxion_sglang.commands.reads.picture import Picture, ReadsError, Timeline, ratio
from fluxion_sglang.commands.serving import UNAUTHORIZED, RequestFailed, Server, samples

POLL_S = 1.0
"""Seconds between two readings of /metrics: twice the longest delay of the server's counters."""


@dataclass(frozen=True)
class Reading:
    """The counters of a server at one time.

    Attributes:
        at: seconds of a monotonic clock.
        values: samples by name, summed over labels. labelled: values by name and by labels, in the order of `_LABELS`.
    """

    at: float
    values: Mapping[str, float]
    labelled: Mapping[str, Mapping[tuple[str, ...], float]]

    @classmethod
    def nothing(cls) -> Reading:
        """The counters at the server's start."""
        return cls(0.0, {}, {})

    @classmethod
    def parse(cls, text: str, at: float) -> Reading:
        """Parse the text of /metrics; raises ValueError for other text."""
        values: dict[str, float] = {}
        labelled: dict[str, dict[tuple[str, ...], float]] = {}
        for sample in samples(text):
            if not sample.name.startswith("fluxion_"):
                continue
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
            if sample.name in _LABELS:
                key = tuple(sample.labels.get(label, "") for label in _LABELS[sample.name])
                labelled.setdefault(sample.name, {})[key] = sample.value
        return cls(at, values, labelled)

    def growth(self, name: str, earlier: Reading) -> float:
        return self.values.get(name, 0.0) - earlier.values.get(name, 0.0)

    def growths(self, name: str, earlier: Reading) -> dict[tuple[str, ...], float]:
        before = earlier.labelled.get(name, {})
        return {key: value - before.get(key, 0.0) for key, value in self.labelled.get(name, {}).items()}


_READ, _MIDDLE = "fluxion_group_read_bytes_total", "fluxion_layer_middle_bytes_total"
_BLOCKS, _TIMES = "fluxion_sampled_groups_total", "fluxion_step_seconds_total"
_LABELS = {_READ: ("layer", "group"), _MIDDLE: ("layer",), _BLOCKS: ("block",), _TIMES: ("part",)}


def read_server(server: Server) -> Reading:
    """The current counters of a server; raises ReadsError."""
    try:
        text = server.get("/metrics")
    except RequestFailed as error:
        if error.status == UNAUTHORIZED:
            raise ReadsError(str(error)) from error
        if error.status is not None:
            raise ReadsError(
                f"The server at {server.url} has no /metrics ({error.status}); start it with --enable-metrics."
            ) from error
        raise ReadsError(
            f"No server answers at {server.url} ({error}); start one with --enable-fluxion --enable-metrics, or give "
            "its address with --url."
        ) from error
    try:
        reading = Reading.parse(text, time.monotonic())
    except ValueError as error:
        raise ReadsError(
            f"What answers at {server.url} is no SGLang server: its /metrics cannot be read ({error})."
        ) from error
    if not reading.values:
        raise ReadsError(
            f"The server at {server.url} has no counters of Fluxion; start it with --enable-fluxion --enable-metrics."
        )
    if _READ not in reading.labelled:
        raise ReadsError(
            f"The server at {server.url} runs an older fluxion-sglang, without counters by layer; restart it."
        )
    return reading


def watch(server: Server, seconds: float, show: Callable[[Picture, float], None]) -> Picture:
    """Read a server's counters repeatedly; raises ReadsError. An interrupt ends it with the readings so far."""
    readings = [read_server(server)]
    end = readings[0].at + seconds
    try:
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(POLL_S, left))
            readings.append(read_server(server))
            if _decoded(readings):
                show(of_readings(readings, server.url, _watched(readings)), max(0.0, end - time.monotonic()))
    except KeyboardInterrupt:
        if len(readings) < 2:
            raise
    return of_readings(readings, server.url, _watched(readings))


def _watched(readings: list[Reading]) -> str:
    return f"{readings[-1].at - readings[0].at:.0f} s"


def _decoded(readings: list[Reading]) -> bool:
    return readings[-1].growth(_MIDDLE, readings[0]) > 0


def of_readings(readings: list[Reading], url: str, when: str) -> Picture:
    """The growth from the first reading to the last; raises ReadsError if no token was decoded.

    Args:
        when: the time that the readings cover, for display.
    """
    first, last = readings[0], readings[-1]

    def growth(name: str) -> float:
        return last.growth(f"fluxion_{name}_total", first)

    steps = growth("decode_steps")
    if not _decoded(readings):
        raise ReadsError(_nothing_decoded(url, when, steps, last))
    grown = last.growths(_READ, first)
    layers = sorted({int(layer) for layer, _ in grown})
    groups = sorted({int(group) for _, group in grown})
    # All groups of a layer have the same middle. A pipeline stage has some of the layers.
    read = np.array([[grown.get((str(layer), str(group)), 0.0) for group in groups] for layer in layers])
    middle = _by_layer(last, first, layers)
    share = ratio(read, middle[:, None] / len(groups))
    mean = float(read.sum() / middle.sum())
    tiles = growth("tile_bytes") + growth("shared_tile_bytes")
    metadata = growth("metadata_bytes") + growth("shared_metadata_bytes")
    timed = growth("timed_steps")
    times = {part: seconds / timed for (part,), seconds in last.growths(_TIMES, first).items()} if timed else {}
    sizes = {block: count for (block,), count in last.growths(_BLOCKS, first).items() if count > 0}
    return Picture(
        source=f"{url}, {when}",
        steps=round(steps),
        tokens=round(growth("decode_tokens")),
        layers=layers,
        columns=groups,
        share=share,
        layer_share=ratio(read.sum(1), middle),
        mean_share=mean,
        metadata=mean * metadata / tiles if tiles else 0.0,
        timeline=_timeline(readings, layers),
        parts=times,
        blocks={block: count / sum(sizes.values()) for block, count in sorted(sizes.items(), key=_block_order)},
    )


def _nothing_decoded(url: str, when: str, steps: float, reading: Reading) -> str:
    if steps:
        resident = int(reading.values.get("fluxion_resident_tokens_per_request", 0))
        return (
            f"The requests of {url} ({when}) had no middle: none was longer than the {resident} tokens that stay on "
            "the device. Send a longer prompt."
        )
    if reading.values.get("fluxion_decode_steps_total"):
        return (
            f"The server at {url} decoded nothing ({when}). Send it a request meanwhile, or use --once to see the "
            "totals since its start."
        )
    return f"The server at {url} has not decoded yet. Send it a request that is longer than sinks and window."


def _by_layer(last: Reading, first: Reading, layers: list[int]) -> np.ndarray:
    grown = last.growths(_MIDDLE, first)
    return np.array([grown.get((str(layer),), 0.0) for layer in layers])


def _timeline(readings: list[Reading], layers: list[int]) -> Timeline:
    read, middle, tokens = [], [], []
    for before, after in itertools.pairwise(readings):
        grown = after.growths(_READ, before)
        by_layer = dict.fromkeys(layers, 0.0)
        for (layer, _), value in grown.items():
            by_layer[int(layer)] += value
        read.append([by_layer[layer] for layer in layers])
        middle.append(_by_layer(after, before, layers))
        tokens.append(after.growth("fluxion_decode_tokens_total", before) / max(after.at - before.at, 1e-9))
    at = [reading.at - readings[0].at for reading in readings[1:]]
    return Timeline(np.array(at), np.array(read), np.array(middle), np.array(tokens))


def _block_order(item: tuple[str, float]) -> tuple[int, str]:
    """Streaming groups first, then single tokens, then blocks by size."""
    block = item[0]
    return (int(block), "") if block.isdecimal() else (-1 if block == "streaming" else 0, block)
