"""Long answers: the same text forced for most of a window, after a short prompt and after a long one.

A policy that looks at a prompt once, at its end, may know less and less about what follows. `kl_by_span` of a row has
the divergence against the distance from the end of the prompt.
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
        """A prompt of a quarter of the window, and one of three quarters; the rest is forced. Else as the base's."""
        texts = [task for task in super().tasks(codec, data) if isinstance(task, Text)]
        if not texts:
            raise MissingData("Suite 'long' needs a text: name a UTF-8 file or a folder of *.txt by --data.")
        parts = (("short_prompt", 0.75), ("long_prompt", 0.25))
        return [replace(text, name=name, answer=answer) for text in texts for name, answer in parts]
