"""The memory that policies may remember requests in: what is promised to whom, and where it ends."""

from __future__ import annotations

from typing import Final

from fluxion_sglang.policy.base import Policy, World

SHARE: Final = 1 / 8
"""Of the host pool's bytes: what policies may remember requests in by default."""


class StateRoom:
    """Counts, before a pass, what policies will remember of its requests. It is not in the host pool: forks of a
    document share the pool's pages, and each has a state of its own.

    Args:
        limit: bytes.
    """

    def __init__(self, world: World, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._world = world
        self._rows: dict[int, int] = {}

    def take(self, row: int, policy: Policy, tokens: int) -> bool:
        """Whether the policy may remember the request in `row` up to so many tokens. If not, what the row had stays."""
        size = policy.remembers(self._world, tokens)
        more = size - self._rows.get(row, 0)
        if more > 0:
            if self.taken + more > self.limit:
                return False
            self._rows[row] = size
            self.taken += more
        return True

    def give_back(self, row: int) -> None:
        """The request in `row` has ended."""
        self.taken -= self._rows.pop(row, 0)
