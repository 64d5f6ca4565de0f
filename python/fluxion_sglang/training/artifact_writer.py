"""Writes the files of a trained predictor, which `predictor/artifact.py` reads."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save as save_tensors

from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.predictor.artifact import (
    FORMAT,
    JSON_NAME,
    KIND,
    MARGINS,
    OPTIONS,
    Identity,
    PredictorError,
    check_values,
    file_name,
    tau_key,
    tensors_of,
)
from fluxion_sglang.predictor.network import HeadPredictor

_VERSIONED = ("fluxion-sglang", "torch", "safetensors", "transformers")


class Trained(NamedTuple):
    """One tau of an artifact to save. threshold: for the streaming logit. margins: [layers, Hq, 4] float32 factors of
    budgets (`margins.py`). metrics: plain JSON values."""

    network: HeadPredictor
    threshold: float
    margins: torch.Tensor
    metrics: Mapping[str, Any]


def save(
    folder: str | os.PathLike[str],
    trained: Mapping[float, Trained],
    *,
    identity: Identity,
    features: Sequence[str],
    calibrated: float,
) -> None:
    """Write an artifact, weights in bfloat16; files of the same names are replaced, predictor.json last.

    Args:
        folder: created if it is missing.
        trained: by tau.
        features: names of the 41 features in order.
        calibrated: the default tau; one of `trained`.

    Raises:
        PredictorError: nothing to save, or weights or margins that could not be loaded again.
        OSError: the folder cannot be written.
    """
    if calibrated not in trained:
        raise PredictorError(
            f"The calibrated tau {calibrated:g} is not among those trained ({_listed(trained)}); train it too or "
            "name one of them."
        )
    files: dict[str, dict[str, Any]] = {}
    contents: dict[str, bytes] = {}  # check all of them before any file is written
    for tau, entry in sorted(trained.items()):
        if not (math.isfinite(tau) and tau > 0):
            raise PredictorError(f"tau is {tau}; train with an error threshold above 0 such as 0.10.")
        state = tensors_of(entry.network)
        state[MARGINS] = entry.margins.float().cpu().contiguous()
        if state[MARGINS].shape != (wanted := (identity.layers, identity.q_heads, len(BLOCKS))):
            raise PredictorError(
                f"The margins for tau {tau:g} have the shape {tuple(state[MARGINS].shape)} and not {wanted}, a number "
                "for every layer, head and block size; fit them on samples of this model."
            )
        check_values(state, f"The network for tau {tau:g}", "train it again with a lower learning rate")
        if not math.isfinite(entry.threshold):
            raise PredictorError(f"The streaming threshold for tau {tau:g} is {entry.threshold}; train it again.")
        name = file_name(tau)
        contents[name] = save_tensors(state)
        files[tau_key(tau)] = {
            "file": name,
            "sha256": hashlib.sha256(contents[name]).hexdigest(),
            "threshold": entry.threshold,
            "metrics": dict(entry.metrics),
        }
    fields = dataclasses.asdict(identity)
    document = {
        "kind": KIND,
        "format": FORMAT,
        **{name: fields.pop(name) for name in OPTIONS},
        "model": fields,
        "calibrated": tau_key(calibrated),
        "taus": files,
        "features": list(features),
        "versions": {name: _version(name) for name in _VERSIONED},
    }
    contents[JSON_NAME] = (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        _write(folder / name, content)


def _listed(taus: Mapping[float, Any]) -> str:
    return ", ".join(map(tau_key, sorted(taus))) or "none"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _write(path: Path, content: bytes) -> None:
    # Atomic: a reader sees the old file or the new one.
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)
