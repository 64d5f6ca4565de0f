"""The CUDA library against the simulated device: same sources and inputs, so the same numbers up to rounding.

Tests in test/unit compare the simulated device with float64 references.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch

from fluxion_sglang.device.chunks import chunk_pages
from fluxion_sglang.device.library import DeviceLibrary, load
from fluxion_sglang.device.mailbox import Mailbox, MailboxError, MailboxShape
from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.kv.placement import PAGE, Placement

pytestmark = pytest.mark.gpu
PLACEMENT = Placement(64, 256)
LENGTHS = [1, 63, 64, 65, 320, 321, 352, 5000]
DTYPES = [torch.float32, torch.bfloat16]


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    return torch.allclose(got.cpu().float(), want.cpu().float(), atol=limit, rtol=limit)


def settle(library: DeviceLibrary) -> None:
    """Wait for torch's stream; the library's streams do not."""
    library.stream_synchronize(0)


class Side:
    """A mailbox with its port and windows on one of the two devices."""

    def __init__(self, library: DeviceLibrary, group: int, dim: int, dtype: torch.dtype, timeout_s: float) -> None:
        self.library, self.dtype, kv_heads = library, dtype, 2
        self.stream = library.stream_create()
        self.mailbox = Mailbox(MailboxShape(len(LENGTHS), group * kv_heads, kv_heads, dim, dtype))
        library.host_register(self.mailbox.arena)
        self.port = library.port_create(
            self.mailbox.arena, max_requests=len(LENGTHS), q_heads=group * kv_heads, kv_heads=kv_heads, head_dim=dim,
            dtype=dtype, sinks=PLACEMENT.sinks, window=PLACEMENT.window, timeout_s=timeout_s,
        )  # fmt: skip
        torch.manual_seed(group * dim)
        where = {"device": library.device, "dtype": dtype}
        self.windows = torch.randn(kv_heads, len(LENGTHS) * PLACEMENT.slot_pages, 2, PAGE, dim).to(**where)
        self.q = torch.randn(len(LENGTHS), group * kv_heads, dim).to(**where)
        self.k, self.v = (torch.randn(len(LENGTHS), kv_heads, dim).to(**where) for _ in range(2))
        self.o = torch.full(self.q.shape, float("nan"), device=library.device)
        self.lse = torch.full(self.q.shape[:2], float("nan"), device=library.device)
        self.out = torch.full_like(self.q, float("nan"))
        self.given_o, self.given_lse = torch.randn(self.q.shape), torch.randn(self.q.shape[:2])
        self.given_lse[1] = float("-inf")
        settle(library)
        self.sequence, self._scale = 0, dim**-0.5

    def step(self, rows: list[int]) -> None:
        self.rows = rows
        lengths = torch.tensor([LENGTHS[row] for row in rows], dtype=torch.int32)
        self.library.port_step(self.port, self.stream, torch.tensor(rows, dtype=torch.int32), lengths)

    def launch(self) -> None:
        self.library.publish(self.port, self.stream, 3, self.q, self.k, self.v, self.windows)
        self.library.resident(self.port, self.stream, self.q, self.windows, self._scale, self.o, self.lse, True)
        self.library.take(self.port, self.stream, self.o, self.lse, False, self.out)

    def run(self, launch: Callable[[], None]) -> dict[str, torch.Tensor]:
        """Run a layer, and return all of its results."""
        self.sequence += 1
        seen: dict[str, torch.Tensor] = {}

        def answer() -> None:
            self.mailbox.wait_observed(self.sequence, 20)
            slot = self.mailbox.slot(self.sequence, len(self.rows))
            seen.update({name: getattr(slot, name).clone() for name in ("q", "k", "v", "parts", "layer")})
            slot.o.copy_(self.given_o[: len(self.rows)])
            slot.lse.copy_(self.given_lse[: len(self.rows)])
            self.mailbox.answer(self.sequence)

        thread = threading.Thread(target=answer)
        thread.start()
        launch()
        self.library.stream_synchronize(self.stream)
        thread.join()
        seen |= {name: getattr(self, name).clone() for name in ("o", "lse", "out", "windows")}
        return seen

    def close(self) -> None:
        self.library.stream_synchronize(self.stream)
        self.library.host_unregister(self.mailbox.arena)


@pytest.fixture
def sides(cuda: DeviceLibrary):
    made: list[Side] = []

    def make(group: int, dim: int, dtype: torch.dtype, timeout_s: float = 20.0) -> tuple[Side, Side]:
        made.extend(Side(library, group, dim, dtype, timeout_s) for library in (cuda, load("sim")))
        return made[-2], made[-1]

    yield make
    for side in made:
        side.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (4, 128), (7, 128), (8, 128), (16, 256), (3, 48)])
def test_a_layer_is_published_attended_and_taken(sides, group: int, dim: int, dtype: torch.dtype) -> None:
    real, simulated = sides(group, dim, dtype)
    for rows in ([*range(len(LENGTHS))], [5, 2, 0], []):  # rows behind a step's requests are padding
        found = []
        for side in (real, simulated):
            side.step(rows)
            found.append(side.run(side.launch))
        for name, got in found[0].items():
            want, count = found[1][name], len(rows) if name in ("q", "k", "v", "parts") else None
            assert close(got[:count], want[:count], dtype), (name, rows)


def test_a_graph_serves_steps_that_differ(sides) -> None:
    real, simulated = sides(4, 128, torch.bfloat16)
    real.step([0])
    real.library.graph_begin(real.stream)
    real.launch()
    graph = real.library.graph_end(real.stream)
    for rows in ([0], [7, 3], [*range(len(LENGTHS))], [4]):
        for side in (real, simulated):
            side.step(rows)
        got = real.run(lambda: real.library.graph_launch(graph, real.stream))
        want = simulated.run(simulated.launch)
        assert all(close(got[name], want[name], real.dtype) for name in ("o", "lse", "out", "windows"))


def test_nobody_waits_for_ever(sides) -> None:
    real, _ = sides(4, 128, torch.bfloat16, timeout_s=0.2)
    real.step([0, 1])
    real.launch()
    real.library.stream_synchronize(real.stream)
    assert real.mailbox.late and close(real.out, real.o, real.dtype)
    real.launch()  # publishes nothing, and waits for nothing
    with pytest.raises(MailboxError, match="waited too long"):
        real.mailbox.wait(2, 1.0)
    real.library.port_reset(real.port, real.stream)
    real.library.stream_synchronize(real.stream)
    real.step([2])
    assert not real.mailbox.late and real.run(real.launch)["layer"].item() == 3


def test_the_prefix_and_the_windows_come_from_the_host_pool(cuda: DeviceLibrary) -> None:
    heads, dim, pages, stop = 2, 64, 60, 700
    torch.manual_seed(3)
    tiles, fresh = torch.randn(heads, pages, 2, PAGE, dim).bfloat16(), torch.randn(2, 100, heads, dim).bfloat16()
    table = torch.randperm(pages)[: -(-stop // PAGE)].to(torch.int32)
    found = []
    for library in (cuda, load("sim")):
        where = library.device
        region = library.pinned_empty(tiles.nbytes).view(torch.bfloat16).view(tiles.shape).copy_(tiles)
        listed = table.to(where, copy=True)
        windows = torch.zeros(heads, 2 * PLACEMENT.slot_pages, 2, PAGE, dim, dtype=torch.bfloat16, device=where)
        k, v = (part.to(where, copy=True) for part in fresh)
        library.fill_window(
            0, region, windows, 1, stop - 100, stop, listed, k, v, PLACEMENT.sinks, PLACEMENT.window
        )  # fmt: skip
        prefix = [torch.zeros(len(table) * PAGE, heads, dim, dtype=torch.bfloat16, device=where) for _ in range(2)]
        library.gather(0, region, listed, *prefix)
        library.stream_synchronize(0)
        found.append([part.cpu() for part in (windows, *prefix)])
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_chunk_is_written_to_the_host_pool(cuda: DeviceLibrary, dtype: torch.dtype, dim: int) -> None:
    """Bit for bit, from the middle of a page over full pages to the middle of another."""
    heads, pages, start, stop = 3, 40, 21, 300
    torch.manual_seed(dim)
    tiles, table = torch.randn(heads, pages, 2, PAGE, dim).to(dtype), torch.randperm(pages).int()
    chunk = chunk_pages(ExtendRequest(1, start, stop, 5, table))
    fresh = torch.randn(5 + stop - start, 2 * heads, dim).to(dtype)
    found = []
    for library in (cuda, load("sim")):
        where = library.device

        def pinned(size: tuple[int, ...], dtype: torch.dtype, library: DeviceLibrary = library) -> torch.Tensor:
            count = math.prod(size) * dtype.itemsize
            return library.pinned_empty(count).fill_(255)[:count].view(dtype).view(size)

        region = pinned(tiles.shape, dtype).copy_(tiles)
        entries, moments = pinned((heads, pages, 2, dim), dtype), pinned((heads, pages, 2 * dim + 8), torch.float64)
        k, v = fresh.to(where, copy=True).split(heads, 1)
        library.write_pages(0, region, entries, moments, chunk.to(where, copy=True), k, v)
        library.stream_synchronize(0)
        found.append([part.clone().view(torch.uint8) for part in (region, entries, moments)])
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))


@pytest.mark.parametrize("base2", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_merged(cuda: DeviceLibrary, dtype: torch.dtype, last: bool, base2: bool) -> None:
    torch.manual_seed(5)
    o_a, o_b = torch.randn(70, 5, 128), torch.randn(70, 5, 128).to(dtype)
    lses = 5 * torch.randn(2, 70, 5)
    lses[0, 3], lses[1, 4], lses[:, 5] = float("-inf"), float("-inf"), float("-inf")
    o_a[3] = float("nan")
    found = []
    for library in (cuda, load("sim")):
        where = library.device
        o = torch.empty(70, 5, 128, dtype=dtype if last else torch.float32, device=where)
        lse_a, lse_b = (lse.to(where, copy=True) for lse in lses)
        library.merge(0, o_a.to(where), lse_a, o_b.to(where), lse_b, base2, o, lse_a)
        library.stream_synchronize(0)
        found.append((o, lse_a))
    assert close(found[0][0], found[1][0], o.dtype) and close(found[0][1], found[1][1], torch.float32)
