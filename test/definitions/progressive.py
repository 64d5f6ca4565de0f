"""PSA's Algorithm 1 (arXiv 2503.00392), which reads until it has enough, for the query heads of a group.

The native form is `csrc/lab/early_stop.cc`; its header names what the paper leaves open and how it is decided here.
With `attend_union`, all heads attend to blocks that one head chose; such blocks count in AS_min of the heads that chose
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

MICROBATCH_PAGES: Final = 8
"""Minimum pages of a microbatch in a head's order, in whole blocks: m of the paper, whose example has 4 blocks."""
READ_SHARE: Final = 16
"""A microbatch has a 16th of the blocks that the task has read, if that is more."""


@dataclass
class Progress:
    """What a group read.

    Attributes:
        read: by head, the blocks it attended to.
        microbatches: the blocks of each; every block appears once.
        margin: minimum distance of a head from its threshold when it was decided whether to continue.
    """

    read: list[set[int]]
    microbatches: list[list[int]] = field(default_factory=list)
    margin: float = math.inf


def by_criticality(scores: torch.Tensor) -> list[int]:
    """Blocks by their scores [n], best first; the earlier of equal ones first. NaN counts as -inf."""
    values = torch.where(scores.isnan(), -torch.inf, scores).tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def read_until(
    scores: torch.Tensor, logits: Sequence[torch.Tensor], resident: torch.Tensor, stop: float, *, least: int,
    share: int = READ_SHARE, union: bool, limits: Sequence[int] | None = None,
) -> Progress:  # fmt: skip
    """Read blocks until every head has the share `stop` of its attention, by a bound on the rest.

    Args:
        scores: [G, n], criticality of the blocks. logits: n tensors [G, tokens], scale * q.k of their tokens.
        resident: [G, tokens], logits of the resident tokens.
        least: blocks of a microbatch, at least 1; share: see `READ_SHARE`.
        union: all heads attend to blocks that one head chose.
        limits: by head, the maximum number of blocks in its order; None: all.
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
