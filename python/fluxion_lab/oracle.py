"""oracle(budget): the exact top-k tokens of every head, which requires reading every key.

A yardstick for selections with a fixed number of tokens per head: among all sets of k tokens this one has the largest
q.k, so the most attention weight. It is not the best at equal reads: under `attend_union` a head of `fixed` also
attends to the blocks of other heads of its group, up to G times its budget, while a head of `oracle` attends to its own
k tokens. And it need not have the smallest error: the output also depends on the values, and another set of k tokens
may be closer. It scans all keys of the middle, so it is slow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from fluxion_lab.kinds import SINGLE, SingleTokens
from fluxion_sglang.policy import arguments
from fluxion_sglang.policy.base import Context, DecodeStep, Policy
from fluxion_sglang.policy.fixed import FixedPolicy


class OraclePolicy(FixedPolicy):
    """Every head of every layer reads only its own k tokens of the middle with the largest q.k.

    k = max(1, ceil(budget * middle)); of equal scores the earlier token.

    Args:
        budget: fraction of the middle in (0, 1].
    """

    forms: ClassVar[tuple[str, ...]] = ("oracle:BUDGET",)
    yardstick = True

    def __init__(self, budget: float) -> None:
        super().__init__(SINGLE, budget)

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        if len(words) != 1:
            raise arguments.NotLegal
        return cls(arguments.fraction(words[0]))

    def begin_step(self, step: DecodeStep) -> None:
        super().begin_step(step)
        assert self._plan is not None
        self._plan = replace(self._plan, kinds=(SingleTokens(),))
