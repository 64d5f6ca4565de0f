"""lfps(budget, alpha): selects candidates from past attention, and the exact best of these.

LFPS (Learn From the Past for Sparse Indexing, arXiv 2506.15704), section 4.2 and appendix B. Every query head of every
layer keeps two score tables of a request: *vertical*, by position, and *slash*, by the offset from the current token.

- Prefill (Eq. 4). Both tables start with the attention weights of the last rows, summed by position and by offset.
- Sparsity (Eq. 5 and 6). A head with more than 0.85 of its attention on the first tokens is bypassed: it neither reads
  nor learns.
- Candidates (Eq. 7 to 9). Positions above a threshold in either table; beside each, at -1, 0, 1 and 2, those above the
  mean of either.
- The k best candidates by exact q.k are attended to (`kinds.Listed`; k is the budget's share of the middle).
- Update (Eq. 10). Both tables decay by 0.95 and add half of the weights of the chosen tokens.

Some formulas are missing in the available text of the paper. They are reconstructed from its prose:

- Eq. 4's coefficient is 1 / (2 m (1 - decay)) for m rows. A table then sums to 1 / (2 (1 - decay)), which Eq. 10
  preserves, because it adds weights that sum to 1/2 (appendix B.2). m is 1 / (1 - decay) = 20, the memory of the
  update.
- Eq. 6: sink / (sink + max(global, local)), with sink the weight of the first four tokens, local that of the last five
  and global = n exp(mu + sigma^2 / 2), mu = q . mean key, sigma^2 = |q|^2 times the ratio of variance to squared norm
  of the last prefilled query.
- Eq. 8: threshold = mean + (alpha + 3 / kurtosis) sqrt(m4 / m2), where m2 and m4 are the central moments, and the
  kurtosis is m4 / m2^2. sqrt(m4 / m2) is the height of the peaks in a table of equal peaks on flat ground. So the
  threshold rises with alpha, falls with the kurtosis relative to the peaks, and does not fall with the length. This
  agrees with the shares of candidates in the paper's table 4. A table without a pattern (a normal distribution,
  kurtosis 3) has 2% of its entries above it.
- A bypassed head gets the mean value of the middle, with weight n exp(mu + sigma^2 / 2), beside the residents.

The paper keeps four tokens on the device; here sinks and window are resident. So candidates and k concern only the
middle, and tables are the middle's part of the paper's. Weights are normalised over all tokens but the sinks. Tokens
are not scored while they are in the window, so the newest page of the middle is a candidate for the 16 steps after it
leaves. In the paper alpha is one number (0.2 or 0.3 in its tables); here each table may have its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from fluxion_lab.bounded import Bounded, Remembering
from fluxion_lab.lfps_tables import LfpsOptions, LfpsTables, table_bytes
from fluxion_sglang.policy import arguments
from fluxion_sglang.policy.base import UNSEEN, Context, DecodeStep, LayerPlan, Needs, Observed, Policy, World
from fluxion_sglang.predictor.features import PARTS

ROWS: Final = 20
"""Number of last prefill queries from which the tables start: m."""


@dataclass(frozen=True)
class Prefilled:
    """The last queries [m, Hq, D] of a request of `length` tokens, kept until it first decodes."""

    length: int
    queries: torch.Tensor


class LfpsPolicy(Remembering):
    """Every head reads the best `budget` of the middle among its candidates.

    Args:
        budget: fraction of the middle in (0, 1]: upper bound of the tokens that a head attends to.
        options: the paper's constants.
    """

    forms: ClassVar[tuple[str, ...]] = ("lfps[:BUDGET[:ALPHA:ALPHA]]",)
    needs = Needs.RESIDENTS

    def __init__(self, budget: float, options: LfpsOptions | None = None) -> None:
        self.budget = budget
        self.options = options or LfpsOptions()
        self.tables: LfpsTables | None = None
        self._step: DecodeStep | None = None
        self._prefilled: dict[tuple[int, int], Prefilled] = {}  # by (layer, row)
        self._lengths: dict[tuple[int, int], int] = {}  # tokens that the tables of (layer, row) have seen
        self._planned: tuple[LayerPlan, torch.Tensor, float] | None = None

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        if len(words) not in (0, 1, 3):
            raise arguments.NotLegal
        budget, *alphas = map(arguments.fraction, words or ("0.05",))
        return Bounded(cls(budget, LfpsOptions(alphas[0], alphas[1]) if alphas else None))

    def bind(self, world: World) -> None:
        super().bind(world)
        self.tables = LfpsTables(world.pool, world.rows, world.q_heads, self.options)
        self._prefilled, self._lengths = {}, {}
        self._step = self._planned = None

    def prefilled(self, layer: int, row: int, length: int, queries: torch.Tensor) -> None:
        before = self._prefilled.get((layer, row))
        # A short chunk may directly follow the one before it.
        if before is not None and before.length + len(queries) == length:
            queries = torch.cat([before.queries, queries])
        self._prefilled[layer, row] = Prefilled(length, queries[-ROWS:].clone())

    def released(self, row: int) -> None:
        assert self.tables is not None
        self.tables.release(row)
        known = False
        for state in (self._prefilled, self._lengths):
            for key in [key for key in state if key[1] == row]:
                del state[key]
                known = True
        if known and not self._prefilled and not self._lengths and self.world is not None:
            self.bind(self.world)  # no request is left; this also frees the memory of plans

    def remembers(self, world: World, tokens: int) -> int:
        shape = world.pool.shape
        a_head = table_bytes(tokens) + ROWS * shape.head_dim * shape.dtype.itemsize
        return shape.layers * world.q_heads * a_head

    @property
    def state_bytes(self) -> int:
        if self.tables is None:
            return 0
        return self.tables.counts()["bytes"] + sum(noted.queries.nbytes for noted in self._prefilled.values())

    def begin_step(self, step: DecodeStep) -> None:
        self._step = step

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        step, tables, scale, parts = self._step, self.tables, observed.scale, observed.parts
        assert step is not None and step.page_table is not None, "plan() before begin_step()"
        assert tables is not None and scale is not None and parts is not None
        for b, (row, length) in enumerate(zip(step.rows.tolist(), step.seq_lens.tolist(), strict=True)):
            noted = self._prefilled.pop((layer, row), None)
            if noted is None and self._lengths.get((layer, row), length + 1) > length:
                noted = Prefilled(length, q[b : b + 1])  # came without a prefill; use this query instead
            if noted is not None:
                tables.begin(layer, row, noted.length, step.page_table[b], noted.queries.contiguous(), scale)
            self._lengths[layer, row] = length
        plan = tables.plan(layer, step.rows, step.seq_lens, step.page_table, q, scale, self.budget)
        self._planned = plan, parts[..., PARTS.index("lse_local")].contiguous(), scale
        return plan

    def decoded(self, layer: int, q: torch.Tensor, out: torch.Tensor | None) -> None:
        assert self._planned is not None and self._step is not None and self.tables is not None
        plan, local_lse, scale = self._planned
        self.tables.update(layer, self._step.rows, self._step.seq_lens, plan, local_lse, scale)
