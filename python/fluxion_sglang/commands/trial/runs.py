"""Single runs: prompts that decode together on a server, their times and reads, and comparisons of runs.

Times are a client's: the arrivals of streamed tokens. Prompts of a timed decode run are cache hits, so that all
requests of a batch begin at once.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fluxion_sglang import wishes
from fluxion_sglang.commands.serving import RequestFailed, RequestRefused, Server
from fluxion_sglang.commands.trial.passages import Passage
from fluxion_sglang.commands.trial.results import OFF, Agreement, Same
from fluxion_sglang.scoring import kl
from fluxion_sglang.scoring.forced import NOTES, serialized

_BLOCK, _RESAMPLES = 16, 1000
"""Adjacent steps are correlated, so the interval resamples blocks of _BLOCK steps, _RESAMPLES times."""


class Counters:
    """Growth of the server's counters over runs."""

    def __init__(self) -> None:
        self._grown: dict[str, float] = {}

    def add(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Add the growth of a run, given `Server.settled` before and after it."""
        for name, value in after.items():
            self._grown[name] = self._grown.get(name, 0.0) + value - before.get(name, 0.0)

    def _total(self, name: str) -> float:
        return self._grown.get(f"fluxion_{name}_total", 0.0)

    @property
    def share(self) -> float:
        """Share of the middle that heads read; 0 without a middle."""
        middle = self._total("middle_tokens")
        return self._total("read_tokens") / middle if middle else 0.0

    def bytes_per_token(self, layers: int) -> float:
        """Bytes that a decode step of one request read, on one rank; valid for runs of a single request."""
        steps = self._total("layers") / layers
        return (self._total("tile_bytes") + self._total("metadata_bytes")) / steps if steps else 0.0


@dataclass(frozen=True)
class Run:
    """One batch.

    Attributes:
        first: seconds until every request has its first token.
        steps: seconds per token after that, over spans of half a run, of all requests.
        tokens: the outputs, in the order of the prompts.
    """

    first: float
    steps: list[float]
    tokens: list[list[int]]


def decode(server: Server, prompts: Sequence[Sequence[int]], policy: str, new: int) -> Run:
    """Decode greedy continuations of prompts that are sent together.

    Args:
        policy: a spec; `off` on a server without the flag.
        new: tokens of each.

    Raises:
        RequestRefused, RequestFailed: as for `Server.stream`.
    """
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
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


def forced(server: Server, passages: Sequence[Passage], policy: str, top: int) -> list[list[kl.Distribution]]:
    """The next-token distributions at the decode steps of passages, whose following tokens are forced, in one batch.

    The first token comes from the prefill, which is exact under every policy, and is left out.

    Args:
        top: tokens that a distribution lists.

    Raises:
        RequestRefused: the server ended a request. RequestFailed: it got no answer.
    """
    sampling = [
        {
            "temperature": 0,
            "max_new_tokens": len(each.following),
            "ignore_eos": True,
            "custom_params": {wishes.POLICY: policy, "forced": list(each.following), "top": top},
        }
        for each in passages
    ]
    prompts = [list(each.prompt) for each in passages]
    body = {"input_ids": prompts, "sampling_params": sampling, "custom_logit_processor": [serialized()] * len(prompts)}
    found = []
    for passage, reply in zip(passages, server.post("/generate", body), strict=True):
        meta = reply["meta_info"]
        notes = meta.get(NOTES) or []
        if len(notes) != len(passage.following):
            reason = (meta.get("finish_reason") or {}).get("message") or f"{len(notes)} tokens were decoded"
            raise RequestRefused(str(reason))
        found.append([kl.Distribution(np.asarray(ids), np.asarray(values)) for _, ids, values in notes[1:]])
    return found


def agreement(
    length: int, policy: str, full: list[list[kl.Distribution]], other: list[list[kl.Distribution]]
) -> Agreement:
    """Compare the results of `forced` under `full` and under another policy."""
    pairs = [list(zip(*both, strict=True)) for both in zip(full, other, strict=True)]
    found = [np.array([kl.divergence(one, two) for one, two in steps]) for steps in pairs]
    same = [one.likeliest == two.likeliest for steps in pairs for one, two in steps]
    blocks = [block for steps in found for block in np.array_split(steps, max(len(steps) // _BLOCK, 1))]
    sums, sizes = np.array([block.sum() for block in blocks]), np.array([len(block) for block in blocks])
    drawn = np.random.default_rng(0).integers(len(blocks), size=(_RESAMPLES, len(blocks)))
    low, high = np.percentile(sums[drawn].sum(1) / sizes[drawn].sum(1), (2.5, 97.5)).tolist()
    return Agreement(length, policy, len(same), float(sums.sum() / sizes.sum()), low, high, float(np.mean(same)))


def median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3 if seconds else float("nan")


def _paces(arrivals: Sequence[tuple[float, int]], start: float) -> list[float]:
    """Seconds per token, over every span of half the tokens.

    Single tokens may arrive in bunches, if a process between the engine and this client waits for a core.

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
    """Compare greedy tokens of policy `full` with those of SGLang without the flag, one row per prompt.

    Args:
        server: without the flag; it gives the probabilities where two outputs diverge.
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
    """Difference of the two most probable next tokens in nats."""
    reply = server.generate(
        {"temperature": 0, "max_new_tokens": 1}, input_ids=prompt, return_logprob=True, top_logprobs_num=2
    )
    best, second = (entry[0] for entry in reply["meta_info"]["output_top_logprobs"][0][:2])
    return float(best - second)
