"""What a test does that has no GPU."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip(why: str) -> NoReturn:
    """Skip the test; with FLUXION_NEEDS_GPU=1, of `make gpu`, fail it: a GPU and its tools have to be there."""
    if os.environ.get("FLUXION_NEEDS_GPU"):
        pytest.fail(why)
    pytest.skip(why)
