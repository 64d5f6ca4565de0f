"""Reading until it is enough: PSA's Algorithm 1 (arXiv 2503.00392), for the query heads of a group, from the
definitions.

The native form is `csrc/lab/early_stop.cc`, whose header says what the paper leaves open and how it is decided here.
Where what one head chose is attended to by all (`attend_union`), it counts in AS_min of those that chose it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

MICROBATCH_PAGES: Final = 8
"""Pages of a head's order that a microbatch has at least, in whole blocks: m of the paper, whose example has 4
blocks."""
READ_SHARE: Final = 16
"""A microbatch has a 16th of the blocks that the task has read, where that is more."""


@dataclass
class Progress:
    """What a group read.

    Attributes:
        read: of each head, the blocks it attended to.
        microbatches: the blocks of each, every one once.
        margin: how near to its threshold a head was when it was decided whether it goes on, at the least.
    """

    read: list[set[int]]
    microbatches: list[list[int]] = field(default_factory=list)
    margin: float = math.inf


def by_criticality(scores: torch.Tensor) -> list[int]:
    """Blocks by their scores [n], best first, of equal ones the earlier; NaN counts as -inf."""
    values = torch.where(scores.isnan(), -torch.inf, scores).tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def read_until(
    scores: torch.Tensor, logits: Sequence[torch.Tensor], resident: torch.Tensor, stop: float, *, least: int,
    share: int = READ_SHARE, union: bool, limits: Sequence[int] | None = None,
) -> Progress:  # fmt: skip
    """Go through the blocks until every head has the share `stop` of its attention, by the bound on what is left.

    Args:
        scores: [G, n], criticality of the blocks. logits: n tensors [G, tokens], scale * q.k of their tokens.
        resident: [G, tokens], the same of what is resident.
        least: blocks of a microbatch, at least 1; share: see `READ_SHARE`.
        union: what one head chose, all of them attend to.
        limits: of each head, how many blocks of its order it may go through; None: all.
    """
    heads = len(scores)
    top = max((float(x.max()) for x in (resident, *logits) if x.numel()), default=0.0)
    top = top if math.isfinite(top) else 0.0
    weight = [(x.double() - top).exp().sum(1) for x in logits]  # AS of every block (line 10)
    tokens = [x.shape[1] for x in logits]
    as_acc = (resident.double() - top).exp().sum(1)
    as_min, left = [math.inf] * heads, [sum(tokens)] * heads
    orders = [by_criticality(scores[g])[: None if limits is None else limits[g]] for g in range(heads)]
    out = Progress([set() for _ in range(heads)])
    going = set(range(heads))
    while True:
        count = max(least, sum(map(len, out.microbatches)) // share)
        chosen = {g: [i for i in orders[g] if i not in out.read[g]][:count] for g in sorted(going)}
        batch = list(dict.fromkeys(i for blocks in chosen.values() for i in blocks))
        if not batch:
            return out
        out.microbatches.append(batch)
        for g in range(heads):
            for i in batch if union else chosen.get(g, []):
                out.read[g].add(i)
                as_acc[g] += weight[i][g]
                left[g] -= tokens[i]
        for g, blocks in chosen.items():
            as_min[g] = min([as_min[g], *(float(weight[i][g]) / tokens[i] for i in blocks)])
            total = float(as_acc[g]) + as_min[g] * left[g]  # line 15
            p_acc = float(as_acc[g]) / total if total > 0 else 0.0
            out.margin = min(out.margin, abs(p_acc - stop))
            if p_acc >= stop or not blocks:
                going.discard(g)
