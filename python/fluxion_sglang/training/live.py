"""Trains a predictor on measured requests, in a process of its own: `python -m fluxion_sglang.training.live TAU`.

It reads a file of `measured.pack` from its input and writes one of `Learned.tensors` to its output.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

import torch
from safetensors.torch import load, save

from fluxion_sglang.learning.familiar import Familiar
from fluxion_sglang.learning.learned import Learned
from fluxion_sglang.learning.measured import Measured, unpack
from fluxion_sglang.predictor.artifact import LoadedPredictor
from fluxion_sglang.predictor.features import INDEX
from fluxion_sglang.training.dataset import fit_line
from fluxion_sglang.training.fit import Settings, learn
from fluxion_sglang.training.scores import Samples

SETTINGS: Final = Settings(epochs=40, seed=0, quantile=0.97, miss_rate=0.001, coverage=0.95, whole=True)

MOST: Final = 1 << 18
"""Samples that are trained on at most, chosen at random: what bounds the time."""

HELD: Final = 5
"""Of so many requests one, chosen at random, sets threshold, margins and the number of epochs, and trains nothing."""

NICE: Final = 10
"""Serving comes first; on a machine that is never idle, training still ends."""


def train(requests: Sequence[Measured], tau: float) -> Learned:
    """At least `HELD` requests, of the same layers and heads.

    Raises:
        ValueError: of a layer nothing was measured, no head needs anything of the middle, or training diverged.
    """
    held = torch.randperm(len(requests), generator=torch.Generator().manual_seed(SETTINGS.seed)) % HELD == HELD - 1
    train, validation = (_samples(requests, which.nonzero().flatten().tolist()) for which in (~held, held))
    if len(train.features[:, INDEX["layer"]].unique()) < len(requests[0].anchor):
        raise ValueError("there are layers of which nothing was measured")
    if bool(train.streaming.all()):
        raise ValueError("no head needed anything but sinks and window")
    network, threshold, margins = learn(train, validation, SETTINGS, progress=False)
    anchors = torch.stack([one.anchor for one in requests])
    familiar = Familiar.of(anchors)
    longest = max(float(torch.expm1(one.features[:, INDEX["cpu_tokens"]].max())) for one in requests)
    return Learned(LoadedPredictor(network, tau, threshold, margins, {}), familiar, longest)


def _samples(requests: Sequence[Measured], which: Sequence[int]) -> Samples:
    features = torch.cat([requests[i].features for i in which])
    least = torch.cat([requests[i].budgets for i in which])
    number = torch.arange(len(which)).repeat_interleave(torch.tensor([len(requests[i].features) for i in which]))
    found = Samples(features, *fit_line(least), least[:, 1:], least[:, 1] == 0, number)
    if len(found) <= MOST:
        return found
    return found[torch.randperm(len(found), generator=torch.Generator().manual_seed(SETTINGS.seed))[:MOST]]


def _end_with_server() -> None:
    """Have Linux end this process with the thread that began it, also when the server is killed."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main() -> None:
    _end_with_server()
    os.nice(NICE)
    torch.set_num_threads(1)
    # Whatever the libraries print is no part of the answer.
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    requests = unpack(load(sys.stdin.buffer.read()))
    with answer:
        answer.write(save(train(requests, float(sys.argv[1])).tensors()))


if __name__ == "__main__":
    main()
