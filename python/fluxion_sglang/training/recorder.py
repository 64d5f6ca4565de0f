"""Training samples, taken where they are served: in a prefill, over the host pool, by the serving functions.

A request says in its custom_params which of its tokens are anchors and which are steps. When a chunk has gone into the
pool, every step of it is measured as if it were being decoded: the token at position t with the t + 1 tokens up to it.
So labels, features and what they are made of come from the functions and the memory that serve, for every model that
is served, and a sequence costs one prefill.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from fluxion_sglang.executor.decode import DecodeEngine
from fluxion_sglang.executor.observer import Observer
from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.kv.host_pool import HostPool
from fluxion_sglang.predictor.artifact import Identity
from fluxion_sglang.predictor.criterion import Criterion, Deviation
from fluxion_sglang.predictor.features import ANCHOR, COUNT, INDEX
from fluxion_sglang.predictor.kernel import features as decode_features
from fluxion_sglang.predictor.measure import Measurement, measure
from fluxion_sglang.sglang.requests import RECORD

PARAMETER: Final = RECORD
"""Key of a request's wishes in its custom_params: {"id": int, "samples": [[anchor, [step, ...]], ...]}."""

TAUS: Final = (0.10, 0.02, 0.05, 0.15, 0.20, 0.30, 0.40, 0.50)
"""Of Eq. 2: least budgets are recorded for each. The first is the paper's."""

CRITERIA: Final = tuple(Criterion(Deviation.LAYER, tau) for tau in TAUS)

IDENTITY: Final = "identity.json"
"""File of the folder that says which model, as the server sees it."""

BATCH: Final = 16
"""Steps measured at a time."""


@dataclass(frozen=True)
class Samples:
    """Steps of one layer of one sequence; S samples.

    Attributes:
        step, anchor: [S] positions of the query and of its anchor.
        features: [S, Hq, 41] float32, with the anchor's budgets under the first criterion.
        anchor_budgets, budgets: [S, Hq, C, 5] float32, least budgets of the anchor and of the step (`measure`).
        result: [S, Hq, 3] float32, as of `measure`. lse_middle: [S, Hq], exact; its approximation is a feature.
    """

    step: np.ndarray
    anchor: np.ndarray
    features: np.ndarray
    anchor_budgets: np.ndarray
    budgets: np.ndarray
    result: np.ndarray
    lse_middle: np.ndarray


def path(folder: Path, sequence: int, layer: int) -> Path:
    """The file of one layer of a sequence."""
    return folder / f"{sequence:06d}-{layer:03d}.npz"


def read(folder: Path, sequence: int, layer: int) -> Samples:
    with np.load(path(folder, sequence, layer)) as file:
        return Samples(**{name: file[name] for name in file.files})


class Recorder(Observer):
    """Writes the samples of requests into `folder`, a file a layer, when the chunk with the last step has run."""

    def __init__(self, folder: Path, pool: HostPool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.pool = pool
        self._queries: dict[tuple[int, int, int], torch.Tensor] = {}  # of anchors, by sequence, layer and position
        self._done: dict[tuple[int, int], list[Samples]] = {}

    def prefilled(
        self, layer: int, request: ExtendRequest, wishes: Mapping[str, Any], queries: torch.Tensor, scale: float
    ) -> None:
        """Take the samples of a chunk."""
        q = queries
        sequence = int(wishes["id"])
        pairs = [(int(anchor), int(step)) for anchor, steps in wishes["samples"] for step in steps]
        for anchor in {anchor for anchor, _ in pairs if request.start <= anchor < request.stop}:
            self._queries[sequence, layer, anchor] = q[anchor - request.start].clone()
        here = [(anchor, step) for anchor, step in pairs if request.start <= step < request.stop]
        done = self._done.setdefault((sequence, layer), [])
        for first in range(0, len(here), BATCH):
            done.append(self._samples(sequence, layer, here[first : first + BATCH], request, q, scale))
        # Chunks behind the one with the last step have nothing to add.
        if pairs and request.start <= max(step for _, step in pairs) < request.stop:
            self._write(sequence, layer, self._done.pop((sequence, layer)))
            for key in [key for key in self._queries if key[:2] == (sequence, layer)]:
                del self._queries[key]

    def _samples(
        self,
        sequence: int,
        layer: int,
        pairs: list[tuple[int, int]],
        request: ExtendRequest,
        q: torch.Tensor,
        scale: float,
    ) -> Samples:
        anchors = sorted({anchor for anchor, _ in pairs})
        row = {anchor: i for i, anchor in enumerate(anchors)}
        anchor_q = torch.stack([self._queries[sequence, layer, anchor] for anchor in anchors])
        step_q = torch.stack([q[step - request.start] for _, step in pairs])
        rows = torch.tensor([row[anchor] for anchor, _ in pairs], dtype=torch.int32)
        lengths = torch.tensor([step + 1 for _, step in pairs], dtype=torch.int32)
        window = self.pool.placement.window

        def measured(lengths: torch.Tensor, queries: torch.Tensor) -> Measurement:
            return measure(self.pool, layer, request.pages, lengths, queries, scale, window, CRITERIA)

        at_anchor = measured(torch.tensor(anchors, dtype=torch.int32) + 1, anchor_q)
        at_step = measured(lengths, step_q)
        features = torch.empty(len(pairs), q.shape[1], COUNT)
        placement = self.pool.placement
        decode_features(
            step_q,
            at_step.parts,
            rows,
            lengths,
            at_anchor.anchor,
            anchor_q,
            at_anchor.mean_k,
            layer,
            0,  # a process that records has all heads of all layers
            placement.sinks,
            placement.window,
            scale,
            features,
        )
        positions = np.array(pairs, dtype=np.int32)
        return Samples(
            step=positions[:, 1],
            anchor=positions[:, 0],
            features=features.numpy(),
            anchor_budgets=at_anchor.budgets[rows.long()].numpy(),
            budgets=at_step.budgets.numpy(),
            result=at_step.result.numpy(),
            lse_middle=at_step.anchor[..., LSE_MIDDLE].numpy(),
        )

    def _write(self, sequence: int, layer: int, parts: list[Samples]) -> None:
        fields = {name: np.concatenate([getattr(part, name) for part in parts]) for name in Samples.__annotations__}
        # Whole or not at all: a file that is there is not recorded again.
        target = path(self.folder, sequence, layer)
        partial = target.with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez(file, **fields)
        partial.replace(target)


LSE_MIDDLE: Final = ANCHOR.index(INDEX["anchor_lse_cpu"])
"""Place of the middle's exact LSE among the 28 anchor features."""


def observer(engine: DecodeEngine, folder: str, identity: Callable[[], Identity]) -> Recorder:
    """What the option `record` asks for."""
    recorder = Recorder(Path(os.path.expanduser(folder)), engine.pool)
    (recorder.folder / IDENTITY).write_text(json.dumps(asdict(identity())) + "\n")
    return recorder
