"""The layer server beside the device library's simulated device: real kernels and launches, in threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from test_layer_server import SPECS, Slow, with_requests
from world import World, counts

from fluxion_sglang.device.library import DeviceError, DeviceLibrary, load
from fluxion_sglang.device.mailbox import Mailbox, MailboxShape
from fluxion_sglang.device.server import LayerServer
from fluxion_sglang.policy import Policy, parse_spec
from fluxion_sglang.scoring.audit_file import read

try:
    library = load("sim")
except DeviceError as error:
    pytest.skip(str(error), allow_module_level=True)


class SimulatedDevice:
    """A world whose decode steps run on a stream of the simulated device; the caller does not wait for layers."""

    def __init__(self, world: World, library: DeviceLibrary, timeout_s: float) -> None:
        self.world, self.library = world, library
        heads = (world.heads * world.group, world.heads)
        self.mailbox = Mailbox(MailboxShape(4, *heads, world.dim, world.dtype))
        self.server = LayerServer(world.engine, self.mailbox, 20.0)
        self.stream = library.stream_create()
        library.host_register(self.mailbox.arena)
        self.port = library.port_create(
            self.mailbox.arena, max_requests=4, q_heads=heads[0], kv_heads=heads[1], head_dim=world.dim,
            dtype=world.dtype, sinks=world.placement.sinks, window=world.placement.window, timeout_s=timeout_s,
        )  # fmt: skip

    def close(self) -> None:
        self.server.close()
        self.library.stream_synchronize(self.stream)
        self.library.host_unregister(self.mailbox.arena)
        self.library.stream_destroy(self.stream)

    def launch(self, rows: list[int], policies: list[Policy] | None = None) -> list[tuple[torch.Tensor, ...]]:
        """Launch a whole step; per layer (future output, exact attention), [B, Hq, D] each."""
        world, library = self.world, self.library
        lengths = torch.tensor([world.length(row) + 1 for row in rows], dtype=torch.int32)
        table = world.table(rows, lengths.tolist())
        library.port_step(self.port, self.stream, torch.tensor(rows, dtype=torch.int32), lengths)
        looks = world.engine.looks(policies)
        self.server.begin(torch.tensor(rows), lengths, table, world.scale, policies)
        results: list[tuple[torch.Tensor, ...]] = []
        for layer in range(world.layers):
            q = world.randn(len(rows), world.heads * world.group, world.dim)
            k, v = (world.randn(len(rows), world.heads, world.dim) for _ in range(2))
            o, lse, out = torch.empty(q.shape), torch.empty(q.shape[:2]), torch.full_like(q, torch.nan)
            windows = world.windows.layers[layer]
            library.publish(self.port, self.stream, layer, q, k, v, windows)
            library.resident(self.port, self.stream, q, windows, world.scale, o, lse, looks)
            library.take(self.port, self.stream, o, lse, False, out)
            want = world.take(rows, layer, q, k, v)
            results.append((out, want, q, k, v, o, lse))  # the stream reads them, so keep them alive
        return results

    def decode(self, rows: list[int], policies: list[Policy] | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        results = self.launch(rows, policies)
        try:
            self.server.finish()
        finally:
            self.library.stream_synchronize(self.stream)  # until then the stream reads the inputs
        return [(out, want) for out, want, *_ in results]


@contextmanager
def device(world: World, timeout_s: float = 20.0) -> Iterator[SimulatedDevice]:
    simulated = SimulatedDevice(world, library, timeout_s)
    try:
        yield simulated
    finally:
        simulated.close()


@pytest.mark.parametrize(
    "spec", ["full", "fixed:32:0.1", "anchor", *[pytest.param(spec, marks=pytest.mark.full) for spec in SPECS]]
)
def test_an_audit_finds_what_it_finds_on_the_cpu(spec: str, tmp_path: Path) -> None:
    logs = [tmp_path / "cpu.npy", tmp_path / "device.npy"]
    cpu, other = (with_requests(policy=spec, audit=log) for log in logs)
    plain = with_requests(policy=spec)
    with device(other) as simulated, device(plain) as unaudited:
        for _ in range(18):
            cpu.decode([1, 2, 3])
            for (got, _), (want, _) in zip(simulated.decode([1, 2, 3]), unaudited.decode([1, 2, 3]), strict=True):
                assert torch.equal(got, want), "an audit changes nothing"
    want, got = (np.concatenate(read(log)[0]) for log in logs)
    for name in want.dtype.names or ():
        if name != "error":
            assert (got[name] == want[name]).all(), name
    assert np.abs(got["error"] - want["error"]).max() < 1e-5
    assert (got["error"] == 0).all() if spec == "full" else got["error"].max() > 1e-3
    assert counts(cpu) == counts(other) == counts(plain)
    for layer in range(cpu.layers):
        for name in ("tiles", "meta0", "meta3", "moments"):
            assert torch.equal(*(world.pool.tensor(name, layer).nan_to_num() for world in (other, plain))), name


def test_an_audit_of_half_precision(tmp_path: Path) -> None:
    """Its exact attention to the residents uses the device's inputs, and float32 up to the error."""
    logs = [tmp_path / "cpu.npy", tmp_path / "device.npy"]
    cpu, other = (with_requests(policy="fixed:16:0.05", dtype=torch.bfloat16, audit=log) for log in logs)
    with device(other) as simulated:
        for _ in range(3):
            cpu.decode([2, 1, 3])
            simulated.decode([2, 1, 3])
    want, got = (np.concatenate(read(log)[0]) for log in logs)
    assert np.abs(got["error"] - want["error"]).max() < 1e-5 < got["error"].max()


def test_steps_are_launched_ahead_of_one_another() -> None:
    with device(with_requests(policy="psa:1")) as simulated:
        steps = [simulated.launch(rows) for rows in ([1, 2], [2], [3, 1, 2])]
        simulated.server.finish()
        library.stream_synchronize(simulated.stream)
        for got, want, *_ in (layer for step in steps for layer in step):
            torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)


def test_a_time_out_silences_the_device_until_both_sides_are_reset() -> None:
    world, slow = with_requests(), Slow()
    # Long enough for the last pass on a busy machine.
    with device(world, timeout_s=2) as simulated:
        launched = simulated.launch([1], [slow])
        library.stream_synchronize(simulated.stream)  # the device finished without the CPU
        assert simulated.mailbox.late
        slow.go.set()
        with pytest.raises(RuntimeError, match="The device waited too long for the CPU's part of a layer"):
            simulated.server.finish()
        del launched
        simulated.server.reset()
        library.port_reset(simulated.port, simulated.stream)
        library.stream_synchronize(simulated.stream)
        for got, want in simulated.decode([2], [parse_spec("full")]):
            torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)


def test_an_abort_ends_what_is_launched() -> None:
    world, slow = with_requests(), Slow()
    with device(world) as simulated:
        launched = simulated.launch([1], [slow])
        assert slow.asked.wait(20)
        simulated.mailbox.cancel()
        slow.go.set()
        simulated.server.abort()
        library.stream_synchronize(simulated.stream)
        with pytest.raises(RuntimeError, match=r"^The (step was|device waited)"):
            simulated.server.finish()
        del launched
