"""Runs `fluxion train`, which makes from sequences a folder for `--fluxion-config`.

Four parts: record samples (one prefill per sequence, through SGLang; an interrupted run continues with the missing
ones), train a predictor for every tau, calibrate (serve held-out sequences with every tau, and make the largest that
meets the quality targets the default), and report.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from fluxion_sglang import __version__
from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.kv.placement import Placement
from fluxion_sglang.predictor import artifact
from fluxion_sglang.predictor.features import NAMES
from fluxion_sglang.scoring import serve
from fluxion_sglang.scoring.kl import tokens_compared
from fluxion_sglang.scoring.model_files import fingerprint
from fluxion_sglang.sglang.start.offline import CHUNK
from fluxion_sglang.training import artifact_writer, collect, dataset, recorder, report
from fluxion_sglang.training import tau as calibration
from fluxion_sglang.training.fit import Settings, fit, split_sequences

SPARE: Final = 8
"""Positions of the model that a text leaves free, because SGLang needs some for its output."""

_PACKAGES: Final = {"sklearn": "scikit-learn", "dill": "dill"}
"""Required packages of the extra `train` that are imported late in a run, by their names in the package index."""

_OPTIONS: Final = ("sinks", "window")
"""Options of the server that a predictor is trained for."""


class TrainError(Exception):
    """The training cannot continue. The message is one sentence."""


def main(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code: 2 for bad input, mostly detected before an engine starts; 1 if an engine
    fails.
    """
    try:
        _run(arguments, _planned(arguments))
    except (ConfigError, dataset.DataError, TrainError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (serve.EngineFailed, serve.RequestFailed, artifact.PredictorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk, or a folder without write permission
        print(f"error: {error}; the same command goes on from what is in {arguments.out}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nInterrupted; the same command goes on from what is in {arguments.out}.", file=sys.stderr)
        return 130
    return 0


@dataclass(frozen=True)
class Plan:
    """The parts of a run that are known before an engine starts.

    Attributes:
        layers, vocabulary: of the model.
        weights: fingerprint of the model's files.
        ends: the ends of test sequences that calibration decodes.
    """

    taus: list[float]
    settings: Settings
    placement: Placement
    layers: int
    vocabulary: int
    weights: str
    sequences: list[dataset.TokenSequence]
    ends: list[calibration.End]


def _planned(arguments: argparse.Namespace) -> Plan:
    """Check as much as possible before hours are spent on recording."""
    taus = _taus(arguments.taus)
    settings = _settings(arguments)

    from transformers import AutoConfig

    try:
        whole = AutoConfig.from_pretrained(arguments.model, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for bad files
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise TrainError(f"--model is {arguments.model!r}, which cannot be read: {reason}") from None
    config = whole.get_text_config()
    tokenizer = functools.cache(lambda: _tokenizer(arguments.model))  # loaded on demand: token ids need none
    encode = dataset.encode_with(lambda text, **options: list(tokenizer().encode(text, **options)))
    placement = Placement(arguments.sinks, arguments.window)
    sequences = dataset.read_sequences(arguments.data, encode, int(config.max_position_embeddings) - SPARE)
    recorded = torch.tensor(dataset.with_steps(sequences, placement.slots))
    if len(recorded) < 3:
        raise TrainError(
            f"{arguments.data} has {len(recorded)} sequences that are longer than sinks and window together, but "
            "training, validation and test each need their own; give at least 3, better 30."
        )
    held = recorded[split_sequences(recorded, arguments.seed).test].tolist()
    ends = calibration.ends(sequences[i] for i in held)
    if not ends:
        raise TrainError(
            "Every sequence that is held out for calibration has an answer of one token, which comes from the prefill; "
            "give more sequences, longer answers, or another --seed."
        )
    weights = _weights(arguments.model, whole)
    layers, vocabulary = int(config.num_hidden_layers), int(config.vocab_size)
    return Plan(taus, settings, placement, layers, vocabulary, weights, sequences, ends)


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for bad files
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise TrainError(
            f"The tokenizer of {model} cannot be read ({reason}); give token ids (`input_ids`, `answer_ids`) instead "
            "of texts."
        ) from None


def _settings(arguments: argparse.Namespace) -> Settings:
    """The training settings; checks all options."""
    missing = [name for package, name in _PACKAGES.items() if find_spec(package) is None]
    if missing:
        raise TrainError(
            f"training needs the Python package {missing[0]}; install it with: pip install 'fluxion-sglang[train]'."
        )
    FluxionConfig.from_dict({name: getattr(arguments, name) for name in _OPTIONS})
    there = next(place for place in (arguments.out, *arguments.out.absolute().parents) if os.path.exists(place))
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        raise TrainError(f"--out is {str(arguments.out)!r}, where nothing can be written; name another folder.")
    model = Path(arguments.model)
    if not model.is_dir() and arguments.out.resolve().is_relative_to(model.resolve()):
        raise TrainError(
            "--out lies in a folder named like the model; give another, and name it at serving with the option "
            "predictor."
        )
    try:
        return Settings(arguments.epochs, arguments.seed, arguments.quantile, arguments.miss_rate, arguments.coverage)
    except ValueError as error:
        raise TrainError(str(error)) from None


def _taus(text: str) -> list[float]:
    try:
        taus = sorted({float(word) for word in text.split(",")})
    except ValueError:
        taus = []
    if not taus or not set(taus) <= set(recorder.TAUS):
        legal = ", ".join(f"{tau:g}" for tau in sorted(recorder.TAUS))
        raise TrainError(f"--taus is {text!r}; give some of {legal}, separated by commas.")
    return taus


def _weights(model: str, config: Any) -> str:
    """Fingerprint of a folder's weights and tokenizer; for a name on the Hub, the commit."""
    if not Path(model).is_dir():
        return str(getattr(config, "_commit_hash", None))
    try:
        return fingerprint(Path(model))
    except ValueError as error:
        raise TrainError(str(error)) from None


def _run(arguments: argparse.Namespace, plan: Plan) -> None:
    folder = arguments.out / "samples"
    _claim(folder, arguments, plan.weights)
    _record(arguments, plan, folder)
    everything = range(len(plan.sequences))
    trained: dict[float, artifact_writer.Trained] = {}
    for tau in plan.taus:
        samples = dataset.table(folder, everything, plan.layers, tau)
        print(f"tau {tau:g}: {len(samples):,} samples, {samples.streaming.float().mean():.0%} of them streaming")
        try:
            trained[tau] = fit(samples, plan.settings)
        except ValueError as error:
            raise TrainError(str(error)) from None
    identity = artifact.Identity(**json.loads((folder / recorder.IDENTITY).read_text()))
    save = functools.partial(artifact_writer.save, arguments.out, trained, identity=identity, features=NAMES)
    save(calibrated=plan.taus[0])
    calibrated = calibration.outcome(_calibrate(arguments, plan), arguments.kl, arguments.accuracy)
    save(calibrated=calibrated["tau"])
    (arguments.out / calibration.NAME).write_text(json.dumps(calibrated, indent=1) + "\n")
    metrics = {tau: entry.metrics for tau, entry in trained.items()}
    errors = dataset.lse_errors(folder, everything, plan.layers)
    report.write(arguments.out, plan.layers, metrics, calibrated, samples, errors)
    print(f"\n{arguments.out}: {calibration.verdict(calibrated)}")


def _claim(folder: Path, arguments: argparse.Namespace, weights: str) -> None:
    """Mark the folder as this run's. Refuse samples of another model, data, setting or version."""
    mine = {
        "version": __version__,
        "model": str(arguments.model),
        "weights": weights,
        "data": hashlib.sha256(arguments.data.read_bytes()).hexdigest(),
        "seed": arguments.seed,
        **{name: getattr(arguments, name) for name in _OPTIONS},
        "dtype": arguments.dtype,
    }
    folder.mkdir(parents=True, exist_ok=True)
    claim = folder / "settings.json"
    theirs = json.loads(claim.read_text()) if claim.exists() else mine
    other = [name for name in mine if theirs.get(name) != mine[name]]
    if other:
        raise TrainError(
            f"{folder} has samples of another run (other {', '.join(other)}; see {claim.name}); give another --out, or "
            "delete it."
        )
    claim.write_text(json.dumps(mine, indent=1) + "\n")


def _record(arguments: argparse.Namespace, plan: Plan, folder: Path) -> None:
    try:
        collect.record(
            arguments.model,
            plan.sequences,
            folder,
            layers=plan.layers,
            placement=plan.placement,
            dtype=arguments.dtype,
            device=arguments.device,
            seed=arguments.seed,
        )
    except (RuntimeError, ValueError, SystemExit) as error:  # the engine did not start, or refused a sequence
        reason = [type(error).__name__, *str(error).strip().splitlines()[:1]]
        raise serve.EngineFailed(f"The recording failed: {', '.join(reason)}") from error


def _calibrate(arguments: argparse.Namespace, plan: Plan) -> list[dict[str, Any]]:
    """The rows of `calibration.measure`, from a new engine."""
    config = {"predictor": str(arguments.out), **{name: getattr(arguments, name) for name in _OPTIONS}}
    top = tokens_compared(plan.vocabulary)
    start = serve.starter(Path(arguments.model), top, arguments.dtype, arguments.device, config)
    longest = max(len(sequence.tokens) for sequence, _ in plan.ends)
    server = start("fluxion", serve.Needs(longest + CHUNK, 1, True))
    try:
        return calibration.measure(server, plan.ends, plan.taus)
    finally:
        server.close()
