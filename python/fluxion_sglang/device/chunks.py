"""Write-through of prefilled chunks to the host pool: the device writes, the host joins.

Everything that follows from a page alone is the device's: a kernel on a stream beside the model's writes the new tokens
of all requests of a pass to their tiles in the pinned pool, and of every page that they fill its metadata and its own
moments. What depends on a page's path from the root, coarse metadata and running sums, is `HostPool.adopt`'s, in the
order of the path, by a thread that waits for the kernel.
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
    """The pages that a request's new tokens lie in, as `DeviceLibrary.write_pages` wants them: [n, 4] int32."""
    logical = torch.arange(request.start // PAGE, -(-request.stop // PAGE))
    first = (request.start - PAGE * logical).clamp(min=0)
    stop = (request.stop - PAGE * logical).clamp(max=PAGE)
    token = request.offset + PAGE * logical + first - request.start
    return torch.stack([request.pages[logical], first, stop, token], 1).int()


class ChunkWriter:
    """Writes the chunks of extend passes to the host pool; whoever reads it drains first.

    Args:
        pool: pinned.
        device: where k and v are.
        near: also gets what is written.
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
        """A pass, after the last one was drained. `appended` is called as `Device.begin_extend` says.

        Raises:
            ValueError: a page id or position out of range; nothing was written.
        """
        there = [(i, request) for i, request in enumerate(requests) if request.stop > request.start]
        for _, request in there:  # the device looks at nothing before it writes
            self._pool.check(request.pages, request.start, request.stop - request.start)
        self._requests, self._appended = there, appended
        if there:
            self._table = torch.cat([chunk_pages(request) for _, request in there]).to(self._device)

    def write(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        """One layer of the pass; q [T, Hq, D], k and v [T, H, D] may be dropped at once."""
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
