"""Long answers: the same text forced for most of a window, after a short prompt and after a long one.

A policy that looks at a prompt once, at its end, may know less and less about what follows. `kl_by_span` of a row has
the divergence against the distance from the end of the prompt.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .base import Codec, MissingData, Suite, Task
from .perplexity import Perplexity, Text


class Long(Suite):
    """Perplexity of long answers in the text given as `data`."""

    name = "long"
    lengths = True

    def tasks(self, codec: Codec, data: Path | None) -> list[Task]:
        """A prompt of a quarter of the window, and one of three quarters; the rest is forced.

        Args:
            data: a text file (UTF-8), or a folder with *.txt.

        Raises:
            MissingData: there is no text.
        """
        if data is None:
            raise MissingData("Suite 'long' needs a text: name a UTF-8 file or a folder of *.txt by --data.")
        (text,) = Perplexity().tasks(codec, data)
        assert isinstance(text, Text)
        return [replace(text, name="short_prompt", answer=0.75), replace(text, name="long_prompt", answer=0.25)]
