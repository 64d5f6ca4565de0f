"""Device windows: the sinks and the most recent tokens of every request row, as a small pool of tiles.

Row r of SGLang's request table owns slots [r * S, (r + 1) * S): sinks, then a ring. Residency is a pure function of
(row, position), so slots need no map and no allocation. A request that finishes, aborts or is retracted leaves its
slots as they are.
"""

from __future__ import annotations

import torch

from fluxion_sglang.kv.host_pool import HostPool
from fluxion_sglang.kv.placement import PAGE


class Windows:
    """Windows of `rows` request rows, with the state that each row is known to hold.

    A row is *current* for (generation, n) if its slots hold the residents of the first n tokens of the request that
    took the row in that generation. Before a decode step, the caller calls `stale` and refills those rows from the host
    pool, which always holds every token. This covers rows that were copied without a prefill or skipped.

    Attributes:
        layers: per layer [H, rows * S / 16, 2, 16, D], KV dtype: a tile pool addressed by row * S / 16 + slot page.
    """

    def __init__(self, pool: HostPool, rows: int, device: str) -> None:
        self.pool = pool
        self.rows = rows
        shape = pool.shape
        size = (shape.kv_heads, rows * pool.placement.slot_pages, 2, PAGE, shape.head_dim)
        self.layers = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
        self._generation = torch.full((rows,), -1, dtype=torch.int64)
        self._length = torch.zeros(rows, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def fill(self, layer: int, row: int, n: int, pages: torch.Tensor) -> None:
        """Refill one layer of a row from the host: the residents of a request of n tokens with page list `pages`."""
        placement = self.pool.placement
        self.pool.fill_window(layer, self.layers[layer], row, n, pages, placement.sinks, placement.window)

    def mark(self, rows: torch.Tensor, generations: torch.Tensor, lengths: torch.Tensor) -> None:
        """Declare rows [B] current for `generations` [B] and `lengths` [B] (int64, CPU)."""
        self._generation[rows] = generations
        self._length[rows] = lengths

    def stale(self, rows: torch.Tensor, generations: torch.Tensor, lengths: torch.Tensor) -> list[int]:
        """Indices into the batch whose row is not current for (generation, length); rows, ... [B] int64, CPU."""
        wrong = (self._generation[rows] != generations) | (self._length[rows] != lengths)
        return [int(i) for i in wrong.nonzero().flatten()]

    def taken_over(self, rows: torch.Tensor, generations: torch.Tensor) -> list[int]:
        """Indices into the batch whose row last had a request of another generation; arguments as in `mark`."""
        return [int(i) for i in (self._generation[rows] != generations).nonzero().flatten()]

    def heal(self, row: int, n: int, pages: torch.Tensor) -> None:
        """Refill every layer of a row from the host for a request of n tokens."""
        for layer in range(len(self.layers)):
            self.fill(layer, row, n, pages)
