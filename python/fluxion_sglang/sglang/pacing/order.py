"""Order of prompts: the shortest remaining prefill first, and the oldest prompt at least every fourth pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

TURN: Final = 4
"""The oldest prompt is in at least one of TURN passes. The prompt under way gets at least 1/TURN of a pass's tokens."""


def rest(request: Any) -> int:
    """Prompt tokens that remain to be computed, according to the last lookup in the radix tree."""
    return max(len(request.origin_input_ids) + len(request.output_ids) - int(request.num_matched_prefix_tokens), 1)


class Turns:
    """Counts the passes without the oldest prompt. It depends only on the batches, so all ranks count alike.

    Args:
        arrival: a number that increases in order of arrival.
        rank: priority of a request, the lowest number first. The oldest prompt's turn does not change that order.
    """

    def __init__(self, arrival: Callable[[Any], int], rank: Callable[[Any], float]) -> None:
        self._arrival, self._rank = arrival, rank
        self._without = 0

    def oldest(self, requests: Iterable[Any]) -> Any | None:
        """The oldest request of the highest priority, or None."""
        return min(requests, key=lambda request: (self._rank(request), self._arrival(request)), default=None)

    @property
    def due(self) -> bool:
        """Whether the next pass must contain the oldest prompt. It stays true until a pass does, so a prompt without
        room keeps its place before later ones."""
        return self._without >= TURN - 1

    def passed(self, oldest: Any, ran: Sequence[Any]) -> None:
        """Count a pass of the prompts `ran`."""
        self._without = 0 if any(request is oldest for request in ran) else self._without + 1

    def sort(self, waiting: list[Any], first: Any | None) -> None:
        """Sort the queue. first: the prompt whose turn it is; None: sort by priority and remaining prefill only."""
        waiting.sort(
            key=lambda request: (self._rank(request), request is not first, rest(request), self._arrival(request))
        )

    def before(self, one: Any, other: Any) -> bool:
        """Whether `one` precedes `other`, by priority and remaining prefill."""
        return (self._rank(one), rest(one)) < (self._rank(other), rest(other))


def share(budget: int, page: int) -> int:
    """Tokens of a pass that are left for prompts beside the one under way."""
    return max(budget - max(budget // TURN, page), 0) // page * page
