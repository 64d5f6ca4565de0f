"""L-Eval (An et al., ACL 2024): the 13 open-ended tasks of Fluxion's Table 3, on samples longer than 3K tokens.

Data, prompt, length of answers and metrics are the benchmark's for n-gram metrics (Baselines/llama2-chat-test.py,
Evaluation/auto_eval.py): a row's `evaluation` says F1 or ROUGE, and rows that are for human or model judges are left
out. The prompt tells how many words the reference has, because these metrics depend on the length of an answer. Three
things differ. There is no system turn: its text opens the user's. ROUGE is averaged over answers after the geometric
mean, not before (`metrics.rouge_geometric_mean`). A document that the model cannot take whole loses its end token by
token, not by steps of 250 words.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from . import metrics
from .base import Codec, Sample, Suite, Task
from .files import find, read_rows

TASKS: Final = (
    "financial_qa", "gov_report_summ", "legal_contract_qa", "meeting_summ", "multidoc_qa", "narrative_qa",
    "natural_question", "news_summ", "paper_assistant", "patent_summ", "review_summ", "scientific_qa", "tv_show_summ",
)  # fmt: skip
"""Table 3, in its order."""

LONGER_THAN: Final = 3 * 1024
MAX_NEW_TOKENS: Final = 512

_METRICS: Final[dict[str, metrics.Metric]] = {"f1": metrics.f1_english, "rouge": metrics.rouge_geometric_mean}

_SYSTEM: Final = (
    "Now you are given a very long document. Please follow the instruction after this document. These instructions may "
    "include summarizing a document, answering questions based on the document, or writing a required paragraph. "
)
_USER: Final = (
    "{system}\n\nDocument is as follows. {document} Instruction: {instruction} \n"
    "Answer this question with {words} words."
)

# Folders of the benchmark's two distributions.
_FOLDERS: Final = ("", "Open-ended-tasks", "LEval-data/Open-ended-tasks", "Generation", "LEval/Generation")
_WHERE: Final = (
    "get it from the hub's dataset L4NLP/LEval (one JSONL file a task; every row has a document in input, lists of "
    "instructions and outputs, source and evaluation)"
)
_FIELDS: Final = ("input", "instructions", "outputs", "evaluation")


@dataclass(frozen=True)
class LEvalTask(Task):
    """One data set of L-Eval: documents, each with several instructions."""

    name: str
    path: Path
    longer_than: int = LONGER_THAN

    def samples(self, codec: Codec, length: int | None, count: int, seed: int) -> list[Sample]:
        """`count` samples of more than `longer_than` tokens, or all there are.

        Documents come in a seeded order, each with all its instructions (the last one with the number still needed),
        because they share one prefill.
        """
        rows = read_rows(self.path, _FIELDS)
        chosen: list[Sample] = []
        for i in np.random.default_rng(seed).permutation(len(rows)):
            if len(chosen) >= count:
                break
            chosen += self._ask(codec, int(i), rows[i])
        return chosen[:count]

    def _ask(self, codec: Codec, number: int, row: dict[str, Any]) -> list[Sample]:
        """The samples of one document that are long enough."""
        metric = str(row["evaluation"]).lower()
        if metric not in _METRICS:
            return []
        pairs = list(zip(row["instructions"], row["outputs"], strict=True))
        prompts = _prompts(codec, row["input"], pairs)
        return [
            Sample(
                id=f"{self.name}-{number}-{k}",
                prompt=tuple(prompt),
                references=(output,),
                max_new_tokens=MAX_NEW_TOKENS,
                document=f"{self.name}-{number}",
                meta={"metric": metric},
            )
            for k, ((_, output), prompt) in enumerate(zip(pairs, prompts, strict=True))
            if len(prompt) > self.longer_than
        ]

    def score(self, sample: Sample, output: str) -> float:
        """The metric that the document's row names."""
        return metrics.best(_METRICS[sample.meta["metric"]], output, sample.references)


def _prompts(codec: Codec, document: str, pairs: list[tuple[str, str]]) -> list[list[int]]:
    """A prompt per (instruction, output). All share the longest beginning of the document that fits with each of
    them."""

    def of(document: str) -> list[list[int]]:
        fields = ({"instruction": ask, "words": len(output.split())} for ask, output in pairs)
        return [codec.chat(_USER.format(system=_SYSTEM, document=document, **field)) for field in fields]

    prompts = of(document)
    if codec.positions is None or not pairs:
        return prompts
    room = codec.positions - MAX_NEW_TOKENS
    tokens = codec.encode(document)
    while (over := max(map(len, prompts)) - room) > 0:
        tokens = tokens[: max(0, len(tokens) - over)]
        if not tokens:
            raise ValueError(f"The model takes {room} tokens before the answer; that is too few for any document.")
        prompts = of(codec.decode(tokens))
    return prompts


class LEval(Suite):
    """The open-ended tasks.

    Args:
        longer_than: samples must have more tokens than this, template included.
    """

    name = "leval"
    lengths = False

    def __init__(self, longer_than: int = LONGER_THAN) -> None:
        self.longer_than = longer_than

    def tasks(self, codec: Codec, data: Path | None) -> list[Task]:
        """The tasks, from `data`/<task>.jsonl or the folders of the benchmark's own distributions below `data`.

        Raises:
            MissingData: a file is missing.
            ValueError: the model speaks the symbolic language only.
        """
        if codec.symbolic:
            raise ValueError("L-Eval is in English; the bundled model does not speak it, so name another.")
        return [LEvalTask(name, find(data, _FOLDERS, f"{name}.jsonl", _WHERE), self.longer_than) for name in TASKS]
