"""Questions and documents of RULER's qa_1 (SQuAD 2.0) and qa_2 (HotpotQA), from the files as published."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .base import MissingData
from .files import find

FOLDERS: Final = ("", "ruler")
"""Folders for RULER's files, below the data folder."""


@dataclass(frozen=True)
class Question:
    """A question, its right answers, and documents by number.

    Attributes:
        documents: included in every prompt of this question; one of them has the answer.
        related: the first choice of distractors.
    """

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class Corpus:
    documents: tuple[str, ...]
    questions: tuple[Question, ...]


def read_corpus(dataset: str, data: Path | None) -> Corpus:
    """The questions of "squad" or "hotpotqa" in a folder.

    Raises:
        MissingData: the file is missing or has another format.
    """
    file, address, layout, _ = _FILES[dataset]
    return _read(dataset, find(data, FOLDERS, file, f"{address}, as published ({layout})"))


@functools.cache
def _read(dataset: str, path: Path) -> Corpus:
    _, address, layout, parse = _FILES[dataset]
    try:
        corpus = parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MissingData(f"{path} is not the file published at {address} ({layout}): {error!r}.") from None
    if not corpus.questions:
        raise MissingData(f"{path} has no questions; the file published at {address} has ({layout}).")
    return corpus


def _squad(content: Any) -> Corpus:
    documents = tuple(sorted({part["context"] for article in content["data"] for part in article["paragraphs"]}))
    number = {document: i for i, document in enumerate(documents)}
    questions = []
    for article in content["data"]:
        parts = dict.fromkeys(number[part["context"]] for part in article["paragraphs"])
        for part in article["paragraphs"]:
            own = number[part["context"]]
            related = tuple(i for i in parts if i != own)
            for asked in part["qas"]:
                if not asked["is_impossible"]:
                    answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                    questions.append(Question(asked["question"], answers, (own,), related))
    return Corpus(documents, tuple(questions))


def _hotpotqa(content: Any) -> Corpus:
    def documents_of(item: Any) -> list[str]:
        return [f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]]

    documents = tuple(sorted({document for item in content for document in documents_of(item)}))
    number = {document: i for i, document in enumerate(documents)}
    questions = [
        Question(item["question"], (item["answer"],), tuple(dict.fromkeys(number[d] for d in documents_of(item))))
        for item in content
    ]
    return Corpus(documents, tuple(questions))


_FILES: Final[dict[str, tuple[str, str, str, Callable[[Any], Corpus]]]] = {
    "squad": (
        "dev-v2.0.json",
        "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
        '{"data": [{"paragraphs": [{"context", "qas": [{"question", "is_impossible", "answers": [{"text"}]}]}]}]}',
        _squad,
    ),
    "hotpotqa": (
        "hotpot_dev_distractor_v1.json",
        "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json",
        '[{"question", "answer", "context": [[title, [sentence]]]}]',
        _hotpotqa,
    ),
}
