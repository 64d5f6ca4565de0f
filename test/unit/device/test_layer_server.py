"""Decode steps whose residents belong to a device: results, and failures."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
import torch
from places import python
from python_device import DeviceWorld, GaveUp
from world import World, counts

from fluxion_sglang.policy import LayerPlan, Observed, Policy, parse_spec
from fluxion_sglang.policy.base import UNSEEN, DecodeStep, Needs

SPECS = ["full", "fixed:32:0.1", "anchor", "psa", "lfps:0.1"]
SPECS += [pytest.param(spec, marks=pytest.mark.full) for spec in ("streaming", "labels", "oracle:0.05", "hgca")]


def with_requests(**options: Any) -> World:
    world = World(seed=5, **options)
    world.extend(1, 1200)
    world.extend(2, 700)
    world.extend(3, 40)  # no middle, and no window apart from the sinks
    return world


@pytest.mark.parametrize("spec", SPECS)
def test_every_policy_decides_as_it_does_where_the_windows_are_the_cpus(spec: str) -> None:
    cpu, other = (with_requests(policy=spec) for _ in range(2))
    with DeviceWorld(other) as device:
        for _ in range(17):  # over the end of a page
            for (want, exact), (got, _) in zip(cpu.decode([1, 2, 3]), device.decode([1, 2, 3]), strict=True):
                torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
                if spec == "full":
                    torch.testing.assert_close(got.double(), exact, atol=2e-5, rtol=1e-4)
    assert counts(cpu) == counts(other)
    # The next steps find the same host pool, bit by bit.
    for layer in range(cpu.layers):
        for name in ("tiles", "meta0", "meta1", "meta2", "meta3", "moments"):
            mine, yours = (world.pool.tensor(name, layer) for world in (cpu, other))
            assert torch.equal(mine.nan_to_num(), yours.nan_to_num()), name


def test_requests_with_policies_of_their_own() -> None:
    cpu, other = with_requests(), with_requests()
    specs = ["psa:0.9", "fixed:16:0.05", "hgca"]
    with DeviceWorld(other) as device:
        ours, theirs = ([parse_spec(spec) for spec in specs] for _ in range(2))
        for _ in range(3):
            for (want, _), (got, _) in zip(cpu.decode([1, 2, 3], ours), device.decode([1, 2, 3], theirs), strict=True):
                torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    assert counts(cpu) == counts(other)


def test_half_precision_and_a_foreign_executor() -> None:
    world = with_requests(dtype=torch.bfloat16, executors="cpu+torch", workers=1)
    with DeviceWorld(world) as device:
        for _ in range(3):
            for got, exact in device.decode([2, 1]):
                torch.testing.assert_close(got.double(), exact, atol=2e-2, rtol=2e-2)


def answers(workers: int, rows: list[int], spec: str) -> dict[int, torch.Tensor]:
    """The CPU's results for the middles of each row, bit by bit: [layers, Hq, D + 1]."""
    world = with_requests(policy=spec, workers=workers)
    # A row's random data must not depend on other rows.
    draws = {row: torch.Generator().manual_seed(row) for row in rows}

    def randn(*size: int) -> torch.Tensor:
        return torch.stack([torch.randn(*size[1:], generator=draws[row]) for row in rows])

    world.randn = randn  # type: ignore[method-assign]
    said: dict[int, list[torch.Tensor]] = {row: [] for row in rows}
    with DeviceWorld(world) as device:
        for _ in range(2):
            device.begin(rows)
            for layer in range(world.layers):
                device.layer(layer)
                slot = device.mailbox.slot(device.device.sequence, len(rows))
                for b, row in enumerate(rows):
                    read = (slot.lse[b] != -math.inf).unsqueeze(-1)
                    o = torch.where(read, slot.o[b], 0.0)
                    said[row].append(torch.cat([o, slot.lse[b].unsqueeze(-1)], dim=-1))
            device.server.finish()
    return {row: torch.stack(layers) for row, layers in said.items()}


@pytest.mark.parametrize("spec", ["full", "fixed:16:0.1", "psa"])
def test_an_answer_depends_on_its_request_alone(spec: str) -> None:
    alone = {row: answers(1, [row], spec)[row] for row in (1, 2)}
    for workers in (1, 3):
        for rows in ([1, 2], [2, 3, 1]):
            together = answers(workers, rows, spec)
            assert all(torch.equal(alone[row], together[row]) for row in (1, 2)), (workers, rows)


def test_a_step_without_requests_is_answered() -> None:
    with DeviceWorld(with_requests()) as device:
        for rows in ([], [1], [], [2, 1]):
            for got, exact in device.decode(rows):
                torch.testing.assert_close(got.double(), exact, atol=2e-5, rtol=1e-4)


class Faulty(Policy):
    """Reads everything, but raises in the named calls."""

    needs = Needs.RESIDENTS

    def __init__(self, *faults: str) -> None:
        self.faults, self.full = faults, parse_spec("full")

    def _fault(self, call: str) -> None:
        if call in self.faults:
            raise RuntimeError(f"{call} went wrong")

    def begin_step(self, step: DecodeStep) -> None:
        self._fault("begin_step")
        self.full.begin_step(step)

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        self._fault(f"plan {layer}")
        return self.full.plan(layer, q)

    def decoded(self, layer: int, q: torch.Tensor, out: torch.Tensor | None) -> None:
        assert out is None
        self._fault(f"decoded {layer}")


