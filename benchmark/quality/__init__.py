"""Measure the quality of sparse attention through the real serving engine: `fluxion bench quality`.

Installed as the package `fluxion_quality`.
"""

from __future__ import annotations

import importlib
from typing import Final

from .base import Codec, MissingData, Sample, Suite, Task

__all__ = ["Codec", "MissingData", "Sample", "Suite", "Task", "SUITES", "suite_named"]

# A suite's module has its name. Modules are imported late, so that a suite needs only its own dependencies.
SUITES: Final = ("ruler", "longbench", "leval", "perplexity", "long", "extraction")


def suite_named(name: str) -> Suite:
    """The suite with this name: the subclass of `Suite` in the module of this name.

    Raises:
        ValueError: there is none; the message lists all names.
    """
    if name not in SUITES:
        raise ValueError(f"There is no suite {name!r}; take one of {', '.join(SUITES)}.")
    module = importlib.import_module(f".{name}", __name__)
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Suite)]
    suite: Suite = next(kind for kind in kinds if getattr(kind, "name", None) == name)()
    return suite
