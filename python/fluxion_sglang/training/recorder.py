"""Records training samples in a prefill, from the host pool, with the functions that serve.

A request's custom_params say which of its tokens are anchors and which are steps. After a chunk is in the pool, each of
its steps is measured as if it were decoded: the token at position t with the t + 1 tokens up to it. So labels and
features come from the code and the memory that serve, for every served model, and a sequence costs one prefill.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.executor.decode import DecodeEngine
from fluxion_sglang.executor.observer import Observer
from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.kv.host_pool import HostPool
from fluxion_sglang.predictor.artifact import Identity
from fluxion_sglang.predictor.criterion import Criterion, Deviation
from fluxion_sglang.predictor.features import ANCHOR, COUNT, INDEX
from fluxion_sglang.predictor.kernel import features as decode_features
from fluxion_sglang.predictor.measure import Measurement, measure
from fluxion_sglang.wishes import RECORD

logger = logging.getLogger(__name__)

TAUS: Final = (0.10, 0.02, 0.05, 0.15, 0.20, 0.30, 0.40, 0.50)
"""Thresholds tau of Eq. 2 for which least budgets are recorded. The first is the paper's."""

CRITERIA: Final = tuple(Criterion(Deviation.LAYER, tau) for tau in TAUS)

IDENTITY: Final = "identity.json"
"""File of the folder with the identity of the model and options as the server sees them."""

BATCH: Final = 16
"""Steps measured at a time."""

SEQUENCES: Final = 1_000_000
"""Ids are below this number: six digits in a file's name."""

MOST_STEPS: Final = 4096
"""Most steps of a request. Each is measured against all earlier tokens, and all requests wait for that."""


def wishes_for(sequence: int, samples: Sequence[tuple[int, Sequence[int]]]) -> dict[str, Any]:
    """The value of `wishes.RECORD` for a request. samples: anchors, and the steps of each."""
    return {"id": sequence, "samples": [[anchor, list(steps)] for anchor, steps in samples]}


def check_wishes(wishes: object, tokens: int) -> tuple[int, int]:
    """Check a request's recording wishes. Returns their id and the last step.

    Args:
        wishes: as for `wishes.RECORD`. tokens: of the request's prompt.

    Raises:
        ValueError: one sentence about the first error.
    """

    def whole(value: object) -> bool:
        return type(value) is int

    form = f'{RECORD} is {{"id": 0, "samples": [[ANCHOR, [STEP, ...]], ...]}}'
    if not isinstance(wishes, Mapping) or set(wishes) != {"id", "samples"}:
        raise ValueError(f"{form}, and this is no such object; give both keys and no other.")
    sequence, samples = wishes["id"], wishes["samples"]
    if not whole(sequence) or not 0 <= sequence < SEQUENCES:
        raise ValueError(f"{form}, and its id is no number from 0 to {SEQUENCES - 1}; give one.")
    if not isinstance(samples, list) or not samples:
        raise ValueError(f"{form}, and its samples are no list with an entry; give an anchor and its steps.")
    last, count = 0, 0
    for sample in samples:
        pair = isinstance(sample, list) and len(sample) == 2 and whole(sample[0]) and isinstance(sample[1], list)
        if not pair or not sample[1] or not all(map(whole, sample[1])):
            raise ValueError(f"{form}, and one of its samples is no anchor with a list of steps; give whole numbers.")
        anchor, steps = sample
        if not 0 <= anchor <= min(steps) or max(steps) >= tokens:
            raise ValueError(
                f"{form}, and a step is before its anchor or outside of the prompt; give positions up to {tokens - 1}."
            )
        last, count = max(last, *steps), count + len(steps)
    if count > MOST_STEPS:
        raise ValueError(f"{form}, and it has {count} steps; give at most {MOST_STEPS}.")
    return sequence, last


