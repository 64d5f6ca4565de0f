"""RULER (Hsieh et al., arXiv 2404.06654), all thirteen tasks, in two languages.

`ruler_definitions` has the tasks' parameters, as published; `ruler_text` writes them as English for real models and
`ruler_symbolic` in the language of the bundled one, which has no documents to read (qa_1, qa_2). Scores are RULER's:
the share of references in the output, for documents whether any is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import ruler_symbolic, ruler_text
from .base import Codec, Sample, Suite, Task
from .metrics import match_all, match_all_symbols, match_part
from .ruler_definitions import DEFINITIONS, Asked, Definition, Documents, Draw


class Ruler(Suite):
    """See the module.

    Args:
        questions: how many questions of the symbolic form one document is asked, where the task has so many (only the
            multikey tasks do). A document's prefill is shared, so more of them are cheaper samples, but not
            independent ones.
    """

    name = "ruler"
    lengths = True

    def __init__(self, questions: int = 1) -> None:
        if questions < 1:
            raise ValueError(f"A document is asked 1 question or more, not {questions}.")
        self._questions = questions

    def tasks(self, codec: Codec, data: Path | None) -> list[Task]:
        """All tasks that the codec's language has.

        Args:
            data: folder with the files of `ruler_documents` (qa_1 and qa_2; without them, these two raise MissingData
                when they make samples, and the others are as always) and of `ruler_words` (essays; without them, prose
                is made up, and the samples' `meta["haystack"]` says "generated").
        """
        if codec.symbolic:
            return [
                SymbolicTask(name, definition, self._questions)
                for name, definition in DEFINITIONS.items()
                if not isinstance(definition, Documents)
            ]
        return [TextTask(name, definition, data) for name, definition in DEFINITIONS.items()]


class _RulerTask(Task):
    def __init__(self, name: str, definition: Definition) -> None:
        self.name = name
        self.definition = definition

    def samples(self, codec: Codec, length: int | None, count: int, seed: int) -> list[Sample]:
        """See `Task`; prompt and answer fill `length` together, to one percent and never more.

        Raises:
            MissingData: a file or package is not there.
            ValueError: no length is given, or one that holds no such task.
        """
        if length is None:
            raise ValueError(f"Task {self.name} needs a length.")
        samples: list[Sample] = []
        index = 0
        while len(samples) < count:
            draw = Draw(seed, self.name, length, index)
            document = self._document(codec, draw)
            shared = f"{self.name}/{length}/{seed}/{index}" if len(document) > 1 else ""
            for i, asked in enumerate(document):
                meta = {**asked.meta, "length": length}
                samples.append(
                    Sample(f"{index}.{i}", asked.prompt, asked.references, asked.max_new_tokens, shared, meta)
                )
            index += 1
        return samples[:count]

    def _document(self, codec: Codec, draw: Draw) -> Sequence[Asked]:
        raise NotImplementedError


class SymbolicTask(_RulerTask):
    """A task in the language of the bundled model; every sample has exactly the wanted length."""

    def __init__(self, name: str, definition: Definition, questions: int) -> None:
        super().__init__(name, definition)
        self._questions = questions

    def _document(self, codec: Codec, draw: Draw) -> Sequence[Asked]:
        return ruler_symbolic.write(self.definition, draw, self._questions)

    def score(self, sample: Sample, output: str) -> float:
        return match_all_symbols(output, sample.references)


class TextTask(_RulerTask):
    """A task in English."""

    def __init__(self, name: str, definition: Definition, data: Path | None) -> None:
        super().__init__(name, definition)
        self._data = data

    def _document(self, codec: Codec, draw: Draw) -> Sequence[Asked]:
        return [ruler_text.write(self.definition, codec, draw, self._data)]

    def score(self, sample: Sample, output: str) -> float:
        match = match_part if isinstance(self.definition, Documents) else match_all
        return match(output, sample.references)
