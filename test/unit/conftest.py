"""Settings of the unit tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import settings

# A few tests use what another one has made: its folder need not be collected before.
sys.path += sorted(str(path) for path in Path(__file__).parent.iterdir() if path.is_dir())

# The tests' tensors are small: torch's thread pool would spend its time waiting for itself, and for the workers under
# test, which want the same cores.
torch.set_num_threads(1)

# A deadline measures the machine, not the code.
settings.register_profile("fluxion", deadline=None, max_examples=examples(100))
settings.load_profile("fluxion")


@pytest.fixture
def server_args(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's ServerArgs; those with the flag put a hook of their own in place of Python's for exceptions."""
    from sglang.srt.server_args import ServerArgs

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return ServerArgs
