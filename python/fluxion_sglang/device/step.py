"""A GPU as the device: passes are work on its stream, and a thread serves the CPU's half of every decode layer.

The launching thread does not wait for the device within a pass. A decode layer is three steps on the stream
(csrc/device/layout.h): `publish` sends the queries to the CPU, resident attention runs concurrently, and `take` waits
on the device for the middle's result and merges it. Prefill chunks reach the host pool through `chunks.py`. `finish`
ends the pass: then the host has all its results, or the pass has failed and the mailbox is reset.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Sequence
from contextlib import suppress

import torch

from fluxion_sglang.device import flashinfer
from fluxion_sglang.device.chunks import ChunkWriter
from fluxion_sglang.device.extend import ExtendAttention
from fluxion_sglang.device.library import DeviceLibrary
from fluxion_sglang.device.mailbox import Mailbox, MailboxShape
from fluxion_sglang.device.near import Near
from fluxion_sglang.device.pinned import Pinned
from fluxion_sglang.device.server import LayerServer
from fluxion_sglang.device.streams import streams
from fluxion_sglang.device.timeline import Timeline
from fluxion_sglang.executor.decode import DecodeEngine
from fluxion_sglang.executor.device import Appended, Device
from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.executor.variant import PLAIN, Variant
from fluxion_sglang.kv.host_pool import GIB, HostPool
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.kv.windows import Windows
from fluxion_sglang.policy.base import Policy

logger = logging.getLogger(__name__)


class StreamDevice(Device):
    """Windows are in device memory. The device attends to them, and the CPU concurrently to the middle.

    The mailbox is pinned until `close`.

    Args:
        pool: pinned (`Pinned`).
        scale: multiplies q.k, in every layer.
        max_requests: of a step, padding of graphs included.
        graphs: decode steps may be captured and replayed, between `begin_dummy` and the next step or after it.
        max_tokens: of a request.
        copies_gb: GiB for copies of tiles; the device ranks blocks. 0: the CPU ranks them.

    Raises:
        DeviceError: the memory cannot be pinned, or the device has none left.
    """

    def __init__(
        self,
        library: DeviceLibrary,
        pool: HostPool,
        windows: Windows,
        engine: DecodeEngine,
        *,
        q_heads: int,
        scale: float,
        max_requests: int,
        graphs: bool = False,
        max_tokens: int = 0,
        copies_gb: float = 0.0,
    ) -> None:
        self._library, self._pool, self._windows, self._engine = library, pool, windows, engine
        self._device = windows.layers[0].device
        self._streams = streams(library, self._device)
        shape, placement = pool.shape, pool.placement
        self._scale = scale
        self._mailbox = Mailbox(MailboxShape(max_requests, q_heads, shape.kv_heads, shape.head_dim, shape.dtype))
        self._server = LayerServer(engine, self._mailbox)
        self._pinned: Pinned | None = Pinned(library, self._mailbox.arena)
        self._port = library.port_create(
            self._mailbox.arena,
            max_requests=max_requests,
            q_heads=q_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            sinks=placement.sinks,
            window=placement.window,
            # The device times out after the engine, so that the engine can report a late task first.
            timeout_s=1.25 * self._server.timeout_s,
        )
        self._near = self._near_middle(max_tokens, copies_gb) if copies_gb > 0 else None
        self._writer = ChunkWriter(library, self._streams, pool, self._device, self._near)
        flash = flashinfer.serves(library.backend, shape.dtype, shape.head_dim)
        if not flash and library.backend == "cuda":
            logger.warning(
                "Fluxion: FlashInfer has no kernels for %s with heads of %d; prompts are attended to by PyTorch's "
                "products, which are slow",
                shape.dtype,
                shape.head_dim,
            )
        self._attention = ExtendAttention(
            library, self._streams, pool, self._device, q_heads=q_heads, scale=scale, flash=flash
        )
        # A graph must not contain a FlashInfer plan, which is valid for one step. Fluxion's kernel reads the step from
        # the port. The near middle is also merged into that kernel's result.
        self._residents: flashinfer.Residents | None = None
        if flash and not graphs and self._near is None:
            self._residents = flashinfer.Residents(
                placement,
                windows.rows,
                q_heads=q_heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                dtype=shape.dtype,
                scale=scale,
                device=self._device,
            )
        self._graphs = graphs
        if self._attention.chunks is not None:
            layer = windows.layers[0]
            flashinfer.warm_up(self._attention.chunks, self._residents, layer, scale, self._streams.settle)
        # Results of the current layer; allocated once, because a replayed graph writes to the same memory.
        self._o = torch.empty(max_requests, q_heads, shape.head_dim, device=self._device)
        self._lse = torch.empty(max_requests, q_heads, device=self._device)
        self._no_tokens = torch.empty(0, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=self._device)
        self._parts = graphs  # whether policies need the parts of the residents
        self._ranks = graphs  # whether the device selects near tiles
        self._decoding = False
        self._muted = False
        self._requests: Sequence[ExtendRequest] = ()
        self._pages: list[torch.Tensor] = []
        atexit.register(self.close)  # registered after the pinned memory, so it runs first

    def _near_middle(self, max_tokens: int, copies_gb: float) -> Near:
        pages = -(-max_tokens // PAGE)
        near = Near(
            self._library,
            self._pool,
            self._mailbox.shape,
            self._port,
            max_pages=pages,
            copies_gb=copies_gb,
            union=self._engine.union,
        )
        logger.info("Fluxion: the device ranks blocks, with %.2f GiB for metadata, copies and lists", near.nbytes / GIB)
        return near

    @property
    def description(self) -> str:  # type: ignore[override]
        info = self._library.info()
        kernel = "FlashInfer" if self._residents is not None else "a kernel of Fluxion"
        return f"{info['name']} ({info['backend']}); {kernel} attends to what is resident"

    def heal(self, row: int, n: int, pages: torch.Tensor) -> None:
        there = pages.to(self._device, copy=True)  # an aligned copy of a table row
        for layer in range(self._pool.shape.layers):
            self._fill(layer, row, n, n, there, self._no_tokens, self._no_tokens)

    def _fill(
        self, layer: int, row: int, start: int, stop: int, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        placement = self._pool.placement
        self._library.fill_window(
            self._streams.main,
            self._pool.tiles(layer),
            self._windows.layers[layer],
            row,
            start,
            stop,
            pages,
            k,
            v,
            placement.sinks,
            placement.window,
        )

    # --- decode ---

    def begin_decode(
        self, rows: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor, policies: Sequence[Policy] | None
    ) -> None:
        self._unmute()
        self._library.port_step(self._port, self._streams.main, rows.int(), lengths.int())
        self._decoding = True
        # A graph serves steps of all policies, so it always computes the parts.
        self._parts = self._graphs or self._engine.looks(policies)
        far = None
        if self._near is not None:
            everyone = policies or [self._engine.policy] * rows.numel()
            far = self._near.step(self._streams.main, lengths, pages, everyone)
            self._ranks = self._graphs or far is not None  # a graph serves steps of all policies
        self._server.begin(rows, lengths, pages, self._scale, policies, far)
        if self._residents is not None:
            self._residents.plan(rows, lengths, divided=self._parts)

    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, variant: Variant = PLAIN
    ) -> torch.Tensor:
        assert variant is PLAIN, "models with other attention are refused beside a device"
        library, stream, windows = self._library, self._streams.main, self._windows.layers[layer]
        q = q.contiguous()
        out = torch.empty_like(q)
        if self._near is not None and self._ranks:
            self._near.rank(stream, layer, q)
        library.publish(self._port, stream, layer, q, k, v, windows)
        residents = None if self._muted else self._residents  # muted steps have no plan
        if residents is not None and not self._parts:
            o, lse = residents.run(q, windows, scale)
            library.take(self._port, stream, o, lse, True, out)
            return out
        o, lse = self._o[: len(q)], self._lse[: len(q)]
        if residents is not None:
            (o_sink, o_local), (lse_sink, lse_local) = residents.run_divided(q, windows, scale)
            library.observe(self._port, stream, o_sink, lse_sink, o_local, lse_local, True, o, lse)
        else:
            library.resident(self._port, stream, q, windows, scale, o, lse, self._parts)
        if self._near is not None:
            if self._ranks:
                self._near.attend(stream, scale, o, lse)
            self._near.keep(stream, layer, windows)
        library.take(self._port, stream, o, lse, False, out)
        return out

    def begin_dummy(self) -> None:
        self.finish()
        # Cancel the mailbox, so that dummy layers neither publish nor wait, in a run or a recording.
        if not self._muted:
            self._mailbox.cancel()
            self._muted = True
        none = torch.empty(0, dtype=torch.int32)
        self._library.port_step(self._port, self._streams.main, none, none)

    def _unmute(self) -> None:
        if self._muted:
            self._reset()

    # --- extend ---

    def begin_extend(self, requests: Sequence[ExtendRequest], appended: Appended | None) -> None:
        assert appended is not None, "drafts are refused beside a device"
        self._unmute()
        self._requests = requests
        self._pages = [request.pages.to(self._device, copy=True) for request in requests]
        self._writer.begin(requests, appended)
        self._attention.begin(requests, self._pages)

    def extend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, variant: Variant = PLAIN
    ) -> torch.Tensor:
        assert variant is PLAIN, "models with other attention are refused beside a device"
        self._writer.write(layer, q, k, v, scale)
        out = self._attention.run(layer, q, k, v)
        for request, pages in zip(self._requests, self._pages, strict=True):
            tokens = request.tokens
            self._fill(layer, request.row, request.start, request.stop, pages, k[tokens], v[tokens])
        return out

    # --- the end of a pass ---

    def stats(self) -> dict[str, int]:
        return self.timeline.stats() | (self._near.stats() if self._near is not None else {})

    @property
    def timeline(self) -> Timeline:
        """The device's waiting times; includes the newest step when the next one begins, or after `settle`."""
        return self._server.timeline

    @property
    def layers(self) -> int:
        return self._pool.shape.layers

    def settle(self) -> None:
        """Wait for the device and complete `timeline` with the newest step. Call it between passes."""
        self._streams.settle()
        self._server.settled()

    def finish(self) -> None:
        try:
            self._writer.drain()
            if self._decoding:
                self._decoding = False
                self._server.finish()
        except BaseException:
            with suppress(Exception):  # report the first failure
                self.abort()
            raise

    def abort(self) -> None:
        self._decoding = False
        self._mailbox.cancel()  # before the wait for the device, which may wait for an answer
        self._server.abort()
        with suppress(Exception):  # the pass has failed already
            self._writer.drain()
        self._reset()
        if self._near is not None:
            self._near.renew(self._streams.main)
            self._streams.settle()

    def _reset(self) -> None:
        self._streams.settle()
        self._server.reset()
        self._library.port_reset(self._port, self._streams.main)
        self._streams.settle()
        self._muted = False

    def close(self) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is None:
            return
        atexit.unregister(self.close)
        self._mailbox.cancel()
        self._server.close()
        self._writer.close()
        self._streams.settle()
        pinned.release()
