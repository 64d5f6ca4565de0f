"""hgca(beta, alpha): heads read tokens to which they attended enough (Deng et al., "HGCA: Hybrid GPU-CPU Attention").

While a token is resident, every head keeps a moving average of its attention weight. When the token leaves the window,
it enters the head's *contextual set* if that average exceeds beta times the mean weight of the residents; otherwise it
is not read again. A prefill puts most of the middle there at once, so the whole middle is then evaluated. The set is
known before a step begins, and its tokens are not ranked.

The implementation follows the paper's Algorithm 1 (line numbers in brackets), with these decisions:

- A_gpu [8]: softmax of this step's scaled scores over the residents, sinks and window together, the step's own token
  included. (The paper's device cache has no sinks: its first tokens leave like all others.) A token's average starts
  with its first weight. The paper gives no start; from 0 it would be too small for 1 / alpha steps.
- Eviction [10 to 14]: pages leave as the window moves; the step in which a page leaves already reads its listed tokens.
- Salience [23, 24]: average > beta / size(A_gpu), the residents of the step before. All weights of a head are compared
  with a threshold of its own mean, so the paper's renormalisation of the kept weights is not needed.
- Append [19 to 22]: A_cpu is the softmax over only the complete middle (Algorithm 2, line 4: either side normalises
  within itself) of the last prefilled query; tokens with more than beta / size(A_cpu) are salient. The set is computed
  when the request first decodes. The residents' averages start with that query's A_gpu [8]. The paper does not say
  which of the append's queries it takes; with more queries the set would depend on the length of the cache hit.
- The sets are token masks over pages, in place of compacted copies. Blocks leave in order, so the lists stay sorted,
  and a step's plan is a copy of them. Merged head tasks are the groups: a page is read once for all heads of a group.
  The paper pads each head's set to its task's; here each head attends to its own tokens.
- The paper's GPU KV ratio is the option `window`.

beta 0 keeps everything. The native library computes all this (`csrc/lab/hgca.h`).
"""

from __future__ import annotations

from typing import ClassVar, Final

import torch

from fluxion_lab.bounded import Bounded, Remembering
from fluxion_lab.kinds import LISTED, Listed
from fluxion_lab.native import function
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.policy import arguments
from fluxion_sglang.policy.base import UNSEEN, Context, DecodeStep, LayerPlan, Needs, Observed, Policy, World

BETA: Final = 1.0
"""The paper's typical value (section 3.2.2)."""

ALPHA: Final = 0.1
"""Weight of the newest value in a moving average. The paper gives none."""


class HgcaState:
    """The state of the requests in `rows` rows, in native memory.

    A row takes [layers, Hq, residents] float32 from its first decode step on, and lists per layer and group: at most
    4 + 2 G bytes a page of the middle. `release` frees it.

    Args:
        alpha: in [0, 1]. beta: at least 0.

    Raises:
        ValueError: an illegal alpha or beta.
    """

    def __init__(self, world: World, alpha: float, beta: float) -> None:
        placement = world.pool.placement
        self.handle = function("hgca_create")(
            world.pool.handle, world.q_heads, placement.window, world.rows, alpha, beta
        )
        self.heads, self.group = world.pool.shape.kv_heads, world.q_heads // world.pool.shape.kv_heads
        self.slots = placement.slots

    def establish(
        self, layer: int, row: int, length: int, queries: torch.Tensor, pages: torch.Tensor, scale: float
    ) -> None:
        """Evaluate a request's middle and residents anew, by its last queries.

        Args:
            length: tokens of the request, all in the pool. queries: [m, Hq, D], of the last m tokens, KV dtype, 1 <= m
                <= 32. pages: [>= ceil(length / 16)] int32.
        """
        function("hgca_establish")(self.handle, layer, row, length, queries, pages, scale)

    def step(
        self,
        layer: int,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        q: torch.Tensor,
        windows: torch.Tensor | None,
        scale: float,
    ) -> Listed:
        """Run a decode step of B requests, whose tokens are in the pool and the windows. Returns their heads' lists.

        A request without state, or with tokens that passed the window unseen, is evaluated by this step's query.

        Args:
            rows, seq_lens: [B] int32. page_table: [B, M] int32. q: [B, Hq, D]. windows: the layer's; None: read the
                pool's residents.
        """
        windows = torch.empty(0) if windows is None else windows
        count = function("hgca_step")(self.handle, layer, rows, seq_lens, page_table, q, windows, scale)
        listed = Listed(
            torch.empty(rows.numel() * self.heads + 1, dtype=torch.int64),
            torch.empty(count, dtype=torch.int32),
            torch.empty(count, self.group, dtype=torch.uint16),
        )
        function("hgca_lists")(self.handle, listed.offsets, listed.pages, listed.masks)
        return listed

    def averages(self, layer: int, row: int) -> torch.Tensor:
        """[Hq, n] float32, the moving averages of a row's n residents by position; n is 0 for a row without state."""
        out = torch.empty(self.heads * self.group, self.slots)
        return out[:, : function("hgca_averages")(self.handle, layer, row, out)]

    def release(self, row: int) -> None:
        function("hgca_release")(self.handle, row)

    @property
    def nbytes(self) -> int:
        return int(function("hgca_bytes")(self.handle))


