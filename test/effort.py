"""How hard property tests try: FLUXION_TEST_EFFORT, 1 where it is not set; and the name of a case in a loop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

EFFORT = float(os.environ.get("FLUXION_TEST_EFFORT") or 1)


def examples(usual: int) -> int:
    """How many examples a property test takes that takes `usual` ones at effort 1; at least 2."""
    return max(2, round(usual * EFFORT))


@contextmanager
def case(**values: object) -> Iterator[None]:
    """What fails inside says which case of a loop it is."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {values}")
        raise
