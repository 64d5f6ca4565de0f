"""Long answers: the same text forced for most of a window, after a short and after a long prompt.

A policy that inspects a prompt once, at its end, may lose accuracy for later tokens. `kl_by_span` of a row holds the
divergence by distance from the end of the prompt.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .base import Codec, MissingData, Task
from .perplexity import Perplexity, Text


class Long(Perplexity):
    """Perplexity of long answers in the text given as `data`."""

    name = "long"

    def tasks(self, codec: Codec, data: Path | None) -> list[Task]:
        """Two tasks per text: the prompt takes a quarter or three quarters of the window, and the rest is forced."""
        texts = [task for task in super().tasks(codec, data) if isinstance(task, Text)]
        if not texts:
            raise MissingData("Suite 'long' needs a text: name a UTF-8 file or a folder of *.txt by --data.")
        parts = (("short_prompt", 0.75), ("long_prompt", 0.25))
        return [replace(text, name=name, answer=answer) for text in texts for name, answer in parts]