@pytest.mark.parametrize("fault", ["begin_step", "plan 0", "plan 1", "decoded 0", "decoded 1"])
def test_a_failure_fails_its_step_and_no_other(fault: str) -> None:
    world = with_requests()
    with DeviceWorld(world) as device:
        device.decode([1, 2])
        device.begin([1, 2], [Faulty(fault), world.engine.policy])
        answered = [device.layer(layer) for layer in range(world.layers)]
        assert len(answered) == world.layers  # the device finished
        with pytest.raises(RuntimeError, match=f"^{fault} went wrong$"):
            device.server.finish()
        assert not device.server.lost
        device.server.finish()  # a failure is reported once
        for got, exact in device.decode([1, 2]):
            torch.testing.assert_close(got.double(), exact, atol=2e-5, rtol=1e-4)


def test_a_failure_fails_the_steps_behind_it() -> None:
    world = with_requests()
    with DeviceWorld(world) as device:
        device.begin([1], [Faulty("plan 0")])
        device.begin([1])
        for layer in [0, 1, 0, 1]:
            device.layer(layer)
        with pytest.raises(RuntimeError, match="plan 0 went wrong"):
            device.server.finish()
        assert world.engine.stats()["layers"] == 0


def test_a_layer_out_of_order_and_a_page_that_cannot_be() -> None:
    world = with_requests()
    with DeviceWorld(world) as device:
        device.begin([1])
        device.layer(1)
        device.layer(0)
        with pytest.raises(RuntimeError, match=r"^The device published layer 1 where layer 0 comes next\.$"):
            device.server.finish()
        device.device.step([1], [world.length(1) + 1])
        device.server.begin(torch.tensor([1]), torch.tensor([900]), torch.zeros(1, 2, dtype=torch.int32), world.scale)
        device.layer(0), device.layer(1)
        with pytest.raises(RuntimeError, match="Layer 0: Request 0 cannot be computed: it has 900 tokens"):
            device.server.finish()


def test_more_requests_than_there_is_room_for() -> None:
    rows = torch.arange(5)
    with DeviceWorld(with_requests()) as device, pytest.raises(ValueError, match="5 requests and the mailbox room for"):
        device.server.begin(rows, rows, torch.zeros(5, 1, dtype=torch.int32), 1.0)


class Slow(Policy):
    """Plans when told to."""

    def __init__(self) -> None:
        self.full, self.asked, self.go = parse_spec("full"), threading.Event(), threading.Event()

    def begin_step(self, step: DecodeStep) -> None:
        self.full.begin_step(step)

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        self.asked.set()
        assert self.go.wait(20)
        return self.full.plan(layer, q)


def heal_and_decode(device: DeviceWorld) -> None:
    """After the failure: a reset, then a normal step."""
    world = device.world
    assert device.server.lost
    with pytest.raises(RuntimeError):
        device.begin([2])
        device.server.finish()  # until the reset every step fails
    device.server.reset()
    device.device.sequence = 0
    device.device.timeout_s = device.server.timeout_s = 20.0
    world.pages.pop(4, None)
    world.extend(4, 500)
    for got, exact in device.decode([2, 4]):
        torch.testing.assert_close(got.double(), exact, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("published", [0, 1])
def test_a_device_that_publishes_nothing(published: int) -> None:
    with DeviceWorld(with_requests(), timeout_s=0.1) as device:
        device.begin([1])
        for layer in range(published):
            device.layer(layer)
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"^The device did not publish a layer within 0\.1 s"):
            device.server.finish()
        assert time.monotonic() - start < 10
        with pytest.raises(GaveUp):  # it comes too late, and must not wait
            device.layer(published)
        heal_and_decode(device)


def test_a_device_that_never_says_its_parts() -> None:
    world = with_requests(policy="psa")
    with DeviceWorld(world, timeout_s=0.1) as device:
        device.begin([1])
        device.device.timeout_s = 20.0
        q = world.randn(1, world.heads * world.group, world.dim)
        k, v = (world.randn(1, world.heads, world.dim) for _ in range(2))
        device.device.publish(0, q, k, v)
        o, lse = device.device.resident(0, q, observe=False)
        with pytest.raises(GaveUp):
            device.device.take(o, lse)
        with pytest.raises(RuntimeError, match=r"^The device did not attend to what is resident within 0\.1 s"):
            device.server.finish()
        world.engine.policy = parse_spec("full")
        heal_and_decode(device)


@pytest.mark.parametrize("where", ["nothing published", "in a plan", "idle"])
def test_abort(where: str) -> None:
    world = with_requests()
    with DeviceWorld(world) as device:
        slow = Slow()
        if where != "idle":
            device.begin([1], [slow])
            device.begin([1])
        if where == "in a plan":

            def run() -> None:
                with pytest.raises(GaveUp):
                    device.layer(0)

            thread = threading.Thread(target=run)
            thread.start()
            assert slow.asked.wait(20)
            threading.Timer(0.05, slow.go.set).start()
            device.server.abort()
            thread.join()
        else:
            device.server.abort()
        with pytest.raises(RuntimeError, match=r"^The step was aborted\.$"):
            device.server.finish()
        heal_and_decode(device)


def test_reset_refuses_while_a_step_is_served() -> None:
    with DeviceWorld(with_requests()) as device:
        device.begin([1])
        with pytest.raises(RuntimeError, match="still serves a step"):
            device.server.reset()
        device.server.abort()


def test_closing_takes_no_more_steps_and_ends_what_runs() -> None:
    device = DeviceWorld(with_requests())
    device.begin([1])
    device.server.close()
    device.server.close()
    assert not device.server._thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        device.begin([1])


@pytest.mark.parametrize("steps", [pytest.param(0, marks=pytest.mark.full), 1])
def test_the_interpreter_ends_with_a_server_at_work(steps: int) -> None:
    code = (
        "from world import World; from python_device import DeviceWorld\n"
        "world = World(); world.extend(1, 100); device = DeviceWorld(world, 600)\n"
        f"[device.begin([1]) for _ in range({steps})]\n"
        "import time; time.sleep(0.2); print('end')"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "end", "")
