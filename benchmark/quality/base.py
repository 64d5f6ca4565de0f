"""What a suite of tasks is: samples in, scores out. Nothing here knows of an engine.

A `Suite` has `Task`s, a task makes `Sample`s with a model's `Codec` and scores what the model answered. A suite is
added as a module with such a class and a line in `SUITES` of the package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fluxion_sglang.commands.codec import Codec


class MissingData(Exception):
    """A suite's data is not there; the message says in one sentence which file, where to get it, and its layout."""


@dataclass(frozen=True)
class Sample:
    """One question to a model.

    Attributes:
        id: unique within (suite, task, length, seed).
        prompt: token ids, with bos and chat template.
        references: what the task's metric compares with.
        max_new_tokens: upper bound of the answer's length, in tokens.
        document: samples of one document share a prefix: one prefill, and one cluster of the bootstrap. "": alone.
        meta: facts that JSON can hold: needles, depths, keys. `meta["targets"]`, in a suite without answers
            (perplexity), is the number of trailing tokens of the prompt that are forced one by one;
            `meta["counted"]` says which of them the score is of (indices; without it all but the first).
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
        """`count` samples; the same arguments give the same samples on every machine.

        Args:
            length: tokens of a prompt; None in a suite whose samples come as they are.
        """

    @abstractmethod
    def score(self, sample: Sample, output: str) -> float:
        """How good a decoded completion is, in [0, 1]."""


class Suite(ABC):
    """A named set of tasks.

    Attributes:
        lengths: True: samples are made at a wanted length. False: they come as they are.
    """

    name: str
    lengths: bool

    @abstractmethod
    def tasks(self, codec: Codec, data: Path | None) -> list[Task]:
        """The tasks this model can be asked.

        Args:
            data: folder with the suite's files; None where the suite needs none or its default is meant.

        Raises:
            MissingData: a file is not there.
        """
