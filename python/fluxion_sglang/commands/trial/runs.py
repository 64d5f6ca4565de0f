"""One run: prompts that decode together on a server, what they took and read, and whether two runs said the same.

Times are a client's: the arrivals of streamed tokens. Prompts of a timed decode run are in the radix tree, so that all
requests of a batch begin at once.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fluxion_sglang import wishes
from fluxion_sglang.commands.serving import RequestFailed, Server
from fluxion_sglang.commands.trial.results import OFF, Same


class Counters:
    """Growth of the server's counters over runs."""

    def __init__(self) -> None:
        self._grown: dict[str, float] = {}

    def add(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Add a run's: `Server.settled` before it and after it."""
        for name, value in after.items():
            self._grown[name] = self._grown.get(name, 0.0) + value - before.get(name, 0.0)

    def _total(self, name: str) -> float:
        return self._grown.get(f"fluxion_{name}_total", 0.0)

    @property
    def share(self) -> float:
        """Of the middle that heads read; 0 where there was no middle."""
        middle = self._total("middle_tokens")
        return self._total("read_tokens") / middle if middle else 0.0

    def bytes_per_token(self, layers: int) -> float:
        """Bytes that a decode step of one request read, on one rank; runs of a single request only."""
        steps = self._total("layers") / layers
        return (self._total("tile_bytes") + self._total("metadata_bytes")) / steps if steps else 0.0


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
        RequestRefused, RequestFailed: as of `Server.stream`.
    """
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": new, "ignore_eos": not stop}
    if policy != OFF:
        sampling["custom_params"] = {wishes.POLICY: policy}
    arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    for piece in server.stream(prompts, sampling):
        arrivals[piece.request].append((piece.after, len(piece.tokens)))
        tokens[piece.request] = piece.tokens
    if not all(arrivals):
        raise RequestFailed("the server ended a request without a token")
    first = max(mine[0][0] for mine in arrivals)
    return Run(first, [step for mine in arrivals for step in _paces(mine, first)], tokens)


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


def compare(
    server: Server, length: int, prompts: Sequence[Sequence[int]], off: list[list[int]], full: list[list[int]]
) -> list[Same]:
    """Greedy tokens of policy `full` beside those of SGLang without the flag: one row a prompt.

    Args:
        server: without the flag; it is asked what it thought of where two outputs part.
        off, full: outputs of the prompts.
    """
    rows = []
    for prompt, left, right in zip(prompts, off, full, strict=True):
        size = min(len(left), len(right))
        agree = next((i for i in range(size) if left[i] != right[i]), size)
        gap = None if agree == size else _gap(server, [*prompt, *left[:agree]])
        rows.append(Same(length, size, agree, gap))
    return rows


def _gap(server: Server, prompt: list[int]) -> float:
    """Nats between the two most probable next tokens."""
    reply = server.generate(
        {"temperature": 0, "max_new_tokens": 1}, input_ids=prompt, return_logprob=True, top_logprobs_num=2
    )
    best, second = (entry[0] for entry in reply["meta_info"]["output_top_logprobs"][0][:2])
    return float(best - second)
