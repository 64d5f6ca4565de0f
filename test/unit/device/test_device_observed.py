"""Features for policies and the recorder are the same on a device and on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_observed import Spy
from world import World

from fluxion_sglang.device.library import DeviceError, load
from fluxion_sglang.device.pinned import Pinned
from fluxion_sglang.device.step import StreamDevice
from fluxion_sglang.executor.device import Device
from fluxion_sglang.executor.host import HostDevice
from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.predictor.features import INDEX
from fluxion_sglang.training import recorder
from fluxion_sglang.training.recorder import Recorder

try:
    library = load("sim")
except DeviceError as error:
    pytest.skip(str(error), allow_module_level=True)

SAID = ["lse_sink", "lse_local", "o_sink_norm", "o_local_norm", "o_resident_max"]
"""Features that a device helps to compute."""

BOUND = 1e-5
"""Bound of the difference to the CPU's, relative to max(1, |value|)."""


class Twins:
    """Two worlds with the same passes: on the CPU, and on the simulated device."""

    def __init__(self, **options: Any) -> None:
        self.worlds = [World(**{"tokens": 16384, **options}) for _ in range(2)]
        cpu, world = self.worlds
        self.pinned = Pinned(library, world.pool.memory)
        self.device = StreamDevice(
            library, world.pool, world.windows, world.engine,
            q_heads=world.heads * world.group, scale=world.scale, max_requests=world.rows,
        )  # fmt: skip
        self.devices: list[Device] = [HostDevice(cpu.pool, cpu.windows, cpu.engine), self.device]
        self.lengths: dict[int, int] = {}

    def close(self) -> None:
        self.device.close()
        self.pinned.release()

    def share(self, row: int, other: int, pages: int) -> None:
        """Simulate a radix hit: `row` becomes a new request that shares a prefix with `other`."""
        for world in self.worlds:
            world.pages[row] = world.pages[other][:pages]
            world.engine.forget(row)
        self.lengths[row] = pages * PAGE

    def heal(self, row: int) -> None:
        """Simulate a row whose request came without a prefill."""
        for world, device in zip(self.worlds, self.devices, strict=True):
            for windows in world.windows.layers:
                windows[:, row * world.placement.slot_pages :][:, : world.placement.slot_pages] = torch.nan
            device.heal(row, self.lengths[row], world.page_list(row, self.lengths[row]))
            world.engine.forget(row)

    def draw(self, tokens: int) -> list[tuple[torch.Tensor, ...]]:
        """q, k, v of every layer, the same for both worlds."""
        world = self.worlds[0]
        heads = (world.heads * world.group, world.heads, world.heads)
        return [tuple(world.randn(tokens, h, world.dim) for h in heads) for _ in range(world.layers)]

    def extend(self, counts: dict[int, int], recorders: list[Recorder] | None = None, wishes: Any = None) -> None:
        drawn = self.draw(sum(counts.values()))
        for side, (world, device) in enumerate(zip(self.worlds, self.devices, strict=True)):
            requests, offset = [], 0
            for row, count in counts.items():
                start = self.lengths.get(row, 0)
                queries = 1 if wishes is None else count
                pages = world.page_list(row, start + count)
                requests.append(ExtendRequest(row, start, start + count, offset, pages, queries))
                offset += count

            def appended(layer: int, index: int, queries: torch.Tensor, scale: float, side: int = side) -> None:
                request = requests[index]  # noqa: B023 - called before `finish` returns
                self.worlds[side].engine.prefilled(layer, request.row, request.stop, queries)
                if recorders is not None:
                    recorders[side].prefilled(layer, request, wishes, queries, scale)

            device.begin_extend(requests, appended)
            for layer, (q, k, v) in enumerate(drawn):
                device.extend(layer, q, k, v, world.scale)
            device.finish()
        for row, count in counts.items():
            self.lengths[row] = self.lengths.get(row, 0) + count

    def decode(self, rows: list[int]) -> list[torch.Tensor]:
        """The features of every layer in each world, [layers, B, Hq, 41]."""
        drawn, seen = self.draw(len(rows)), []
        for row in rows:
            self.lengths[row] += 1
        lengths = [self.lengths[row] for row in rows]
        for world, device in zip(self.worlds, self.devices, strict=True):
            spy, table = Spy(), world.table(rows, lengths)
            device.begin_decode(torch.tensor(rows), torch.tensor(lengths), table, [spy] * len(rows))
            for layer, (q, k, v) in enumerate(drawn):
                device.decode(layer, q, k, v, world.scale)
            device.finish()
            seen.append(torch.stack(spy.seen))
        return seen

    def check(self, rows: list[int], steps: int) -> None:
        said = [INDEX[name] for name in SAID]
        others = [i for i in INDEX.values() if i not in said]
        for _ in range(steps):
            want, got = self.decode(rows)
            assert got.isfinite().all()
            assert torch.equal(got[..., others], want[..., others]), (
                "what the host pool and the queries say is the same"
            )
            torch.testing.assert_close(got[..., said], want[..., said], rtol=BOUND, atol=BOUND)


@pytest.fixture
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = Twins(**request.param)
    yield made
    made.close()


kinds = pytest.mark.parametrize(
    "twins", [{"seed": 1}, {"seed": 2, "dtype": torch.bfloat16, "group": 7}], indirect=True, ids=["float32", "bfloat16"]
)


@kinds
def test_features_are_the_cpus(twins: Twins) -> None:
    """After chunks, a radix hit, decoded tokens that leave the window, an appended turn, and without a prefill."""
    twins.extend({1: 700, 2: 60})
    twins.extend({1: 413, 3: 900})
    twins.check([1, 2, 3], 17)
    twins.share(4, 1, 900 // PAGE)
    twins.extend({4: 30})
    twins.check([4, 1], 3)
    twins.extend({1: 300})
    twins.check([3, 1], 3)
    twins.heal(3)
    twins.check([3, 4, 1, 2], 3)


@kinds
def test_samples_are_the_cpus(twins: Twins, tmp_path: Path) -> None:
    """Bit by bit: the device only provides a prefill's queries to a sample."""
    wishes = {"id": 5, "samples": [[350, [360, 500, 699]], [640, [700, 1000]]]}
    recorders = [Recorder(tmp_path / name, world.pool) for name, world in zip("ab", twins.worlds, strict=True)]
    for count in (400, 300, 305):
        twins.extend({1: count}, recorders, wishes)
    for layer in range(twins.worlds[0].layers):
        want, got = (recorder.read(one.folder, 5, layer) for one in recorders)
        assert got.step.tolist() == [360, 500, 699, 700, 1000]
        for name in recorder.Samples.__annotations__:
            assert np.array_equal(getattr(got, name), getattr(want, name)), name
