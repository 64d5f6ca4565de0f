"""One run: prompts that decode together on a server, and what they took and read.

Times are a client's: the arrivals of streamed tokens. Prompts of a timed decode run are in the radix tree, so that all
requests of a batch begin at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fluxion_sglang.commands.trial.results import OFF
from fluxion_sglang.serving import Server

_COUNTERS: Final = ("layers", "middle_tokens", "read_tokens", "tile_bytes", "metadata_bytes")


@dataclass
class Counters:
    """Growth of the engine's counters over runs."""

    values: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0.0))

    def add(self, before: dict[str, float], after: dict[str, float]) -> None:
        for name in _COUNTERS:
            key = f"fluxion_{name}_total"
            self.values[name] += after.get(key, 0.0) - before.get(key, 0.0)

    @property
    def share(self) -> float:
        """Of the middle that heads read; 0 where there was no middle."""
        return self.values["read_tokens"] / self.values["middle_tokens"] if self.values["middle_tokens"] else 0.0

    def bytes_per_token(self, layers: int) -> float:
        """Bytes that a decode step of one request read, on one rank; runs of a single request only."""
        steps = self.values["layers"] / layers
        return (self.values["tile_bytes"] + self.values["metadata_bytes"]) / steps if steps else 0.0


@dataclass(frozen=True)
class Run:
    """One batch.

    Attributes:
        first: seconds to the first token of the request that had it last.
        steps: seconds a token, over spans of half a run, of all requests, from when every request had its first.
        tokens: the outputs, in the order of the prompts.
    """

    first: float
    steps: list[float]
    tokens: list[list[int]]


def decode(server: Server, prompts: Sequence[Sequence[int]], policy: str, new: int, stop: bool = False) -> Run:
    """Greedy continuations of prompts that are sent together.

    Args:
        policy: a spec; `off` on a server without the flag.
        new: tokens of each.
        stop: whether a request may end before, at its end-of-sequence token.

    Raises:
        RequestRefused, OSError: as of `Server.stream`.
    """
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": new, "ignore_eos": not stop}
    if policy != OFF:
        sampling["custom_params"] = {"fluxion_policy": policy}
    arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    for piece in server.stream(prompts, sampling):
        arrivals[piece.request].append((piece.after, len(piece.tokens)))
        tokens[piece.request] = piece.tokens
    if not all(arrivals):
        raise OSError("the server ended a request without a token")
    first = max(mine[0][0] for mine in arrivals)
    return Run(first, [step for mine in arrivals for step in _paces(mine, first)], tokens)


def counters(server: Server) -> dict[str, float]:
    """The counters once they rest: the server answers first and counts a moment later."""
    last = server.metrics()
    for _ in range(20):
        time.sleep(0.05)
        now = server.metrics()
        if all(now.get(name) == last.get(name) for name in (f"fluxion_{counter}_total" for counter in _COUNTERS)):
            return now
        last = now
    return last


def median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3 if seconds else float("nan")


def _paces(arrivals: Sequence[tuple[float, int]], start: float) -> list[float]:
    """Seconds a token, over every span of half the tokens.

    Single tokens may arrive in bunches, where somebody between the engine and this client waits for a core.

    Args:
        arrivals: (seconds, tokens so far) of one request.
    """
    mine = [point for point in arrivals if point[0] >= start]
    span = (mine[-1][1] - mine[0][1] + 1) // 2 if mine else 0
    paces = []
    for i, (before, had) in enumerate(mine):
        later = next(((after, count) for after, count in mine[i:] if count - had >= span), None)
        if later is not None and span:
            paces.append((later[0] - before) / (later[1] - had))
    return paces
