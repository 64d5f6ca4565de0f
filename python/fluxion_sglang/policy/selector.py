"""The granularity-budget selector (Fluxion, section 5.3): one block size a group, one budget a head.

For a group of G heads over a middle of L tokens the data volume in blocks of blk tokens is

    V(blk) = 2 L / blk + 2 L * sum_h bgt_h(blk)                                                    (Eq. 3)

metadata and KV, and the block size of 16, 32, 64, 128 with the least V wins; of equal ones the larger, whose tiles lie
in longer runs. Streaming heads choose nothing and do not count; every other head reads at least one block.

A predicted budget is the line of Eq. 1, at least one block, times the margin of the head and the block size.

Budgets are rounded to float32 first, as the engine takes them, and summed in float64: those sums are exact, so ties
are ties on every machine. `predictor/inference.py` has the native forms, which serve: `plan_groups` and `plan_budgets`;
`lab/granularity.py` has their references.
"""

from __future__ import annotations

from dataclasses import dataclass

from fluxion_sglang.kv.placement import BLOCKS

LOG2_BLOCKS = tuple(blk.bit_length() - 1 for blk in BLOCKS)
"""log2 of the block sizes."""


@dataclass(frozen=True)
class Choice:
    """What the selector may choose from: less than everything is for ablations (Fluxion, Fig. 9).

    Attributes:
        blocks: block sizes.
        every_head: no head streams, all read at least one block.
    """

    blocks: tuple[int, ...] = BLOCKS
    every_head: bool = False


DYNAMIC = Choice()
