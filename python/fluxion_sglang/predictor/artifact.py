"""The files of a trained predictor: a folder with `predictor.json` and one safetensors file per threshold tau.

A predictor belongs to one model and one choice of sinks, window and block ranking, with which its labels were measured.
It is refused for anything else, and so is a file that differs from the saved one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors.torch import load as load_tensors

from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.predictor.network import HeadPredictor

FORMAT = 3
"""Version of the layout below; raised if the previous version's reader would misread it.
Version 1 has no margins: its budgets are served as predicted. Versions 1 and 2 hold weights as float32."""

MARGINS = "margins"
"""Name of the tensor with the margins in a file."""

_MOST = 1 << 16
"""Upper bound for layers or heads of a model, to reject damaged files."""

JSON_NAME = "predictor.json"
KIND = "fluxion-predictor"
OPTIONS = ("sinks", "window", "spread")
"""The fields of an identity that are options of a server."""


class PredictorError(ValueError):
    """A predictor cannot be used. The message is one sentence: what is wrong and what to do."""


class DoesNotFit(PredictorError):
    """No predictor fits the model and options served: there is none, or it was trained for others."""


@dataclass(frozen=True)
class Identity:
    """The model and options that a predictor is trained for.

    Attributes:
        architecture: class name of the model, as in its config.json.
        layers, q_heads, kv_heads, head_dim, hidden_size, vocab_size, rope_theta: of the whole model.
        weights: fingerprint of the model's weights, made by the caller.
        sinks, window: tokens that stay resident.
        spread: see `NativePool`.
    """

    architecture: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    rope_theta: float
    weights: str
    sinks: int
    window: int
    spread: float


class LoadedPredictor(NamedTuple):
    """One tau of a loaded artifact; network is in evaluation mode on the CPU."""

    network: HeadPredictor
    tau: float
    threshold: float
    margins: torch.Tensor
    metrics: dict[str, Any]


def file_name(tau: float) -> str:
    """predictor-0.10.safetensors for 0.1; more digits if tau has them."""
    return f"predictor-{tau_key(tau)}.safetensors"


def load(
    folder: str | os.PathLike[str],
    *,
    features: Sequence[str],
    tau: float | None = None,
    expect: Identity | None = None,
) -> LoadedPredictor:
    """Read one tau of an artifact.

    Args:
        features: names of the features that will be computed, in order.
        tau: None: the one the artifact was calibrated for.
        expect: the identity of the model and options served; None accepts any (for tools that only inspect).

    Raises:
        DoesNotFit: its identity is not `expect`. This is checked before other errors.
        PredictorError: it cannot be used.
    """
    folder = Path(folder)
    document = _read_document(folder)
    identity = _identity(folder, document)
    if expect is not None:
        _check_identity(folder, identity, expect)
    _check_features(folder, _get(folder, document, "features", list), features)
    taus = _get(folder, document, "taus", dict)
    key = _get(folder, document, "calibrated", str) if tau is None else tau_key(tau)
    if key not in taus:
        listed = ", ".join(sorted(taus)) or "none"
        raise PredictorError(
            f"The predictor in {folder} has no tau {key}, only {listed}; choose one of these or train it with that tau."
        )
    entry = taus[key]
    if not isinstance(entry, dict):
        raise _broken(folder, f"its entry for tau {key} is no object")
    threshold = entry.get("threshold")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not math.isfinite(threshold):
        raise _broken(folder, f"its streaming threshold for tau {key} is {threshold!r}, which is no finite number")
    name = _get(folder, entry, "file", str)
    if Path(name).name != name:
        raise _broken(folder, f"its file for tau {key} is {name!r}, which is not in the folder")
    network, margins = _read_network(
        folder / name,
        _get(folder, entry, "sha256", str),
        torch.ones(identity.layers, identity.q_heads, len(BLOCKS)),
        document["format"],
    )
    return LoadedPredictor(network, float(key), float(threshold), margins, _get(folder, entry, "metrics", dict))


def _read_document(folder: Path) -> dict[str, Any]:
    path = folder / JSON_NAME
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise PredictorError(f"The predictor {folder} {what}; give the folder that `fluxion train` wrote.")
    content = _content(path, f"The folder {folder} has no {JSON_NAME}; give the folder that `fluxion train` wrote.")
    try:
        document = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise PredictorError(f"{path} is not JSON ({error}); copy the folder again or train again.") from None
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise PredictorError(f"{path} is not a predictor of this project; give the folder that `fluxion train` wrote.")
    if document.get("format") not in range(1, FORMAT + 1):
        raise PredictorError(
            f"{path} has format {document.get('format')!r} and this version reads formats up to {FORMAT}; train again, "
            "or install the version of fluxion-sglang that wrote it."
        )
    return document


def _content(path: Path, absent: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise PredictorError(absent) from None
    except OSError as error:
        raise PredictorError(f"{path} cannot be read ({error.strerror or error}); check its permissions.") from None


def _identity(folder: Path, document: dict[str, Any]) -> Identity:
    model = _get(folder, document, "model", dict)
    values = {**model, **{name: document.get(name) for name in OPTIONS}}
    names = [field.name for field in dataclasses.fields(Identity)]
    missing = [name for name in names if values.get(name) is None]
    if missing:
        raise _broken(folder, f"it does not say the {', '.join(missing)} it was trained for")
    for name in ("layers", "q_heads"):
        if type(values[name]) is not int or not 1 <= values[name] <= _MOST:
            raise _broken(folder, f"its {name} is {values[name]!r}, which is no number of them")
    return Identity(**{name: values[name] for name in names})


def _check_identity(folder: Path, identity: Identity, expect: Identity) -> None:
    for field in dataclasses.fields(Identity):
        has, needs = getattr(identity, field.name), getattr(expect, field.name)
        if has == needs:
            continue
        if field.name in OPTIONS:
            raise DoesNotFit(
                f"The predictor in {folder} was trained with {field.name} {has} and this server has {field.name} "
                f"{needs}; set {field.name} to {has} or train a predictor with {needs}."
            )
        raise DoesNotFit(
            f"The predictor in {folder} was trained for another model: its {field.name} is {has} and that of the model "
            f"served is {needs}; give the predictor of this model or train one."
        )


def _check_features(folder: Path, has: list[Any], needs: Sequence[str]) -> None:
    if has == list(needs):
        return
    at = next((i for i, (a, b) in enumerate(zip(has, needs, strict=False)) if a != b), min(len(has), len(needs)))
    a, b = (names[at] if at < len(names) else "nothing" for names in (has, needs))
    raise PredictorError(
        f"The predictor in {folder} was trained on other features: feature {at} is {a} there and {b} in this version; "
        "train it again with this version."
    )


def _read_network(path: Path, digest: str, margins: torch.Tensor, version: int) -> tuple[HeadPredictor, torch.Tensor]:
    """The network and its margins, from a file of this format version. margins: the default for files without them."""
    content = _content(
        path, f"The weights {path} do not exist, although {JSON_NAME} names them; copy the whole folder or train again."
    )
    try:
        state = load_tensors(content)
    except safetensors.SafetensorError as error:
        raise PredictorError(
            f"{path} is truncated or no safetensors file ({error}); copy the folder again or train again."
        ) from None
    network = HeadPredictor()
    wanted = tensors_of(network) if version >= 3 else network.state_dict()
    if version >= 2:
        wanted[MARGINS] = margins
    for name in sorted(wanted.keys() | state.keys()):
        has, needs = (_described(tensors.get(name)) for tensors in (state, wanted))
        if has != needs:
            raise PredictorError(
                f"{path} holds another network than this version's: {name} is {has} and should be {needs}; train it "
                "again with this version."
            )
    check_values(state, str(path), "copy the folder again or train again")
    if hashlib.sha256(content).hexdigest() != digest:
        raise PredictorError(
            f"{path} is not the file that was saved with this {JSON_NAME} (its SHA-256 differs); copy the whole folder "
            "again or train again."
        )
    margins = state.pop(MARGINS, margins)
    network.load_state_dict(state)
    return network.eval().requires_grad_(False), margins


def tensors_of(network: HeadPredictor) -> dict[str, torch.Tensor]:
    """The tensors of a network's file: weights in bfloat16, as served; biases and standardisation in float32."""
    state = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    return {name: value.bfloat16() if name.endswith(".weight") else value for name, value in state.items()}


def check_values(state: Mapping[str, torch.Tensor], what: str, advice: str) -> None:
    for name, value in state.items():
        if not bool(value.isfinite().all()):
            raise PredictorError(f"{what} has a value in {name} that is not finite; {advice}.")
        if name in ("std", MARGINS) and not bool((value > 0).all()):
            raise PredictorError(f"{what} has a value in {name} that is not positive; {advice}.")


def _get(folder: Path, document: dict[str, Any], key: str, kind: type) -> Any:
    value = document.get(key)
    if not isinstance(value, kind):
        raise _broken(folder, f"its {key} is {'missing' if value is None else 'not what it should be'}")
    return value


def _broken(folder: Path, what: str) -> PredictorError:
    return PredictorError(f"{folder / JSON_NAME} is damaged: {what}; copy the folder again or train again.")


def _described(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "not there"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def tau_key(tau: float) -> str:
    """The key of a tau in an artifact; taus that differ only by rounding share a key."""
    return f"{tau:.2f}" if round(tau, 2) == tau else f"{tau:g}"
