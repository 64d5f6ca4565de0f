"""The device's waits for the CPU, recorded by both sides and summed."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_layer_server import Faulty, with_requests
from test_layer_server_device import device, library

from fluxion_sglang.device.timeline import LayerTimes, Timeline, clock_offset, idle_ms
from fluxion_sglang.policy import LayerPlan, Policy, parse_spec
from fluxion_sglang.policy.base import UNSEEN, DecodeStep, Observed


class Held(Policy):
    """Reads everything, but plans a layer only when the test allows it."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self.ready, self.full = ready, parse_spec("full")

    def begin_step(self, step: DecodeStep) -> None:
        self.full.begin_step(step)

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        while not self.ready():
            time.sleep(1e-4)
        return self.full.plan(layer, q)


def ordered(layer: LayerTimes) -> bool:
    """Times of a layer are in order; the simulated device's clock is the host's."""
    device_side = 0 < layer.published <= layer.wait_begin <= layer.wait_end
    return device_side and layer.published <= layer.seen <= layer.planned <= layer.answered <= layer.wait_end


@pytest.mark.parametrize("spec", ["full", "anchor"])
def test_both_sides_note_every_layer_in_order(spec: str) -> None:
    with device(with_requests(policy=spec)) as simulated:
        timeline = simulated.server.timeline
        timeline.keep(3)
        for _ in range(5):
            simulated.decode([1, 2])
        assert timeline.stats()["device_layers"] == 4 * simulated.world.layers  # the last step's last layer is open
        simulated.server.settled()
        simulated.server.settled()  # known steps are not reported twice
        assert timeline.stats()["device_layers"] == 5 * simulated.world.layers
        steps = timeline.kept
        assert [len(step) for step in steps] == [simulated.world.layers] * 3
        layers = [layer for step in steps for layer in step]
        assert all(map(ordered, layers))
        assert all(b.sequence == a.sequence + 1 and a.wait_end <= b.published for a, b in pairwise(layers))
        assert [layer.layer for layer in steps[0]] == list(range(simulated.world.layers))
        offset = clock_offset(layers)
        assert abs(offset.ns) <= offset.error_ns
        stats = timeline.stats()
        assert stats["device_wait_ns"] >= sum(layer.wait_ns for layer in layers)
        assert stats["device_step_ns"] >= stats["device_wait_ns"]
        assert idle_ms(steps) == pytest.approx(sum(layer.wait_ns for layer in layers) / len(layers) / 1e6)


def test_a_device_waits_as_long_as_the_host_holds_its_answer() -> None:
    with device(with_requests()) as simulated:

        def waits_since() -> int:
            return int(simulated.mailbox.slot(simulated.server._sequence, 1).taken_at[0])

        hold_ns = 30_000_000
        held = Held(lambda: 0 < waits_since() <= time.monotonic_ns() - hold_ns)
        simulated.server.timeline.keep(1)
        launched = simulated.launch([1], [held])
        simulated.server.finish()
        library.stream_synchronize(simulated.stream)
        del launched  # the stream has read it
        simulated.server.settled()
        (step,) = simulated.server.timeline.kept
        for layer in step:
            assert ordered(layer) and layer.wait_begin <= layer.planned
            assert layer.wait_ns >= hold_ns


def test_a_graph_notes_the_times_of_every_replay() -> None:
    world = with_requests()
    with device(world) as simulated:
        simulated.decode([1])  # allocates
        library.graph_begin(simulated.stream)
        shape = (1, world.heads * world.group, world.dim)
        q, k, v = world.randn(*shape), world.randn(1, world.heads, world.dim), world.randn(1, world.heads, world.dim)
        o, lse, out = torch.empty(shape), torch.empty(shape[:2]), torch.empty(shape, dtype=world.dtype)
        for layer in range(world.layers):
            windows = world.windows.layers[layer]
            library.publish(simulated.port, simulated.stream, layer, q, k, v, windows)
            library.resident(simulated.port, simulated.stream, q, windows, world.scale, o, lse, False)
            library.take(simulated.port, simulated.stream, o, lse, False, out)
        graph = library.graph_end(simulated.stream)
        simulated.server.timeline.keep(2)
        for _ in range(2):
            lengths = torch.tensor([world.length(1) + 1], dtype=torch.int32)
            library.port_step(simulated.port, simulated.stream, torch.tensor([1], dtype=torch.int32), lengths)
            simulated.server.begin(
                torch.tensor([1]), lengths, world.page_list(1, int(lengths)).view(1, -1), world.scale
            )
            library.graph_launch(graph, simulated.stream)
            simulated.server.finish()
            library.stream_synchronize(simulated.stream)
            for layer in range(world.layers):
                world.take([1], layer, q, k, v)
        simulated.server.settled()
        first, second = simulated.server.timeline.kept
        assert all(map(ordered, first + second)) and first[-1].wait_end <= second[0].published


