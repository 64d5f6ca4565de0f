"""LongBench (Bai et al., arXiv 2308.14508): the 14 tasks of Fluxion's Table 2, on samples longer than 8K tokens.

Prompts, lengths of answers, metrics and the treatment of each task are the benchmark's own (its config/, pred.py and
eval.py). Two things differ. The chat template counts when a prompt is cut to the model's positions. samsum does not
stop at a line break, but its score reads only the first line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from . import metrics
from .base import Codec, Sample, Suite, Task
from .files import find, read_rows

TASKS: Final = (
    "qasper", "multifieldqa_zh", "hotpotqa", "2wikimqa", "multi_news", "triviaqa", "samsum", "passage_count",
    "passage_retrieval_zh", "lcc", "musique", "dureader", "qmsum", "vcsum",
)  # fmt: skip
"""Table 2, in its order. It says "Multifield QA" and "Passage Retrieval" without a language; only with the Chinese ones
are there, as the paper counts, 9 English tasks, 4 Chinese and 1 of code."""

LONGER_THAN: Final = 8 * 1024


class Published(NamedTuple):
    """LongBench's published settings of a task.

    Attributes:
        metric: a key of `_METRICS`, or classification; with "_zh" that of Chinese text.
        max_new_tokens: length limit of an answer.
        prompt: template with `context` and `input`.
        plain: without the chat template. The benchmark found this better for chat models where they continue examples.
        first_line: only the first line of an answer counts, because models continue with more examples.
    """

    metric: str
    max_new_tokens: int
    prompt: str
    plain: bool = False
    first_line: bool = False


PUBLISHED: Final = {
    name: Published(**task)
    for name, task in json.loads(Path(__file__).with_name("longbench.json").read_text(encoding="utf-8")).items()
}
"""All 21 tasks (config/dataset2prompt.json, config/dataset2maxlen.json), verbatim, including a space before a line
break and a missing one. Another prompt would be another benchmark."""

_METRICS: Final[dict[str, metrics.Metric]] = {
    "f1": metrics.f1_english,
    "f1_zh": metrics.f1_chinese,
    "rouge": metrics.rouge_l,
    "rouge_zh": metrics.rouge_l_chinese,
    "count": metrics.count,
    "retrieval": metrics.retrieval,
    "retrieval_zh": metrics.retrieval_chinese,
    "code": metrics.code_similarity,
}

_WHERE: Final = (
    "unpack data.zip of the hub's dataset THUDM/LongBench (one JSONL file a task; every row has input, context, "
    "answers, length, dataset, language, all_classes and _id)"
)
_FIELDS: Final = ("input", "context", "answers", "all_classes", "_id")


@dataclass(frozen=True)
class LongBenchTask(Task):
    """One data set of LongBench; `samples` returns those longer than `longer_than` tokens, in a seeded order."""

    name: str
    path: Path
    longer_than: int = LONGER_THAN

    def samples(self, codec: Codec, length: int | None, count: int, seed: int) -> list[Sample]:
        """`count` of the long samples, or all there are.

        Questions about one context are adjacent, with the same `document`. A prompt is cut in the middle if it leaves
        no room for the answer in the model's positions.
        """
        rows = read_rows(self.path, _FIELDS)
        chosen: list[Sample] = []
        for i in np.random.default_rng(seed).permutation(len(rows)):
            if len(chosen) == count:
                break
            sample = self._sample(codec, rows[i])
            if sample.meta["tokens"] > self.longer_than:
                chosen.append(sample)
        # The stable sort keeps the seeded order of the documents' first questions.
        first: dict[str, int] = {}
        for place, sample in enumerate(chosen):
            first.setdefault(sample.document, place)
        return sorted(chosen, key=lambda sample: first[sample.document])

    def _sample(self, codec: Codec, row: dict[str, Any]) -> Sample:
        published = PUBLISHED[self.name]
        text = published.prompt.format(context=row["context"], input=row["input"])
        room = None if codec.positions is None else codec.positions - published.max_new_tokens
        whole, prompt = _prompt(codec, text, published.plain, room)
        return Sample(
            id=f"{self.name}-{row['_id']}",
            prompt=tuple(prompt),
            references=tuple(row["answers"]),
            max_new_tokens=published.max_new_tokens,
            document=hashlib.sha256(row["context"].encode()).hexdigest()[:16],
            meta={"tokens": whole, "classes": row["all_classes"] or []},
        )

    def score(self, sample: Sample, output: str) -> float:
        """The maximum of the task's metric over the references."""
        published = PUBLISHED[self.name]
        if published.first_line:
            output = output.lstrip("\n").split("\n")[0]
        if published.metric == "classification":
            classes = sample.meta["classes"]
            return metrics.best(lambda out, ref: metrics.classification(out, ref, classes), output, sample.references)
        return metrics.best(_METRICS[published.metric], output, sample.references)


def _prompt(codec: Codec, text: str, plain: bool, room: int | None) -> tuple[int, list[int]]:
    """Number of tokens of the whole prompt, and the prompt with its text cut in the middle to fit `room` tokens."""
    make = codec.plain if plain else codec.chat
    prompt = make(text)
    whole = len(prompt)
    if room is None or whole <= room:
        return whole, prompt
    tokens = codec.encode(text)
    half = (len(tokens) - (whole - room)) // 2
    while len(prompt) > room:  # cut ends can tokenise to more tokens than before
        if half <= 0:
            raise ValueError(f"The model takes {room} tokens before the answer; that is too few for any prompt.")
        prompt = make(codec.decode(tokens[:half]) + codec.decode(tokens[-half:]))
        half -= max(1, (len(prompt) - room) // 2)
    return whole, prompt


class LongBench(Suite):
    """The tasks `names` of LongBench.

    Args:
        names: any of the 21 that are published.
        longer_than: samples must have more tokens than this, template included.
    """

    name = "longbench"
    lengths = False

    def __init__(self, names: Sequence[str] = TASKS, longer_than: int = LONGER_THAN) -> None:
        self.names = names
        self.longer_than = longer_than

    def tasks(self, codec: Codec, data: Path | None) -> list[Task]:
        """The tasks, from `data`/<task>.jsonl or `data`/data/<task>.jsonl.

        Raises:
            MissingData: a file is missing.
            ValueError: the model speaks the symbolic language only.
        """
        if codec.symbolic:
            raise ValueError("LongBench is in English and Chinese; the bundled model speaks neither, so name another.")
        return [
            LongBenchTask(name, find(data, ("", "data"), f"{name}.jsonl", _WHERE), self.longer_than)
            for name in self.names
        ]
