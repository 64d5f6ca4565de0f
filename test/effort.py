"""Effort of property tests (FLUXION_TEST_EFFORT, default 1), and names of cases in loops."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

EFFORT = float(os.environ.get("FLUXION_TEST_EFFORT") or 1)


def examples(usual: int) -> int:
    """Number of examples for a property test that runs `usual` ones at effort 1; at least 2."""
    return max(2, round(usual * EFFORT))


@contextmanager
def case(**values: object) -> Iterator[None]:
    """Add the case of a loop to exceptions raised inside."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {values}")
        raise