def test_a_layer_that_failed_or_was_not_taken_has_no_times() -> None:
    world = with_requests()
    with device(world, timeout_s=2.0) as simulated:
        timeline = simulated.server.timeline
        timeline.keep(9)
        launched = simulated.launch([1], [Faulty("plan 1")])
        with pytest.raises(RuntimeError, match="plan 1 went wrong"):
            simulated.server.finish()
        library.stream_synchronize(simulated.stream)
        simulated.server.settled()
        assert timeline.stats() == {"device_layers": 0, "device_wait_ns": 0, "device_step_ns": 0}
        launched += simulated.launch([1], [Held(lambda: simulated.mailbox.late)])
        with pytest.raises(RuntimeError, match="waited too long"):
            simulated.server.finish()
        library.stream_synchronize(simulated.stream)
        del launched
        assert simulated.mailbox.slot(simulated.server._sequence, 1).taken_at[1] == 0
        simulated.server.reset()
        library.port_reset(simulated.port, simulated.stream)
        library.stream_synchronize(simulated.stream)
        simulated.decode([2])
        simulated.server.settled()
        assert timeline.stats()["device_layers"] == world.layers and len(timeline.kept) == 1


ROW = LayerTimes(1, 0, 0, 0, 0, 0, 0, 0)
delays = st.integers(0, 10**6)


@given(st.integers(-(2**62), 2**62), st.lists(st.tuples(delays, delays, delays), min_size=1, max_size=40))
def test_the_offset_is_as_good_as_it_says(true: int, took: list[tuple[int, int, int]]) -> None:
    layers, now = [], 0
    for there, computed, back in took:
        seen, answered = now + there + true, now + there + computed + true
        layers.append(ROW._replace(published=now, seen=seen, answered=answered, wait_end=now + there + computed + back))
        now = layers[-1].wait_end + 5
    found = clock_offset(layers)
    assert abs(found.ns - true) <= found.error_ns
    assert found.error_ns <= (min(x[0] for x in took) + min(x[2] for x in took) + 1) // 2 + 1


@given(st.data())
def test_only_whole_steps_count(data: st.DataObject) -> None:
    """Layers of some steps are missing; rows arrive in pieces."""
    layers = data.draw(st.integers(1, 4))
    timeline, rows, want = Timeline(layers), [], []
    timeline.keep(100)
    for step in range(data.draw(st.integers(0, 6))):
        missing = data.draw(st.sets(st.integers(0, layers - 1))) if data.draw(st.booleans()) else set()
        found = [
            ROW._replace(
                sequence=1 + step * layers + i, layer=i, published=10 * i, wait_begin=10 * i + 1, wait_end=10 * i + 4
            )
            for i in range(layers)
            if i not in missing
        ]
        rows += found
        if not missing:
            want.append(tuple(found))
    while rows:
        count = data.draw(st.integers(1, len(rows)))
        timeline.add(rows[:count])
        rows = rows[count:]
    assert timeline.kept == want
    assert timeline.stats() == {
        "device_layers": len(want) * layers,
        "device_wait_ns": 3 * len(want) * layers,
        "device_step_ns": len(want) * (10 * layers - 6),
    }


def test_counters_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    import prometheus_client

    from fluxion_sglang.executor.metrics import EngineMetrics

    registry = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Gauge"):
        made = getattr(prometheus_client, kind)
        monkeypatch.setattr(prometheus_client, kind, lambda *a, made=made, **k: made(*a, registry=registry, **k))
    metrics = EngineMetrics(host_pool_tokens=1, host_pool_bytes=1, resident_tokens_per_request=1)
    timeline = Timeline(1)
    for i in range(3):
        timeline.add([ROW._replace(sequence=i + 1, published=10**9, wait_begin=2 * 10**9, wait_end=4 * 10**9)])
        metrics.update(timeline.stats())
    said = {
        name: registry.get_sample_value(f"fluxion_device_{name}_total")
        for name in ("layers", "wait_seconds", "step_seconds")
    }
    assert said == {"layers": 3.0, "wait_seconds": pytest.approx(6.0), "step_seconds": pytest.approx(9.0)}
