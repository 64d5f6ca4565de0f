"""Settings of the unit tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import settings

# Some tests use objects of another test's module, whose folder may not have been collected yet.
sys.path += sorted(str(path) for path in Path(__file__).parent.iterdir() if path.is_dir())

# The tests' tensors are small: torch's thread pool would mostly wait, and compete with the workers under test for
# cores.
torch.set_num_threads(1)

# A deadline measures the machine, not the code.
settings.register_profile("fluxion", deadline=None, max_examples=examples(100))
settings.load_profile("fluxion")


@pytest.fixture
def server_args(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's ServerArgs. With the flag they replace Python's exception hook, which this restores."""
    from sglang.srt.server_args import ServerArgs

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return ServerArgs
