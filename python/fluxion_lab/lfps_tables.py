"""The native score tables of LFPS: the state of every request, and the candidates that follow from it.

See `lfps.py` for the algorithm and its reconstructed parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fluxion_lab.kinds import Given, Listed, Record, listed
from fluxion_lab.native import function
from fluxion_sglang.kv.host_pool import HostPool
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.policy.base import LayerPlan


@dataclass(frozen=True)
class LfpsOptions:
    """The paper's constants.

    Attributes:
        alpha_vertical, alpha_slash: Eq. 8's alpha for each table; larger ones make fewer candidates.
        decay: factor of the tables per step (Eq. 10).
        bypass: share of attention to the first tokens above which a head is bypassed (Eq. 6); 1: never.
        expand: neighbours of candidates are candidates, too (Eq. 9).
        renormalise: bits by which stored entries may exceed the true ones; results do not depend on it.
    """

    alpha_vertical: float = 0.2
    alpha_slash: float = 0.2
    decay: float = 0.95
    bypass: float = 0.85
    expand: bool = True
    renormalise: int = 40


def table_bytes(tokens: int) -> int:
    """Upper bound of the bytes of a head's two tables for a request of `tokens` tokens. Tables grow by an eighth and
    more at a time (`Lfps::reserve` in csrc/lab/lfps.cc)."""
    capacity = (tokens + 256) * 9 // 8 + 64
    return 10 * capacity + 128


class LfpsTables:
    """Two score tables for every query head of every request row and layer, over the tokens of a host pool.

    Memory: 10 bytes per head, layer and token of the rows in use.

    Raises:
        ValueError: invalid options or sizes.
    """

    def __init__(self, pool: HostPool, rows: int, q_heads: int, options: LfpsOptions) -> None:
        self._handle = function("lfps_create")(
            pool.handle,
            q_heads,
            rows,
            pool.placement.window,
            options.decay,
            options.alpha_vertical,
            options.alpha_slash,
            options.bypass,
            options.expand,
            options.renormalise,
        )
        self._begin, self._plan, self._update, self._release, self._counts = (
            function(f"lfps_{name}") for name in ("begin", "plan", "update", "release", "counts")
        )
        self._heads, self._q_heads = pool.shape.kv_heads, q_heads
        self._pages = torch.empty(0, dtype=torch.int32)
        self._masks = torch.empty(0, q_heads // self._heads, dtype=torch.uint16)
        self._scores = torch.empty(0, q_heads // self._heads, PAGE)

    def begin(
        self, layer: int, row: int, length: int, pages: torch.Tensor, queries: torch.Tensor, scale: float
    ) -> None:
        """Make the tables of a request anew (Eq. 4).

        Args:
            length: its tokens, all in the pool. pages: [>= ceil(length / 16)] int32.
            queries: [m, Hq, D], KV dtype, contiguous: of its last m tokens. scale: multiplies q.k.

        Raises:
            ValueError: a size or page id that does not fit; nothing was written.
        """
        self._begin(self._handle, layer, row, length, pages, queries, scale)

    def plan(
        self,
        layer: int,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        q: torch.Tensor,
        scale: float,
        budget: float,
    ) -> LayerPlan:
        """The candidates of a step (Eq. 7 to 9) and the results of bypassed heads, for requests after `begin`.

        Lists and record are in memory of this object, and valid until the next plan.

        Args:
            rows, seq_lens: [B] int32, this step's token included; it is in the pool. page_table: [B, M] int32.
            q: [B, Hq, D], KV dtype. budget: share of the middle that a head reads of its candidates.

        Raises:
            ValueError: a size, row or page id that does not fit.
        """
        batch, dim = q.shape[0], q.shape[2]
        # The longest middle is shorter than a row of the page table.
        room = page_table.numel() * self._heads
        if self._pages.numel() < room:
            room += room // 2
            self._pages = torch.empty(room, dtype=torch.int32)
            self._masks = torch.empty(room, self._masks.shape[1], dtype=torch.uint16)
        blk, value = torch.empty(batch, self._heads, dtype=torch.int32), torch.empty(batch, self._heads)
        share = torch.empty(batch, self._q_heads)
        offsets = torch.empty(batch * self._heads + 1, dtype=torch.int64)
        given = Given(torch.empty(batch, self._q_heads, dim), torch.empty(batch, self._q_heads))
        count = self._plan(
            self._handle, layer, rows, seq_lens, page_table, q, scale, budget,
            blk, share, value, offsets, self._pages, self._masks, *given,
        )  # fmt: skip
        pages, masks = self._pages[:count], self._masks[:count]
        if self._scores.shape[0] < count:
            self._scores = torch.empty(count + count // 2, *self._scores.shape[1:])
        record = Record(torch.zeros_like(masks), self._scores[:count])
        return LayerPlan(blk, share, value, (Listed(offsets, pages, masks, record, given),))

    def update(
        self,
        layer: int,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        plan: LayerPlan,
        local_lse: torch.Tensor,
        scale: float,
    ) -> None:
        """Add the step's attention to the tables (Eq. 10).

        Args:
            rows, seq_lens: of the plan. plan: the result of `plan`, its record written.
            local_lse: [B, Hq] float32, LSE over the window.

        Raises:
            ValueError: the lists are not those of this step's plan.
        """
        lists = listed(plan)
        assert lists is not None and lists.given is not None
        self._update(
            self._handle, layer, rows, seq_lens, lists.offsets, lists.pages, *lists.recorded(),
            lists.given.lse, local_lse, scale,
        )  # fmt: skip

    def release(self, row: int) -> None:
        """Free the memory of a row in every layer."""
        self._release(self._handle, row)

    def counts(self) -> dict[str, int]:
        """Current bytes of state; cumulative numbers of planned heads, bypassed heads, and candidates of the others."""
        out = torch.empty(4, dtype=torch.int64)
        self._counts(self._handle, out)
        return dict(zip(("bytes", "planned", "passed", "candidates"), out.tolist(), strict=True))

    def tables(self, layer: int, row: int, head: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A head's tables: [n] float32 by position, [n] by offset from the current token."""
        vertical, slash = torch.empty(n), torch.empty(n)
        function("lfps_tables")(self._handle, layer, row, head, vertical, slash)
        return vertical, slash
