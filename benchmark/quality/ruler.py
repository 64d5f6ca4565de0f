"""RULER (Hsieh et al., arXiv 2404.06654), all thirteen tasks, in two languages.

`ruler_definitions` holds the published parameters of the tasks. `ruler_text` writes them as English for real models,
and `ruler_symbolic` in the language of the bundled model, which has no documents to read (qa_1, qa_2). Scores are
RULER's: the share of references in the output; for documents, whether any is.
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
        questions: maximum number of questions of the symbolic form about one document (only the multikey tasks have
            several). They share the document's prefill, so more of them are cheaper samples, but not independent ones.
    """

    name = "ruler"
    lengths = True

    def __init__(self, questions: int = 1) -> None:
        if questions < 1:
            raise ValueError(f"A document is asked 1 question or more, not {questions}.")
        self._questions = questions

    def tasks(self, codec: Codec, data: Path | None) -> list[Task]:
        """All tasks in the codec's language.

        Args:
            data: folder with the files of `ruler_documents` (for qa_1 and qa_2, which raise MissingData without them
                when they make samples) and of `ruler_words` (essays; without them prose is generated, and
                `meta["haystack"]` of the samples says "generated").
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
        """See `Task`. Prompt and answer together have at most `length` tokens, and at least 99% of it.

        Raises:
            MissingData: a file or package is missing.
            ValueError: the length is missing or too short for the task.
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
