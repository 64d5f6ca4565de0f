"""Interface of a suite of tasks: samples in, scores out, independent of any engine.

A `Suite` has `Task`s. A task makes `Sample`s with a model's `Codec` and scores the model's answers. To add a suite, add
a module with such a class and its name in `SUITES` of the package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fluxion_sglang.commands.codec import Codec


class MissingData(Exception):
    """A file of a suite is missing; the message says which one, where to get it, and its layout."""


@dataclass(frozen=True)
class Sample:
    """One question to a model.

    Attributes:
        id: unique within (suite, task, length, seed).
        prompt: token ids, with bos and chat template.
        references: right answers for the task's metric.
        max_new_tokens: upper bound of the answer's length, in tokens.
        document: samples of one document share a prefix: one prefill, and one cluster of the bootstrap. "": no other
            sample.
        meta: facts that JSON can hold: needles, depths, keys. In a suite without answers (perplexity),
            `meta["targets"]` is the number of trailing tokens of the prompt that are forced one by one.
            `meta["counted"]` holds the indices of those that count for the score; by default all but the first.
    """

    id: str
    prompt: tuple[int, ...]
    references: tuple[str, ...]
    max_new_tokens: int
    document: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)


class Task(ABC):
    """One task of a suite."""

    name: str

    @abstractmethod
    def samples(self, codec: Codec, length: int | None, count: int, seed: int) -> list[Sample]:
        """`count` samples; equal arguments give equal samples on every machine.

        Args:
            length: tokens of a prompt; None in a suite whose samples have fixed lengths.
        """

    @abstractmethod
    def score(self, sample: Sample, output: str) -> float:
        """Score of a decoded completion, in [0, 1]."""


class Suite(ABC):
    """A named set of tasks.

    Attributes:
        lengths: whether samples are made for a given length; False: their lengths are fixed.
    """

    name: str
    lengths: bool

    @abstractmethod
    def tasks(self, codec: Codec, data: Path | None) -> list[Task]:
        """The tasks that suit this model.

        Args:
            data: folder with the suite's files; None: the suite needs none, or uses its default.

        Raises:
            MissingData: a file is missing.
        """
