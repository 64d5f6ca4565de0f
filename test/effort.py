"""How hard property tests try: FLUXION_TEST_EFFORT, 1 where it is not set."""

from __future__ import annotations

import os

EFFORT = float(os.environ.get("FLUXION_TEST_EFFORT") or 1)


def examples(usual: int) -> int:
    """How many examples a property test takes that takes `usual` ones at effort 1; at least 2."""
    return max(2, round(usual * EFFORT))
