"""Keeps PyTorch's OpenMP threads from spinning on the cores of the engine's workers."""

from __future__ import annotations

import os

SPINS = "3000"
"""Spins of an idle libgomp thread before it sleeps, 20 to 100 us. It overrides OMP_WAIT_POLICY."""


def wait_passively() -> None:
    """Let idle OpenMP threads of processes started from here on sleep soon, unless the user has set OMP_WAIT_POLICY.

    PyTorch's OpenMP threads spin for milliseconds after every parallel region, on cores where the workers already
    compute the layer's attention. Without any spinning, every operation pays for waking the threads, which takes longer
    than a small operation computes. With libgomp (PyTorch's runtime) they therefore spin just long enough to reach the
    next operation; with other runtimes they do not spin. The runtime reads these variables when it is loaded, so they
    must be set before torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
