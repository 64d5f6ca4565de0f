"""Training data of a predictor: sequences, the selection of tokens as decode steps, and the recorded samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from fluxion_sglang.predictor.features import BUDGETS, COUNT, INDEX
from fluxion_sglang.predictor.measure import BLOCK_SIZES
from fluxion_sglang.training import recorder
from fluxion_sglang.training.scores import Samples

SEGMENT: Final = 4096
STEPS: Final = 8
"""STEPS random steps are taken from every SEGMENT tokens of a text (Fluxion, section 7)."""

ANSWER_STEPS: Final = 24
"""Most steps taken from an answer."""


class Encode(NamedTuple):
    """Converts text to token ids. prompt: like a server does; answer: for a continuation, without special tokens."""

    prompt: Callable[[str], list[int]]
    answer: Callable[[str], list[int]]


def encode_with(tokenize: Callable[..., list[int]]) -> Encode:
    """Make an `Encode` from a tokenizer's `encode`, which adds special tokens unless `add_special_tokens` is false."""

    def prompt(text: str) -> list[int]:
        ids, bare = tokenize(text), tokenize(text, add_special_tokens=False)
        # Drop special tokens after the text, because they would end it.
        start = next((i for i in range(len(ids) - len(bare) + 1) if ids[i : i + len(bare)] == bare), None)
        return ids if start is None or not bare else ids[: start + len(bare)]

    return Encode(prompt, lambda text: tokenize(text, add_special_tokens=False))


class DataError(ValueError):
    """The data cannot be used. The message is one sentence that says where and why."""


@dataclass(frozen=True)
class TokenSequence:
    """A sequence of the training data.

    Attributes:
        tokens: token ids, the answer's included.
        answer: number of tokens at the end that are an answer; 0 for a text.
    """

    tokens: tuple[int, ...]
    answer: int = 0


def read_sequences(path: Path, encode: Encode, room: int) -> list[TokenSequence]:
    """The sequences of a JSONL file.

    A line is an object with `input_ids` or `text`, and optionally an answer as `answer_ids` or `answer`; or a line of
    LongBench-V2 (`context`, `question`, `choice_A` to `choice_D`, `answer`), which becomes a text. Texts are cut at
    `room` tokens.

    Raises:
        DataError: the file is missing, a line is none of these, or one with an answer has more than `room` tokens.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); give a JSONL file, one sequence a line.") from None
    found = [_sequence(line, f"{path}:{number}", encode, room) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DataError(f"{path} has no sequences; give a JSONL file, one sequence a line.")
    return found


def _sequence(line: str, where: str, encode: Encode, room: int) -> TokenSequence:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON ({error.msg}); write one object a line.") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is no object; write one with `text` or `input_ids`.")
    if "choice_A" in row and "context" in row:
        choices = "\n".join(f"({letter}) {row.get('choice_' + letter, '')}" for letter in "ABCD")
        text = f"{row['context']}\n\n{row.get('question', '')}\n{choices}"
        return TokenSequence(tuple(encode.prompt(text))[:room])
    prompt = _tokens(row, "input_ids", "text", where, encode.prompt)
    if prompt is None:
        raise DataError(f"{where} has neither `text` nor `input_ids`; give one of the two.")
    answer = _tokens(row, "answer_ids", "answer", where, encode.answer) or ()
    if answer and len(prompt) + len(answer) > room:
        raise DataError(
            f"{where} has {len(prompt) + len(answer)} tokens, its answer included, and the model has room for {room}; "
            "shorten the prompt or leave the line out."
        )
    return TokenSequence((*prompt, *answer)[:room], len(answer))


def _tokens(
    row: dict[str, Any], ids: str, text: str, where: str, encode: Callable[[str], list[int]]
) -> tuple[int, ...] | None:
    if ids in row:
        value = row[ids]
        if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
            raise DataError(f"{where}: `{ids}` is no list of token ids.")
        return tuple(value)
    if text in row:
        if not isinstance(row[text], str):
            raise DataError(f"{where}: `{text}` is no string.")
        return tuple(encode(row[text]))
    return None


def choose_steps(sequence: TokenSequence, seed: int, resident: int) -> list[tuple[int, list[int]]]:
    """Choose anchors and the steps that follow each, as positions of tokens in rising order.

    An answer's steps have the prompt's last token as the anchor. The rest has `STEPS` random steps in every segment of
    `SEGMENT` tokens, with the segment's first token as the anchor (Fluxion, section 7).

    Args:
        resident: tokens that are always on the device; earlier steps have no middle.
    """
    rng = np.random.default_rng([seed, len(sequence.tokens)])
    prompt = len(sequence.tokens) - sequence.answer
    chosen = []
    for start in range(0, prompt, SEGMENT):
        first, stop = max(start, resident) + 1, min(start + SEGMENT, prompt)
        if stop - first >= STEPS:
            steps = rng.choice(np.arange(first, stop), STEPS, replace=False)
            chosen.append((max(start, resident), sorted(int(step) for step in steps)))
    # There is no decode step after the last token of an answer.
    answer = np.arange(max(prompt, resident + 1), len(sequence.tokens) - 1)
    if sequence.answer and len(answer):
        steps = rng.choice(answer, min(ANSWER_STEPS, len(answer)), replace=False)
        chosen.append((prompt - 1, sorted(int(step) for step in steps)))
    return chosen


def with_steps(sequences: Sequence[TokenSequence], resident: int) -> list[int]:
    """Indices of the sequences with at least one step; this does not depend on the seed."""
    return [i for i, sequence in enumerate(sequences) if choose_steps(sequence, 0, resident)]


def fit_line(budgets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The line that the predictor learns for a head's least budgets (Fluxion, Eq. 1): bgt(blk) = bgt0 + k log2 blk.

    bgt0 is the budget for blocks of one token, as in the paper. k is the least-squares fit to the other sizes.

    Args:
        budgets: [..., 5], as `Measurement.budgets`.

    Returns:
        bgt0 [...], k [...], in the dtype of `budgets`.
    """
    x = torch.tensor(BLOCK_SIZES, dtype=budgets.dtype, device=budgets.device).log2()
    bgt0 = budgets[..., 0]
    k = ((budgets - bgt0[..., None]) * x).sum(-1) / x.square().sum()
    return bgt0, k


