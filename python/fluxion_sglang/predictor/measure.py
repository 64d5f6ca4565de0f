"""Exact least budgets and anchor statistics of queries, from the host pool, for both training and serving.

Notation: N queries of one request; Hq query heads, H KV heads, D head_dim; n tokens of the request up to and including
the query's; L tokens of the middle of those n (kv/placement.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.native import NativePool, function
from fluxion_sglang.predictor.features import ANCHOR

BLOCK_SIZES = (1, *BLOCKS)
"""Tokens of a block, in the order of `Measurement.budgets`; 1 means single tokens."""


@dataclass(frozen=True)
class Measurement:
    """The results of `measure`, all float32.

    Attributes:
        anchor: [N, Hq, 28], the features `ANCHOR` (`features.py`) with each query as the anchor. Budgets are those of
            the first criterion for blocks of 16 to 128 tokens.
        mean_k: [N, H, D], mean key of the middle; 0 if it is empty.
        parts: [N, Hq, 5]: LSE of the sinks, LSE of the window, norms of the attention to the sinks, to the window and
            to both. LSE natural, -inf for an empty part; its norm is 0.
        result: [N, Hq, 3]: |o|; the error of the residents alone, relative to the largest |o| of the query's heads; the
            middle's share of the attention mass.
        budgets: [N, Hq, C, 5], least budget under each criterion for blocks of BLOCK_SIZES tokens: the share of the
            middle in `count` blocks, min(1, count * blk / L). count is the first number of best blocks that meets the
            criterion; 0 if the residents do. Exactly 1 means all blocks. If fewer blocks would round to 1, because
            blocks at the end are cut, the next smaller number is given, which makes the engine select exactly count.
    """

    anchor: torch.Tensor
    mean_k: torch.Tensor
    parts: torch.Tensor
    result: torch.Tensor
    budgets: torch.Tensor


def measure(
    pool: NativePool,
    layer: int,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    q: torch.Tensor,
    scale: float,
    window: int,
    criteria: torch.Tensor | Sequence[tuple[int, float]],
    single_tokens: bool = True,
) -> Measurement:
    """Read all tokens, and find the least budget that meets each criterion.

    Blocks are tried in the order in which the engine selects them without `attend_union`: none, the best, the two best,
    and so on; of equal scores the lower index. Blocks of 16 tokens and more are ranked by the scores that the engine
    computes, single tokens by their exact scores. The first prefix that meets a criterion gives the budget (a longer
    one may fail it again, because errors need not fall monotonically). Sinks are those of the pool.

    Tokens at or after a query's length are not read, so the pool may hold more of the request. No layer may write to
    the pool meanwhile. Runs on the pool's workers.

    Args:
        pages: [>= ceil(max n / 16)] int32, the request's pages from its first.
        lengths: [N] int32, n of each query.
        q: [N, Hq, D], KV dtype, the last two dimensions contiguous. Hq is 1 to 16 times the pool's KV heads.
        scale: multiplies q.k.
        window: tokens, a multiple of 16.
        criteria: [C, 2] float32 or pairs: (Deviation, limit); 1 to 32 of them.
        single_tokens: False skips the most expensive block size; its budgets are NaN.

    Raises:
        ValueError: an invalid shape, dtype, length, page id or criterion; nothing was computed.
    """
    if not isinstance(criteria, torch.Tensor):
        criteria = torch.tensor([(float(kind), threshold) for kind, threshold in criteria]).reshape(-1, 2)
    if q.ndim != 3:
        raise ValueError(f"q has {q.ndim} dimensions and must have three: queries, heads and head_dim.")
    count, heads, dim = q.shape
    found = Measurement(
        anchor=torch.empty(count, heads, len(ANCHOR)),
        mean_k=torch.empty(count, pool.tensor("tiles", layer).shape[0], dim),
        parts=torch.empty(count, heads, 5),
        result=torch.empty(count, heads, 3),
        budgets=torch.empty(count, heads, len(criteria), len(BLOCK_SIZES)),
    )
    measure_into(pool, layer, pages, lengths, q, scale, window, criteria, found, single_tokens)
    return found


def measure_into(
    pool: NativePool,
    layer: int,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    q: torch.Tensor,
    scale: float,
    window: int,
    criteria: torch.Tensor,
    out: Measurement,
    single_tokens: bool = True,
) -> None:
    """`measure` into existing tensors, contiguous and on the CPU; every element of `out` is written."""
    function("measure")(
        pool.handle, layer, pages, lengths, q, scale, window, criteria, single_tokens,
        out.anchor, out.mean_k, out.parts, out.result, out.budgets,
    )  # fmt: skip
