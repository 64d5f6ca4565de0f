"""The host KV pool: tiles, block metadata and moments of every page, in host memory, shared by all requests.

The pool has no allocator. Its page ids are SGLang's: the stock paged allocator and radix tree run in a logical space
as large as this pool. SGLang therefore shares, evicts and reuses pages, and requests that share a page share its
metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.native import NativePool, Workers, pool_bytes, row_bytes

GIB = 1 << 30

SPREAD = 1.0
"""The ranking of blocks: Quest's bound (KernelTable::score). A predictor is trained for it."""
MAX_PAGES = (1 << 27) - 1
"""Most pages of a pool: SGLang's request table holds slots, 16 to a page, as int32."""


@dataclass(frozen=True)
class KVShape:
    """What one process stores per token.

    Attributes:
        layers: attention layers of this process (its pipeline stage).
        kv_heads: KV heads of this process (its tensor-parallel share).
        head_dim: elements of a key, and of a value.
        dtype: torch.bfloat16 or torch.float32.
        int8: the host pool stores keys and values in 8 bits (`NativePool`); device windows have dtype.
        sketched: it has sketches of keys, too.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    int8: bool = False
    sketched: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in the host pool, in one layer."""
        return 2 * self.kv_heads * row_bytes(self.head_dim, self.dtype, self.int8)

    def pool_bytes(self, tokens: int) -> int:
        """Host bytes of a pool of `tokens` tokens: tiles, metadata of all levels, tags, moments and sketches."""
        pages = tokens // PAGE + 1
        return pool_bytes(self.layers, self.kv_heads, pages, self.head_dim, self.dtype, self.int8, self.sketched)

    def window_bytes(self, placement: Placement) -> int:
        """Device bytes of one request row."""
        element = torch.empty((), dtype=self.dtype).element_size()
        return 2 * self.layers * self.kv_heads * placement.slots * self.head_dim * element


class HostPool(NativePool):
    """Tiles, metadata and moments of `tokens` tokens, plus the padding page 0 that SGLang never hands out.

    `NativePool.tensor` has the layouts.
    """

    def __init__(
        self,
        shape: KVShape,
        tokens: int,
        placement: Placement,
        workers: Workers,
        spread: float = SPREAD,
        canary: float = 0.0,
    ) -> None:
        self.shape = shape
        self.spread = spread
        self.tokens = tokens
        self.pages = tokens // PAGE + 1
        self.placement = placement
        super().__init__(
            workers,
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            pages=self.pages,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            int8=shape.int8,
            sketched=shape.sketched,
            sink_pages=placement.sink_pages,
            spread=spread,
            canary=canary,
        )

    @property
    def nbytes(self) -> int:
        return self.shape.pool_bytes(self.tokens)

    @property
    def memory(self) -> torch.Tensor:
        """[bytes] uint8: the whole pool, for a device that reads it in place; every byte has been touched."""
        return self.tensor("memory", 0)

    @cached_property
    def stored(self) -> torch.Tensor:
        """[layers, H, P, bytes] uint8: view of the stored bytes of every tile; no copy."""
        shape = self.shape
        tile = 2 * PAGE * row_bytes(shape.head_dim, shape.dtype, shape.int8)
        first, second = (self.tiles(layer).data_ptr() for layer in (0, min(1, shape.layers - 1)))
        # Layers have equal size; each layer's metadata follows its tiles.
        return self.memory.as_strided(
            (shape.layers, shape.kv_heads, self.pages, tile),
            (second - first, self.pages * tile, tile, 1),
            first - self.memory.data_ptr(),
        )

    def tiles(self, layer: int) -> torch.Tensor:
        """View of a layer's tiles, [H, P, 2, 16, D], or of int8 [H, P, bytes] uint8; no copy."""
        return self.tensor("tiles", layer)

    def page_metadata(self, layer: int) -> torch.Tensor:
        """[H, P, 2, D] view of a layer's per-page min and max; no copy."""
        return self.tensor("meta0", layer)

    def page_moments(self, layer: int) -> torch.Tensor:
        """[H, P, 2 D + 8] float64 view of a layer's moments; no copy."""
        return self.tensor("moments", layer)
