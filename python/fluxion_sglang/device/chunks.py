"""Writes prefilled chunks through to the host pool: the device writes pages, the host joins them to their paths.

The device computes everything that depends on a page alone. A kernel on a side stream writes the new tokens of all
requests of a pass to their tiles in the pinned pool. It also writes metadata and own moments of every page that they
fill. Coarse metadata and running sums depend on a page's path from the root. `HostPool.adopt` computes them in path
order, on a thread that waits for the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fluxion_sglang.device.library import DeviceLibrary
from fluxion_sglang.device.near import Near
from fluxion_sglang.device.offload import Offload
from fluxion_sglang.device.streams import Streams
from fluxion_sglang.executor.device import Appended
from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.kv.host_pool import HostPool
from fluxion_sglang.kv.placement import PAGE


def chunk_pages(request: ExtendRequest) -> torch.Tensor:
    """The pages of a request's new tokens, as the [n, 4] int32 rows of `DeviceLibrary.write_pages`."""
    logical = torch.arange(request.start // PAGE, -(-request.stop // PAGE))
    first = (request.start - PAGE * logical).clamp(min=0)
    stop = (request.stop - PAGE * logical).clamp(max=PAGE)
    token = request.offset + PAGE * logical + first - request.start
    return torch.stack([request.pages[logical], first, stop, token], 1).int()


class ChunkWriter:
    """Writes the chunks of extend passes to the host pool. Call `drain` before a read of the pool.

    Args:
        pool: pinned.
        device: holds k and v.
        near: also receives the chunks.
    """

    def __init__(
        self,
        library: DeviceLibrary,
        streams: Streams,
        pool: HostPool,
        device: torch.device,
        near: Near | None = None,
    ) -> None:
        self._library, self._pool, self._device, self._near = library, pool, device, near
        self._offload = Offload(streams)
        self._requests: list[tuple[int, ExtendRequest]] = []
        self._table = torch.empty(0, 4, dtype=torch.int32, device=device)
        self._appended: Appended | None = None

    def begin(self, requests: Sequence[ExtendRequest], appended: Appended) -> None:
        """Begin a pass, after the last one was drained. `appended` is called as `Device.begin_extend` says.

        Raises:
            ValueError: a page id or position out of range; nothing was written.
        """
        there = [(i, request) for i, request in enumerate(requests) if request.stop > request.start]
        for _, request in there:  # the device checks nothing before it writes
            self._pool.check(request.pages, request.start, request.stop - request.start)
        self._requests, self._appended = there, appended
        if there:
            self._table = torch.cat([chunk_pages(request) for _, request in there]).to(self._device)

    def write(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        """Write one layer of the pass; the caller may drop q [T, Hq, D], k and v [T, H, D] at once."""
        requests, table, pool, appended = self._requests, self._table, self._pool, self._appended
        assert appended is not None, "write() before begin()"
        if not requests:
            return

        def launch(stream: int) -> None:
            self._library.write_pages(
                stream, pool.tiles(layer), pool.page_metadata(layer), pool.page_moments(layer), table, k, v
            )
            if self._near is not None:
                self._near.write(stream, layer, table)

        def join(*queries: torch.Tensor) -> None:
            for (index, request), wanted in zip(requests, queries, strict=True):
                pool.adopt(layer, request.pages, request.start, request.stop - request.start)
                appended(layer, index, wanted, scale)

        self._offload.put(launch, (k, v, table), tuple(q[request.last_queries] for _, request in requests), join)

    def drain(self) -> None:
        """Wait until the host pool has everything. Raises the first failure."""
        self._offload.drain()

    def close(self) -> None:
        self._offload.close()
