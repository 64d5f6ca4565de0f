"""Cost of a layer's hand-over between CPU and GPU, and bandwidth of the link between them.

    python benchmark/gpu_link.py                        # on a machine with a GPU; about a minute
    python benchmark/gpu_link.py --device sim --quick   # on the simulated device, to see that it runs

Round trips: publish, resident attention and take of a layer, whose middle the CPU answers at once as empty. They run in
a stream and in a CUDA graph; subtracting the resident attention alone gives the cost of the hand-over. Link: the kernel
that fetches prefixes gathers tiles from pinned memory into device memory. It is compared with the copy engine and with
a plain kernel that reads 128 MiB in order, the upper bound for kernels. All runs happen in one process; results are
medians of interleaved turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import common
import torch

from fluxion_sglang.device import library
from fluxion_sglang.device.mailbox import Mailbox, MailboxError, MailboxShape
from fluxion_sglang.device.pinned import Pinned
from fluxion_sglang.kv.placement import PAGE, Placement

LAYERS = 32
SHAPES = {"llama-3.1-8b": (32, 8, 128), "qwen2.5-7b": (28, 4, 128)}
"""Query heads, KV heads and head_dim by model."""
BATCHES = (1, 4, 16)
TILES = (16, 64, 256, 1024, 4096, 16384)
TURNS = 9
WHOLE = 16384
"""Tiles that a kernel reads in order: 128 MiB at D=128 and bfloat16."""


class Link:
    """Tiles in pinned memory, and the calls that move them."""

    def __init__(self, device: library.DeviceLibrary, tiles: int, head_dim: int) -> None:
        self.device = device
        self.stream = device.stream_create()
        self.tile_bytes = 2 * PAGE * head_dim * 2
        self.pool = device.pinned_empty(tiles * self.tile_bytes)
        self.pool.view(torch.bfloat16).normal_(generator=torch.Generator().manual_seed(0))
        self.tiles = self.pool.view(torch.bfloat16).view(1, tiles, 2, PAGE, head_dim)
        self.near = torch.zeros(tiles * self.tile_bytes, dtype=torch.uint8, device=device.device)
        order = torch.randperm(tiles, generator=torch.Generator().manual_seed(1)).to(torch.int32)
        self.order = device.pinned_empty(order.nbytes).view(torch.int32).copy_(order)

    def gather(self, count: int) -> Callable[[], None]:
        """Gather `count` scattered tiles into device memory."""
        k, v = self.near[: count * self.tile_bytes].view(torch.bfloat16).view(2, count * PAGE, 1, -1)
        return lambda: self.device.gather(self.stream, self.tiles, self.order[:count], k, v)

    def in_order(self, count: int) -> Callable[[], None]:
        """Copy the bytes of `count` tiles with a kernel that reads them in order."""
        size = count * self.tile_bytes
        return lambda: self.device.copy_in_order(self.stream, self.pool[:size], self.near[:size])

    def copy_engine(self, count: int) -> Callable[[], None]:
        """Copy the same number of bytes with the copy engine."""
        size = count * self.tile_bytes
        return lambda: (self.near[:size].copy_(self.pool[:size], non_blocking=True), None)[1]

    def wait(self) -> None:
        self.device.stream_synchronize(self.stream)
        self.device.stream_synchronize(0)


class RoundTrip:
    """Layers of a model's shape on a device, with empty middles."""

    def __init__(self, device: library.DeviceLibrary, shape: tuple[int, int, int], batch: int, layers: int) -> None:
        q_heads, kv_heads, dim = shape
        self.device, self.layers, self.batch = device, layers, batch
        self.stream, placement = device.stream_create(), Placement()
        self.mailbox = Mailbox(MailboxShape(batch, q_heads, kv_heads, dim, torch.bfloat16))
        self._pinned = Pinned(device, self.mailbox.arena)
        self.port = device.port_create(
            self.mailbox.arena, max_requests=batch, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim,
            dtype=torch.bfloat16, sinks=placement.sinks, window=placement.window, timeout_s=10.0,
        )  # fmt: skip
        where, kv = device.device, (batch, kv_heads, dim)
        self.q = torch.randn(batch, q_heads, dim, device=where).bfloat16()
        self.k, self.v = torch.randn(kv, device=where).bfloat16(), torch.randn(kv, device=where).bfloat16()
        size = (kv_heads, batch * placement.slot_pages, 2, PAGE, dim)
        self.windows = torch.zeros(size, dtype=torch.bfloat16, device=where)
        self.o = torch.empty(batch, q_heads, dim, device=where)
        self.lse = torch.empty(batch, q_heads, device=where)
        self.out = torch.empty_like(self.q)
        lengths = torch.full((batch,), 4096, dtype=torch.int32)
        device.port_step(self.port, self.stream, torch.arange(batch, dtype=torch.int32), lengths)
        device.stream_synchronize(self.stream)
        self._scale, self._answered = dim**-0.5, 0

    def resident(self) -> None:
        for _ in range(self.layers):
            self._resident()

    def layer(self) -> None:
        for layer in range(self.layers):
            self.device.publish(self.port, self.stream, layer, self.q, self.k, self.v, self.windows)
            self._resident()
            self.device.take(self.port, self.stream, self.o, self.lse, False, self.out)

    def _resident(self) -> None:
        self.device.resident(self.port, self.stream, self.q, self.windows, self._scale, self.o, self.lse, False)

    def graph(self, work: Callable[[], None]) -> Callable[[], None]:
        self.device.graph_begin(self.stream)
        work()
        graph = self.device.graph_end(self.stream)
        return lambda: self.device.graph_launch(graph, self.stream)

    def answering(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work`, while a Python thread answers as the layer server does, at the speed of the server."""

        def run() -> None:
            helper = threading.Thread(target=self._answer)
            helper.start()
            work()
            self.device.stream_synchronize(self.stream)
            helper.join()

        return run

    def _answer(self) -> None:
        for _ in range(self.layers):
            self._answered += 1
            try:
                self.mailbox.wait(self._answered, 10.0)
            except MailboxError:
                return
            self.mailbox.slot(self._answered, self.batch).lse.fill_(float("-inf"))
            self.mailbox.answer(self._answered)

    def wait(self) -> None:
        self.device.stream_synchronize(self.stream)

    def close(self) -> None:
        self.wait()
        self._pinned.release()


def timed(works: dict[str, Callable[[], None]], wait: Callable[[], None], turns: int) -> dict[str, float]:
    """Median microseconds of each work, taken in turns."""
    spent: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(turns + 1):
        for name, work in works.items():
            wait()
            start = time.perf_counter()
            work()
            wait()
            if turn:  # the first turn warms up
                spent[name].append((time.perf_counter() - start) * 1e6)
    return {name: median(values) for name, values in spent.items()}


def round_trips(device: library.DeviceLibrary, batches: list[int], layers: int, turns: int) -> list[dict[str, Any]]:
    rows = []
    for model, shape in SHAPES.items():
        for batch in batches:
            trip = RoundTrip(device, shape, batch, layers)
            for name, bare, whole in (
                ("stream", trip.resident, trip.layer),
                ("graph", trip.graph(trip.resident), trip.graph(trip.layer)),
            ):
                found = timed({"resident": bare, "layer": trip.answering(whole)}, trip.wait, turns)
                per = {key: round(value / layers, 2) for key, value in found.items()}
                rows.append(
                    {
                        "what": "round trip", "model": model, "batch": batch, "launched": name,
                        "resident_us": per["resident"], "layer_us": per["layer"],
                        "overhead_us": round(per["layer"] - per["resident"], 2),
                    }
                )  # fmt: skip
            trip.close()
    return rows


def link(device: library.DeviceLibrary, counts: list[int], whole: int, turns: int) -> list[dict[str, Any]]:
    """GB/s (10^9 bytes) of tiles across the link."""
    tiles = Link(device, whole, 128)
    rows = []
    for count in counts:
        works = {
            "copy_engine": tiles.copy_engine(count),
            "in_order": tiles.in_order(whole),
            "gather": tiles.gather(count),
        }
        took = timed(works, tiles.wait, turns)
        size = {name: (whole if name == "in_order" else count) * tiles.tile_bytes for name in works}
        rates = {name: round(size[name] / took[name] / 1e3, 2) for name in works}
        rows.append(
            {
                "what": "link", "tiles": count, **{f"{name}_us": round(took[name], 1) for name in works},
                **{f"{name}_gb_per_s": rate for name, rate in rates.items()},
                "gather_of_in_order": round(rates["gather"] / rates["in_order"], 3),
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = common.arguments(__doc__, "small sizes")
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.set_defaults(machine=None)
    args = parser.parse_args()
    try:
        device = library.load(args.device)
        about = device.info()
    except library.DeviceError as error:
        raise SystemExit(f"error: {error}") from None
    args.machine = args.machine or common.folder_name(about["name"])
    layers, turns = (2, 1) if args.quick else (LAYERS, TURNS)
    batches, counts, whole = ([1, 2], [4, 8], 8) if args.quick else ([*BATCHES], [*TILES], WHOLE)
    rows = common.told(round_trips(device, batches, layers, turns) + link(device, counts, whole, turns))
    common.publish(args, "gpu_link", rows, device=about, layers=layers, turns=turns)


if __name__ == "__main__":
    main()
