"""The near middle: a device that ranks blocks itself and attends to the tiles it has copies of (csrc/cuda/near.h).

The device has the metadata of the whole pool and copies of some tiles. In a decode layer it scores the blocks of every
request, chooses, attends to what is near, and lists for the CPU what is far. It needs no answer for its choice, so the
CPU reads what is far and nothing else: no metadata, and no tile that the device has. Every page that fills is near from
then on, until others need its place.

Whose plan depends on the layer or the residents is not ranked by the device: then the CPU does all of the middle.
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
"""The block size of groups whose tiles the device has chosen (csrc/device/far_tiles.h)."""

MAX_PARTS = 64
"""Into so many a list of tiles is cut at most (kMaxParts of csrc/cuda/attention.cuh)."""

COUNTS = ("near_tiles", "far_tiles", "near_copies")
_COUNTERS = 8  # of 32 bits each


def metadata_bytes(shape: KVShape, tokens: int) -> int:
    """Device memory for the metadata of a host pool of so many tokens."""
    return tokens // PAGE * shape.layers * shape.kv_heads * 2 * shape.head_dim * shape.dtype.itemsize


def request_bytes(shape: KVShape, group: int, max_tokens: int, union: bool) -> int:
    """Device memory for the lists and scores of one request of at most so many tokens; about.

    Args:
        group: query heads of a KV head. union: as of `Near`.
    """
    pages = -(-max_tokens // PAGE)
    lists = pages * (4 * group + group // 8 + 8 + (0 if union else 2 * group))
    parts = min(MAX_PARTS, -(-pages // 4)) * 4 * group * (shape.head_dim + 1)
    return shape.kv_heads * (lists + parts) + 4 * pages


class Near:
    """Of one port. Everything but `stats` belongs to the thread that launches passes.

    Args:
        pool: pinned.
        mailbox: the port's.
        max_pages: of a request.
        copies_gb: device memory for copies of tiles, in GiB; those of all KV heads.
        union: what one head of a group chose, all of them read (`attend_union`).

    Raises:
        DeviceError: the device has no such memory. ValueError: copies_gb is less than a tile of every head.
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
        """Device memory that it takes."""
        return self._library.near_bytes(self._handle)

    def step(
        self, stream: int, lengths: torch.Tensor, table: torch.Tensor, policies: Sequence[Policy]
    ) -> tuple[NativePlan, NativePlan] | None:
        """A step's requests, behind its `port_step`; arguments of `DecodeEngine.begin_step`, a policy a request.

        Returns:
            What the CPU reads of a layer with an even and with an odd sequence number; None: it reads by its policies.
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
        """Before the layer's `publish`; q [N, Hq, D] as there."""
        self._library.near_rank(self._handle, self._port, stream, layer, q)

    def attend(self, stream: int, scale: float, o: torch.Tensor, lse: torch.Tensor) -> None:
        """After `resident`, whose o [N, Hq, D] and lse [N, Hq] have what is near merged into them."""
        self._library.near_attend(self._handle, self._port, stream, scale, o, lse)

    def keep(self, stream: int, layer: int, windows: torch.Tensor) -> None:
        """After `attend`, before `take`: what the step's tokens filled and some of what was far gets copies."""
        self._library.near_keep(self._handle, self._port, stream, layer, windows, self._pool.tiles(layer))

    def write(self, stream: int, layer: int, chunk: torch.Tensor) -> None:
        """Behind `write_pages` of the same chunk, in its stream."""
        pool = self._pool
        self._library.near_write(
            self._handle, self._port, stream, layer, pool.tiles(layer), pool.page_metadata(layer), chunk
        )

    def renew(self, stream: int) -> None:
        """After a pass that failed: all metadata from the host pool, and copies of nothing."""
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