def recorded(folder: Path, sequences: Iterable[int], layers: int) -> Iterator[tuple[int, recorder.Samples]]:
    """Iterate over the recorded samples of some sequences: index and samples, one layer at a time."""
    for sequence in sequences:
        for layer in range(layers):
            if recorder.path(folder, sequence, layer).exists():
                yield sequence, recorder.read(folder, sequence, layer)


def table(folder: Path, sequences: Iterable[int], layers: int, tau: float) -> Samples:
    """The recorded training samples for one tau, one per head.

    Raises:
        DataError: nothing was recorded.
    """
    at = recorder.TAUS.index(tau)
    parts: list[Samples] = []
    for sequence, found in recorded(folder, sequences, layers):
        features = torch.from_numpy(found.features.copy())
        # The features were recorded for the first criterion; these columns depend on it.
        features[..., BUDGETS] = torch.from_numpy(found.anchor_budgets[..., at, 1:])
        least = torch.from_numpy(found.budgets[..., at, :].copy()).reshape(-1, 5)
        bgt0, k = fit_line(least)
        where = torch.full((len(least),), sequence)
        parts.append(Samples(features.reshape(-1, COUNT), bgt0, k, least[:, 1:], least[:, 1] == 0, where))
    if not parts:
        raise DataError("no steps were recorded; the sequences are shorter than sinks and window together.")
    return Samples(*(torch.cat(columns) for columns in zip(*(vars(part).values() for part in parts), strict=True)))


def lse_errors(folder: Path, sequences: Iterable[int], layers: int) -> torch.Tensor:
    """[S] float64: the moment approximation of the LSE over the middle minus the exact one."""
    return torch.cat(
        [
            torch.from_numpy(found.features[..., INDEX["lse_cpu"]] - found.lse_middle).double().flatten()
            for _, found in recorded(folder, sequences, layers)
        ]
    )
