"""Neighbours and their invariant: whatever runs beside a request, its tokens are the same as alone.

The functions take an `InProcess`; a test runs them in the server's process with `Child.run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from faults.inprocess import InProcess
from faults.wire import Answer, Call, Spoiled

LENGTH = 40
"""Tokens of a neighbour's prompt, and of its answer."""

SEEDS = (2, 11, 21)
"""Seeds of prompts whose answers have about thirty different tokens. The best token of each step leads by 0.04 nats, so
rounding does not change it."""

CLOSE, COARSE = 2e-3, 0.2
"""Tolerance of log probabilities in nats if another batch, or a second prefill, computes them; and in bfloat16."""


def greedy(new: int = LENGTH) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}


def words(seed: int, length: int = LENGTH) -> list[int]:
    """Ordinary words of the bundled model's language."""
    return [1, *map(int, np.random.default_rng(seed).integers(416, 512, length))]


def neighbour(which: int, **extra: Any) -> Call:
    """The first neighbour streams, the second asks for log probabilities, the third is plain."""
    wishes: tuple[dict[str, Any], ...] = ({"stream": True}, {"return_logprob": True}, {})
    return Call({"input_ids": words(SEEDS[which]), "sampling_params": greedy(), **wishes[which], **extra})


def alone(server: InProcess, which: int) -> Answer:
    if which not in server.alone:
        answer = server.ask(neighbour(which).body)
        assert answer.code == 200 and len(answer.tokens) == LENGTH, answer.message
        server.alone[which] = answer
    return server.alone[which]


def assert_as_alone(server: InProcess, answers: Sequence[Answer]) -> None:
    """Raise Spoiled if a neighbour's answer differs from its answer alone."""
    for which, answer in enumerate(answers):
        want = server.alone[which]
        if not (answer.code == 200 and answer.whole and answer.tokens == want.tokens):
            raise Spoiled(f"neighbour {which}: {answer.tokens} is not {want.tokens}; {answer.code}: {answer.message}")
        if answer.chunks:
            ends = [chunk["meta_info"]["finish_reason"] is not None for chunk in answer.chunks]
            if ends != [False] * (len(ends) - 1) + [True]:
                raise Spoiled(f"neighbour {which} has other than one final chunk: {ends}")
        pairs = zip(
            answer.meta.get("output_token_logprobs") or [], want.meta.get("output_token_logprobs") or [], strict=True
        )
        close = CLOSE if server.args.dtype == "float32" else COARSE
        if any(abs(got[0] - was[0]) > close for got, was in pairs):
            raise Spoiled(f"neighbour {which} has other log probabilities")


def beside(
    server: InProcess, calls: Sequence[Call], neighbours: int = 2, check: bool = True, patience: float | None = None
) -> list[Answer]:
    """Answers to `calls`, which are sent beside neighbours.

    Raises:
        Spoiled: a neighbour's answer differs from its answer alone, or something is lost.
        AssertionError: the answer to a call is incomplete.
    """
    for which in range(neighbours):
        alone(server, which)
    answers = server.together([*map(neighbour, range(neighbours)), *calls], patience)
    assert_as_alone(server, answers[:neighbours])
    if check:
        server.idle_check()
    guilty = answers[neighbours:]
    for call, answer in zip(calls, guilty, strict=True):
        whole = answer.status and answer.whole
        assert whole or call.hang_up is not None, f"the answer is cut: {answer.reason}; {call}; {answer.message}"
    return guilty


def running(call: Call, at: int = 5) -> Call:
    """The same call, sent while the neighbours decode."""
    return replace(call, at=call.at + at)
