"""Two thread pools on the same cores: keep the idle one quiet."""

from __future__ import annotations

import os


def wait_passively() -> None:
    """Let idle OpenMP threads sleep in processes started from here on, unless the user has decided otherwise.

    PyTorch's OpenMP threads spin for about a millisecond after every parallel region, on the cores where the workers
    have begun the layer's attention. libgomp reads this when it is loaded, so it must be set before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
