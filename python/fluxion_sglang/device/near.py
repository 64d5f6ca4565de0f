"""The near middle: the device selects blocks and attends to those tiles that it has copies of (csrc/cuda/near.h).

The device holds the metadata of the whole pool and copies of some tiles. In a decode layer it scores the blocks of
every request, selects, attends to near tiles (those with copies), and lists far tiles for the CPU. The CPU therefore
reads only far tiles and no metadata. Every page that fills is copied, until its place is needed for another tile.

If a plan depends on the layer or the residents, the device does not select, and the CPU computes the whole middle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fluxion_sglang.device.library import DeviceLibrary, Port
from fluxion_sglang.device.mailbox import MailboxShape
from fluxion_sglang.kv.host_pool import GIB, HostPool, KVShape
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.native import NativePlan, function
from fluxion_sglang.policy.base import Policy

FAR = -2
"""The block size of groups whose tiles the device has selected (csrc/device/far_tiles.h)."""

MAX_PARTS = 64
"""Largest number of parts of a list of tiles (kMaxParts of csrc/cuda/attention.cuh)."""

COUNTS = ("near_tiles", "far_tiles", "near_copies")
_COUNTERS = 8  # of 32 bits each


def metadata_bytes(shape: KVShape, tokens: int) -> int:
    """Device memory for the metadata of a host pool of `tokens` tokens."""
    return tokens // PAGE * shape.layers * shape.kv_heads * 2 * shape.head_dim * shape.dtype.itemsize


def request_bytes(shape: KVShape, group: int, max_tokens: int, union: bool) -> int:
    """Approximate device memory for the lists and scores of one request of up to `max_tokens` tokens.

    Args:
        group: query heads per KV head. union: as for `Near`.
    """
    pages = -(-max_tokens // PAGE)
    lists = pages * (4 * group + group // 8 + 8 + (0 if union else 2 * group))
    parts = min(MAX_PARTS, -(-pages // 4)) * 4 * group * (shape.head_dim + 1)
    return shape.kv_heads * (lists + parts) + 4 * pages


class Near:
    """The near middle of one port. All methods but `stats` belong to the thread that launches passes.

    Args:
        pool: pinned.
        mailbox: the port's.
        max_pages: of a request.
        copies_gb: device memory for copies of tiles of all KV heads, in GiB.
        union: all heads of a group read the union of their selections (`attend_union`).

    Raises:
        DeviceError: the device has not enough memory. ValueError: copies_gb is less than a tile of every head.
    """

    def __init__(
        self,
        library: DeviceLibrary,
        pool: HostPool,
        mailbox: MailboxShape,
        port: Port,
        *,
        max_pages: int,
        copies_gb: float,
        union: bool,
    ) -> None:
        self._library, self._pool, self._port = library, pool, port
        shape = pool.shape
        tile_bytes = 2 * PAGE * shape.head_dim * shape.dtype.itemsize
        slots = min(int(copies_gb * GIB) // (shape.kv_heads * tile_bytes), shape.layers * pool.pages)
        if slots < 1:
            raise ValueError(
                f"hot_tiles_gb is {copies_gb:g}, less than one tile of each of the {shape.kv_heads} KV heads "
                f"({shape.kv_heads * tile_bytes} bytes); give more."
            )
        sizes = (mailbox.max_requests, mailbox.kv_heads, max_pages)
        self._lists = library.pinned_empty(function("far_lists_bytes")(*sizes))
        self._told = library.pinned_empty(4 * _COUNTERS).view(torch.int32)
        self._told.zero_()
        self._handle = library.near_create(
            port,
            self._lists,
            self._told,
            layers=shape.layers,
            pages=pool.pages,
            max_pages=max_pages,
            slots=slots,
            together=union,
            spread=pool.spread,
        )
        self._kinds = [function("far_tiles_create")(self._lists, *sizes, parity) for parity in (0, 1)]
        self._plans: dict[int, tuple[NativePlan, NativePlan]] = {}
        self._q_heads = mailbox.q_heads
        self._seen = [0] * len(COUNTS)
        self._counts = [0] * len(COUNTS)

    @property
    def nbytes(self) -> int:
        """Device memory of the near middle."""
        return self._library.near_bytes(self._handle)

    def step(
        self, stream: int, lengths: torch.Tensor, table: torch.Tensor, policies: Sequence[Policy]
    ) -> tuple[NativePlan, NativePlan] | None:
        """Set a step's requests, after its `port_step`; arguments as in `DecodeEngine.begin_step`, a policy a request.

        Returns:
            The CPU's plans for layers with an even and with an odd sequence number; None: the CPU follows the policies.
        """
        batch = lengths.numel()
        uniform = [policy.uniform for policy in policies]
        ranks = batch > 0 and all(reads is not None for reads in uniform)
        blk, budget = torch.zeros(batch, dtype=torch.int32), torch.zeros(batch)
        if ranks:
            for b, reads in enumerate(uniform):
                assert reads is not None
                blk[b], budget[b] = reads
        self._library.near_step(self._handle, self._port, stream, ranks, lengths.int(), table.int(), blk, budget)
        return self._plan(batch) if ranks else None

    def _plan(self, batch: int) -> tuple[NativePlan, NativePlan]:
        plans = self._plans.get(batch)
        if plans is None:
            heads = self._pool.shape.kv_heads
            blk = torch.full((batch, heads), FAR, dtype=torch.int32)
            of = [NativePlan(blk, torch.ones(batch, self._q_heads), torch.ones(batch, heads), kinds=[kind])
                  for kind in self._kinds]  # fmt: skip
            plans = self._plans[batch] = of[0], of[1]
        return plans

    def rank(self, stream: int, layer: int, q: torch.Tensor) -> None:
        """Call before the layer's `publish`; q [N, Hq, D] as there."""
        self._library.near_rank(self._handle, self._port, stream, layer, q)

    def attend(self, stream: int, scale: float, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Call after `resident`; merges the near tiles into its o [N, Hq, D] and lse [N, Hq]."""
        self._library.near_attend(self._handle, self._port, stream, scale, o, lse)

    def keep(self, stream: int, layer: int, windows: torch.Tensor) -> None:
        """Call after `attend` and before `take`: copies the pages that the step's tokens fill, and some far tiles."""
        self._library.near_keep(self._handle, self._port, stream, layer, windows, self._pool.tiles(layer))

    def write(self, stream: int, layer: int, chunk: torch.Tensor) -> None:
        """Call after `write_pages` of the same chunk, on its stream."""
        pool = self._pool
        self._library.near_write(
            self._handle, self._port, stream, layer, pool.tiles(layer), pool.page_metadata(layer), chunk
        )

    def renew(self, stream: int) -> None:
        """After a failed pass: reload all metadata from the host pool and drop all copies."""
        pool = self._pool
        for layer in range(pool.shape.layers):
            self._library.near_renew(
                self._handle, self._port, stream, layer, pool.tiles(layer), pool.page_metadata(layer)
            )

    def stats(self) -> dict[str, int]:
        """Cumulative counts of tiles: read near, left to the CPU, and copied because they were far."""
        now = [int(count) & 0xFFFFFFFF for count in self._told[: len(COUNTS)].tolist()]
        for i, count in enumerate(now):
            self._counts[i] += (count - self._seen[i]) & 0xFFFFFFFF
        self._seen = now
        return dict(zip(COUNTS, self._counts, strict=True))
