"""Which prompt is next: the shortest rest first, and the oldest one at least every fourth pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

TURN: Final = 4
"""The oldest prompt is in at least one of TURN passes. The prompt under way gets at least 1/TURN of a pass's tokens."""


def rest(request: Any) -> int:
    """Tokens of a request's prompt that are to be computed, as far as its last look into the radix tree tells."""
    return max(len(request.origin_input_ids) + len(request.output_ids) - int(request.num_matched_prefix_tokens), 1)


class Turns:
    """Counts the passes without the oldest prompt. Everything follows from the batches, so all ranks count alike.

    Args:
        arrival: a number of a request that is larger for one that came later.
        rank: priority of a request, the lowest first; those of another one have no turn before it.
    """

    def __init__(self, arrival: Callable[[Any], int], rank: Callable[[Any], float]) -> None:
        self._arrival, self._rank = arrival, rank
        self._without = 0

    def oldest(self, requests: Iterable[Any]) -> Any | None:
        """The one that has waited longest, of those of the highest priority."""
        return min(requests, key=lambda request: (self._rank(request), self._arrival(request)), default=None)

    @property
    def due(self) -> bool:
        """Whether the next pass is the oldest prompt's. It stays so until that prompt is in one: a prompt that finds no
        room keeps its place before those that would take it."""
        return self._without >= TURN - 1

    def passed(self, oldest: Any, ran: Sequence[Any]) -> None:
        """A pass of the prompts `ran` has begun."""
        self._without = 0 if any(request is oldest for request in ran) else self._without + 1

    def sort(self, waiting: list[Any], first: Any | None) -> None:
        """Put the queue in order. first: the prompt whose turn it is; None: by priority and rest alone."""
        waiting.sort(
            key=lambda request: (self._rank(request), request is not first, rest(request), self._arrival(request))
        )

    def before(self, one: Any, other: Any) -> bool:
        """Whether `one` is to be computed before `other`, by priority and rest."""
        return (self._rank(one), rest(one)) < (self._rank(other), rest(other))


def share(budget: int, page: int) -> int:
    """Tokens of a pass that prompts may have beside the one under way."""
    return max(budget - max(budget // TURN, page), 0) // page * page
