"""Two thread pools on the same cores: keep the idle one quiet."""

from __future__ import annotations

import os

SPINS = "3000"
"""Pauses of libgomp's threads, 20 to 100 us; it goes before OMP_WAIT_POLICY."""


def wait_passively() -> None:
    """Let idle OpenMP threads sleep soon in processes started from here on, unless the user has decided otherwise.

    PyTorch's OpenMP threads spin for milliseconds after every parallel region, on the cores where the workers have
    begun the layer's attention. But where they never spin, each operation of a layer waits for them to be woken, which
    takes longer than a small one computes. So they spin for as long as it takes to get from one to the next, or, in
    another runtime than libgomp (PyTorch's), not at all. The runtime reads this when it is loaded, so it must be set
    before torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
