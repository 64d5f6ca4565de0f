"""How tests react to a missing GPU."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip(why: str) -> NoReturn:
    """Skip the test; fail it with FLUXION_NEEDS_GPU=1 (`make gpu`), which requires a GPU and its tools."""
    if os.environ.get("FLUXION_NEEDS_GPU"):
        pytest.fail(why)
    pytest.skip(why)
