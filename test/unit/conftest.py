"""Settings of the unit tests."""

from __future__ import annotations

import torch
from effort import examples
from hypothesis import settings

# The tests' tensors are small: torch's thread pool would spend its time waiting for itself, and for the workers under
# test, which want the same cores.
torch.set_num_threads(1)

# A deadline measures the machine, not the code.
settings.register_profile("fluxion", deadline=None, max_examples=examples(100))
settings.load_profile("fluxion")