class HgcaPolicy(Remembering):
    """Every head reads its contextual set.

    Args:
        beta: at least 0: factor of the mean weight above which a token is kept.
        alpha: in [0, 1]: weight of the newest value in a token's moving average.
    """

    forms: ClassVar[tuple[str, ...]] = ("hgca[:BETA[:ALPHA]]",)
    needs = Needs.RESIDENTS

    def __init__(self, beta: float = BETA, alpha: float = ALPHA) -> None:
        self.beta, self.alpha = beta, alpha
        self.state: HgcaState | None = None
        self._noted: list[dict[int, tuple[int, torch.Tensor]]] = []  # for each layer, by row: length and last query
        self._step: DecodeStep | None = None

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        """Parse BETA (at least 0) and ALPHA (0 to 1)."""
        arguments.at_most(words, 2)
        beta = arguments.number(words[0]) if words else BETA
        return Bounded(cls(beta, arguments.number(words[1], 1.0) if words[1:] else ALPHA))

    def bind(self, world: World) -> None:
        super().bind(world)
        self.state = HgcaState(world, self.alpha, self.beta)
        self._noted = [{} for _ in range(world.pool.shape.layers)]

    def prefilled(self, layer: int, row: int, length: int, queries: torch.Tensor) -> None:
        self._noted[layer][row] = length, queries[-1:].clone()

    def released(self, row: int) -> None:
        if self.state is not None:
            self.state.release(row)
        for noted in self._noted:
            noted.pop(row, None)

    def remembers(self, world: World, tokens: int) -> int:
        shape, slots = world.pool.shape, world.pool.placement.slots
        # Lists have room for half as many pages again; an entry takes 4 + 2 G bytes.
        pages, group = 3 * (tokens // PAGE + 1) // 2 + 1, world.q_heads // shape.kv_heads
        lists = shape.kv_heads * (64 + pages * (4 + 2 * group))
        heads = world.q_heads * (4 * slots + shape.head_dim * shape.dtype.itemsize)
        return shape.layers * (4 + lists + heads)

    @property
    def state_bytes(self) -> int:
        notes = sum(queries.nbytes for noted in self._noted for _, queries in noted.values())
        return notes + (0 if self.state is None else self.state.nbytes)

    def begin_step(self, step: DecodeStep) -> None:
        self._step = step

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        step, state = self._step, self.state
        assert step is not None and step.page_table is not None, "plan() before begin_step()"
        assert state is not None and observed.scale is not None
        noted = self._noted[layer]
        if noted:
            for row, pages in zip(step.rows.tolist(), step.page_table, strict=True):
                if row in noted:
                    state.establish(layer, row, *noted.pop(row), pages, observed.scale)
        listed = state.step(layer, step.rows, step.seq_lens, step.page_table, q, observed.windows, observed.scale)
        blk = torch.full((step.batch, step.kv_heads), LISTED, dtype=torch.int32)
        # Like V of a budget: twice the number of tokens read, here an upper bound.
        value = listed.offsets.diff().view_as(blk).float() * (2 * PAGE * state.group)
        return LayerPlan(blk, torch.ones(step.batch, step.q_heads), value, (listed,))
