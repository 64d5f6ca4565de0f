"""Bounds of request fields beyond SGLang's own checks: one entry a field."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

TOP_LOGPROBS = 1000
"""Most alternatives per position. Sorting and sending them delays every other request."""

LOGPROBS = 1_000_000
"""Most log probabilities of prompt tokens, over all positions. They take about a second, during which every other
request waits."""

SAMPLES = 128
"""Most answers to one prompt (`n`)."""

ANSWERS = 4096
"""Most answers to all prompts of a request with `n` above 1."""

GRAMMAR_BYTES = 1 << 16
"""Longest text of a grammar in bytes. It compiles within a few seconds, in another thread."""

LARGEST_BIAS = 1e30
LEAST_PENALTY = 1e-6


class Bound(NamedTuple):
    """The legal values of a field.

    Attributes:
        path: of the field in TokenizedGenerateReqInput.
        legal: tests a value. takes: completes "is X, but ".
    """

    path: str
    legal: Callable[[Any], bool]
    takes: str


def _between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: low <= value <= high


def _all(legal: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda values: all(map(legal, values))


def of_model(vocabulary: int) -> Sequence[Bound]:
    """The bounds for a model with tokens from 0 to `vocabulary` - 1. None is always legal."""
    token, tokens = _between(0, vocabulary - 1), f"takes tokens from 0 to {vocabulary - 1}"
    most = min(TOP_LOGPROBS, vocabulary)
    return (
        Bound("sampling_params.stop_token_ids", _all(token), tokens),
        Bound("token_ids_logprob", _all(token), tokens),
        Bound("top_logprobs_num", _between(0, most), f"takes numbers from 0 to {most}"),
        Bound("logprob_start_len", lambda value: value >= -1, "takes -1 or a position of the prompt"),
        Bound(
            "sampling_params.logit_bias",
            lambda biases: all(abs(bias) <= LARGEST_BIAS for bias in biases.values()),
            f"takes biases from -{LARGEST_BIAS:g} to {LARGEST_BIAS:g}",
        ),
        Bound(
            "sampling_params.repetition_penalty",
            lambda value: value >= LEAST_PENALTY,
            f"takes numbers from {LEAST_PENALTY:g} to 2",
        ),
        Bound("sampling_params.n", _between(1, SAMPLES), f"takes numbers from 1 to {SAMPLES}"),
        Bound("sampling_params.stream_interval", lambda value: value >= 1, "takes numbers from 1"),
        *(
            Bound(
                f"sampling_params.{grammar}",
                lambda text: len(text.encode()) <= GRAMMAR_BYTES,
                f"takes at most {GRAMMAR_BYTES} bytes",
            )
            for grammar in ("json_schema", "regex", "ebnf", "structural_tag")
        ),
    )


def problems(request: Any, bounds: Sequence[Bound]) -> Iterator[str]:
    """One sentence for each field of a request, a TokenizedGenerateReqInput, that is out of bounds."""
    for path, legal, takes in bounds:
        value = request
        for name in path.split("."):
            value = getattr(value, name)
        if value is not None and not legal(value):
            yield f"{path.removeprefix('sampling_params.')} is {_shown(value)}, but {takes}."
    positions = 0 if request.input_ids is None else len(request.input_ids)
    if request.return_logprob and request.logprob_start_len >= 0:
        positions = max(positions - request.logprob_start_len, 0)
        each = max(request.top_logprobs_num or 0, len(request.token_ids_logprob or ()))
        if positions * each > LOGPROBS:
            yield (
                f"logprobs of {each} tokens at {positions} positions of the prompt are more than {LOGPROBS}; ask for "
                "fewer tokens, or set logprob_start_len."
            )


def embedding_problem(embeds: Any, width: int) -> str | None:
    """None, or what is wrong with a prompt of embeddings.

    Args:
        width: the model's hidden size.
    """
    if not isinstance(embeds, list) or not embeds:
        return "input_embeds takes a list of embeddings, one for each token."
    for i, row in enumerate(embeds):
        if not isinstance(row, list) or len(row) != width:
            return f"embedding {i} of input_embeds is no list of {width} numbers, which this model takes."
        if not all(isinstance(x, float | int) and math.isfinite(x) for x in row):
            return f"embedding {i} of input_embeds has a value that is no finite number."
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
