"""Chooses lengths, documents and steps that fit into the time, from measured times of prefill and decode steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fluxion_sglang.commands.trial.results import Effort, TrialError

SHORTEST: Final = 1024
"""Shortest prompts. Shorter ones have hardly any middle."""

SPARE: Final = 192
"""Positions of the model that a length leaves free, for the steps of a timed run. SGLang never uses the last two."""

# Efforts in falling order, with the length that the longest prompts must reach; else the next effort is tried.
_EFFORTS: Final = (
    (Effort(documents=4, forced=128, steps=24, rounds=2), 8192),
    (Effort(documents=4, forced=64, steps=16, rounds=1), 2048),
    (Effort(documents=2, forced=64, steps=12, rounds=1), 1024),
    (Effort(documents=1, forced=64, steps=8, rounds=1), 1024),
)
# Target time of a run with the flag, and its most steps.
_RUN_S, _MOST_STEPS = 0.8, 128
_SUFFIX = 64  # tokens of a prompt that are no cache hit, because of whole pages
_OFF = 4.0  # estimated ratio of a decode step without the flag to one with it
_LOADED = 1.3  # factor by which steps and prefills of long prompts exceed the probe's prediction


@dataclass(frozen=True)
class Pace:
    """Seconds of a prefill of n tokens, linear * n + square * n^2, and of a decode step."""

    linear: float
    square: float
    step: float

    def prefill(self, tokens: int) -> float:
        return self.linear * tokens + self.square * tokens * tokens


class Clock:
    """Time since the start of a trial."""

    def __init__(self, minutes: float) -> None:
        self.limit = minutes * 60
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        return self.limit - self.elapsed


def through(probes: Sequence[tuple[int, float]], step: float) -> Pace:
    """The curve through one or two probes (tokens, seconds of prefill); both terms are at least 0."""
    (n, t), *rest = probes
    if not rest:
        # One point does not determine the square: assume equal terms at 8 times the length.
        return Pace(t / n, t / n / (8 * n), step)
    ((m, u),) = rest
    square = max((u / m - t / n) / (m - n), 0.0)
    return Pace(max(u / m - square * m, 0.0), square, step)


def cost(pace: Pace, lengths: Sequence[int], effort: Effort, policies: int) -> float:
    """Estimated seconds of the measurements, with the flag and without."""
    prefills = sum(2 * effort.documents * pace.prefill(length) for length in lengths)
    runs = effort.rounds * len(effort.batches)
    timed = policies * steps_of(pace, effort) + _OFF * effort.steps
    steps = len(lengths) * (runs * timed + policies * effort.forced)
    suffixes = len(lengths) * (policies + 2) * effort.documents * pace.prefill(_SUFFIX)
    return _LOADED * (prefills + steps * pace.step + suffixes)


def steps_of(pace: Pace, effort: Effort) -> int:
    """Steps of a timed run with the flag: more of short steps, so that client delays are small compared to the run."""
    return max(effort.steps, min(_MOST_STEPS, int(_RUN_S / pace.step) if pace.step > 0 else _MOST_STEPS))


def choose(
    pace: Pace, seconds: float, longest: Callable[[int], int], policies: int, asked: Sequence[int] = ()
) -> tuple[list[int], Effort]:
    """Lengths and effort that take about `seconds`; the smallest if nothing fits.

    Args:
        longest: longest length for model and host pool, by the number of documents.
        asked: lengths given by the user; then only the effort is chosen.
    """
    for effort, wanted in _EFFORTS:
        top = longest(effort.documents)
        if asked:
            if top >= max(asked) and cost(pace, asked, effort, policies) <= seconds:
                return list(asked), effort
            continue
        if top < SHORTEST:
            continue
        for last in reversed([SHORTEST << i for i in range(32) if SHORTEST << i < top] + [top]):
            lengths = spread(last)
            if last >= min(wanted, top) and cost(pace, lengths, effort, policies) <= seconds:
                return lengths, effort
    return list(asked) or [SHORTEST], _EFFORTS[-1][0]


def spread(longest: int) -> list[int]:
    """A length, and a quarter and a sixteenth of it."""
    rounded = 1 << (longest - 1).bit_length()
    return sorted({longest, *(part for part in (rounded // 4, rounded // 16) if SHORTEST <= part < longest)})


def parse_lengths(text: str) -> list[int]:
    """Parse 2k,8192 to numbers; [] for "". Raises TrialError."""
    lengths = set()
    for word in filter(None, (part.strip().lower() for part in text.split(","))):
        digits, factor = (word[:-1], 1024) if word.endswith("k") else (word, 1)
        if not digits.isdecimal() or int(digits) * factor < SHORTEST:
            raise TrialError(
                f"--lengths has {word!r}; give numbers of tokens from {SHORTEST} up, such as 2k,8k (k is 1,024)."
            )
        lengths.add(int(digits) * factor)
    return sorted(lengths)


def most_documents() -> int:
    return max(effort.documents for effort, _ in _EFFORTS)
