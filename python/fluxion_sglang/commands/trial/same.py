"""Greedy tokens with policy `full` beside those of SGLang without the flag."""

from __future__ import annotations

from collections.abc import Sequence

from fluxion_sglang.commands.serving import Server
from fluxion_sglang.commands.trial.results import Same


def compare(
    server: Server,
    length: int,
    dtype: str,
    prompts: Sequence[Sequence[int]],
    off: list[list[int]],
    full: list[list[int]],
) -> list[Same]:
    """One row a prompt.

    Args:
        server: without the flag; it is asked what it thought of where two outputs part.
        off, full: outputs of the prompts.
    """
    rows = []
    for prompt, left, right in zip(prompts, off, full, strict=True):
        size = min(len(left), len(right))
        agree = next((i for i in range(size) if left[i] != right[i]), size)
        gap = None if agree == size else _gap(server, [*prompt, *left[:agree]])
        rows.append(Same(length, dtype, size, agree, gap))
    return rows


def _gap(server: Server, prompt: list[int]) -> float:
    """Nats between the two most probable next tokens."""
    reply = server.generate(
        {"temperature": 0, "max_new_tokens": 1}, input_ids=prompt, return_logprob=True, top_logprobs_num=2
    )
    best, second = (entry[0] for entry in reply["meta_info"]["output_top_logprobs"][0][:2])
    return float(best - second)
