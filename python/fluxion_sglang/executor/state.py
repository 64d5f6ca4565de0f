"""The memory that policies may remember requests in: what is promised to whom, and where it ends."""

from __future__ import annotations

import weakref
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
        self._held: weakref.WeakSet[Policy] = weakref.WeakSet()

    def hold(self, policy: Policy) -> bool:
        """Whether there is room for what the policy keeps whoever asks. It has that until nobody has the policy."""
        if policy in self._held:
            return True
        size = policy.holds(self._world)
        if self.taken + size > self.limit:
            return False
        self.taken += size
        self._held.add(policy)
        weakref.finalize(policy, self._let_go, size).atexit = False
        return True

    def _let_go(self, size: int) -> None:
        self.taken -= size

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

    def held(self, policy: Policy) -> int:
        """Bytes that the policy has whoever asks."""
        return policy.holds(self._world) if policy in self._held else 0

    def missing(self, row: int, policy: Policy, tokens: int, held: bool = False) -> int:
        """Bytes that have to come free before the policy may remember the request in `row`. held: as `too_large`."""
        more = policy.remembers(self._world, tokens) - self._rows.get(row, 0)
        if not held and policy not in self._held:
            more += policy.holds(self._world)
        return self.taken + more - self.limit

    def too_large(self, policy: Policy, tokens: int, held: bool = False) -> bool:
        """Whether a request of so many tokens would find no room under the policy if it were alone.

        Args:
            held: the policy is the server's own; what it keeps whoever asks is not counted.
        """
        size = policy.remembers(self._world, tokens)
        return size + (0 if held else policy.holds(self._world)) > self.limit

    def give_back(self, row: int) -> None:
        """The request in `row` has ended."""
        self.taken -= self._rows.pop(row, 0)
