"""Training in a process of its own, beside a server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from safetensors.torch import load, save

from fluxion_sglang.learning.learned import Learned
from fluxion_sglang.learning.measured import Measured, pack

PROGRAM: Final = "fluxion_sglang.training.live"
"""It imports what a server need not."""

TIMEOUT_S: Final = 3600
"""A process that takes longer is ended."""


def train_apart(requests: Sequence[Measured], tau: float) -> Learned:
    """What `training/live.py` makes of them, at a low priority.

    Raises:
        RuntimeError: it failed; the message is what it said last. subprocess.TimeoutExpired: it took too long.
    """
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, repr(tau)],
        input=save(pack(requests)),
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode < 0:
        raise RuntimeError(f"signal {-done.returncode} ended its process")
    if done.returncode > 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"code {done.returncode}"]
        raise RuntimeError(last[0])
    return Learned.of(load(done.stdout), tau)