@dataclass(frozen=True)
class Samples:
    """Steps of one layer of one sequence; S samples.

    Attributes:
        step, anchor: [S] positions of the query and of its anchor.
        features: [S, Hq, 41] float32, with the anchor's budgets under the first criterion.
        anchor_budgets, budgets: [S, Hq, C, 5] float32, least budgets of the anchor and of the step (`measure`).
        result: [S, Hq, 3] float32, as for `measure`. lse_middle: [S, Hq], exact; a feature approximates it.
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
    """Writes the samples of requests into `folder`, one file per layer, after the chunk with the last step.

    Attributes:
        stopped: why recording has stopped; None while it runs. If the folder cannot be written, recording stops, and
            requests continue.
    """

    def __init__(self, folder: Path, pool: HostPool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.pool = pool
        self.stopped: str | None = None
        # State of the running requests, by row and layer.
        self._queries: dict[tuple[int, int], dict[int, torch.Tensor]] = {}  # of anchors, by position
        self._done: dict[tuple[int, int], list[Samples]] = {}

    def check(self, wishes: object, tokens: int) -> None:
        sequence, _ = check_wishes(wishes, tokens)
        if self.stopped is not None:
            raise ValueError(f"Nothing is recorded, because {self.stopped}; make room, and start the server again.")
        if path(self.folder, sequence, self.pool.shape.layers - 1).exists():
            raise ValueError(f"Sequence {sequence} is recorded already, and stays as it is; give another id.")

    def released(self, row: int) -> None:
        for state in (self._queries, self._done):
            for key in [key for key in state if key[0] == row]:
                del state[key]

    def prefilled(
        self, layer: int, request: ExtendRequest, wishes: Mapping[str, Any], queries: torch.Tensor, scale: float
    ) -> None:
        """Record the samples of a chunk."""
        if self.stopped is not None:
            return
        key = request.row, layer
        pairs = [(anchor, step) for anchor, steps in wishes["samples"] for step in steps]
        anchors = self._queries.setdefault(key, {})
        for anchor in {anchor for anchor, _ in pairs if request.start <= anchor < request.stop}:
            anchors[anchor] = queries[anchor - request.start].clone()
        # Anchors from the radix tree have no known query.
        here = [pair for pair in pairs if request.start <= pair[1] < request.stop and pair[0] in anchors]
        done = self._done.setdefault(key, [])
        for first in range(0, len(here), BATCH):
            done.append(self._samples(anchors, layer, here[first : first + BATCH], request, queries, scale))
        # Later chunks have no samples.
        if max(step for _, step in pairs) < request.stop:
            del self._queries[key], self._done[key]
            if done:
                self._write(int(wishes["id"]), layer, done)

    def _samples(
        self,
        known: Mapping[int, torch.Tensor],
        layer: int,
        pairs: list[tuple[int, int]],
        request: ExtendRequest,
        q: torch.Tensor,
        scale: float,
    ) -> Samples:
        anchors = sorted({anchor for anchor, _ in pairs})
        row = {anchor: i for i, anchor in enumerate(anchors)}
        anchor_q = torch.stack([known[anchor] for anchor in anchors])
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
            0,  # a recording process has all heads of all layers
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
        # Atomic, because existing files are not recorded again.
        target = path(self.folder, sequence, layer)
        partial = target.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                np.savez(file, **fields)
            partial.replace(target)
        except OSError as error:
            self.stopped = f"{self.folder} cannot be written ({error.strerror or error})"
            self._queries.clear()
            self._done.clear()
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            logger.warning("Fluxion: recording ends here, because %s; serving goes on", self.stopped)


LSE_MIDDLE: Final = ANCHOR.index(INDEX["anchor_lse_cpu"])
"""Index of the middle's exact LSE among the 28 anchor features."""


def observer(engine: DecodeEngine, options: FluxionConfig, identity: Callable[[], Identity]) -> Recorder:
    """Make the observer of the option `record`."""
    folder = options.path("record")
    assert folder is not None
    recorder = Recorder(folder, engine.pool)
    try:
        (recorder.folder / IDENTITY).write_text(json.dumps(asdict(identity())) + "\n")
    except OSError as error:
        raise ConfigError(
            f"record is {options.record!r}, which cannot be written ({error.strerror}); make room there or name "
            "another folder."
        ) from None
    return recorder
