"""`fluxion train`: a predictor for a model, from sequences to a folder that `--fluxion-config` can name.

Four parts: record samples (one prefill a sequence, through SGLang; an interrupted run goes on from those that are
there), train a predictor for every tau, calibrate (serve held-out sequences with every tau, and make the largest that
keeps the quality targets the default), and report.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fluxion_sglang import __version__
from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.kv.placement import BLOCKS, Placement

if TYPE_CHECKING:
    from fluxion_sglang.training import tau as calibration
    from fluxion_sglang.training.dataset import TokenSequence

SPARE: Final = 8
"""Positions of the model that a text leaves free: SGLang needs some for what it generates."""

_PACKAGES: Final = {"sklearn": "scikit-learn", "dill": "dill"}
"""What the end of a run imports, by its name in the package index; those of the extra `train` that it cannot go
without."""

_OPTIONS: Final = ("sinks", "window", "spread")
"""Options of the server that a predictor is trained for."""


class TrainError(Exception):
    """The training cannot go on; the message is one sentence."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--model", required=True, help="folder of the model, or its name on the Hub")
    option("--data", type=Path, required=True, help="JSONL: text or input_ids a line, or LongBench-V2's; see the docs")
    option("--out", type=Path, required=True, help="folder of the predictor; the same command goes on from it")
    option("--taus", default="0.05,0.1,0.2,0.3", help="errors to train for (default: %(default)s)")
    option("--kl", type=float, default=0.02, help="quality target: mean KL from full attention, nats a token")
    option("--accuracy", type=float, default=0.05, help="quality target: share of answers that may be lost")
    option("--sinks", type=int, default=64, help="as the server's (default: %(default)s)")
    option("--window", type=int, default=256, help="as the server's (default: %(default)s)")
    option("--spread", type=float, default=FluxionConfig.spread, help="as the server's (default: %(default)s)")
    option("--epochs", type=int, default=30, help="passes over the samples (default: %(default)s)")
    option("--quantile", type=float, default=0.9, help="of the budget to predict: higher reads more, errs less")
    option("--coverage", type=float, default=0.98, help="share of every head's budgets that is to suffice")
    option("--miss-rate", type=float, default=0.001, help="share of needed heads that may be called streaming")
    option("--seed", type=int, default=0, help="of steps, split and training (default: %(default)s)")
    option("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="default: the model's")
    option("--device", help="as of SGLang's --device; default: its choice")


def main(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code: 2 for bad input, most of it before an engine starts; 1 where an engine
    fails.
    """
    from fluxion_sglang.scoring.serve import EngineFailed, RequestFailed
    from fluxion_sglang.training.dataset import DataError

    try:
        _run(arguments, _planned(arguments))
    except (ConfigError, DataError, TrainError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (EngineFailed, RequestFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nInterrupted; the same command goes on from what is in {arguments.out}.", file=sys.stderr)
        return 130
    return 0


@dataclass(frozen=True)
class Plan:
    """What a run will do, as far as it is known before an engine starts.

    Attributes:
        layers, vocabulary: of the model.
        weights: fingerprint of the model's files.
        ends: what calibration decodes, of the sequences that test.
    """

    taus: list[float]
    layers: int
    vocabulary: int
    weights: str
    sequences: list[TokenSequence]
    ends: list[calibration.End]


def _planned(arguments: argparse.Namespace) -> Plan:
    """Check everything that can be checked before hours are spent on recording."""
    taus = _taus(arguments.taus)
    _check_options(arguments)

    import torch
    from transformers import AutoConfig, AutoTokenizer

    from fluxion_sglang.training import dataset
    from fluxion_sglang.training import tau as calibration
    from fluxion_sglang.training.fit import split_sequences

    try:
        whole = AutoConfig.from_pretrained(arguments.model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise TrainError(f"--model is {arguments.model!r}, which cannot be read: {reason}") from None
    config = whole.get_text_config()
    tokenizer = functools.cache(lambda: AutoTokenizer.from_pretrained(arguments.model))  # token ids need none

    def encode(text: str) -> list[int]:
        return list(tokenizer()(text)["input_ids"])

    sequences = dataset.read_sequences(arguments.data, encode, int(config.max_position_embeddings) - SPARE)
    recorded = torch.tensor(dataset.with_steps(sequences, Placement(arguments.sinks, arguments.window).slots))
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
    return Plan(taus, int(config.num_hidden_layers), int(config.vocab_size), weights, sequences, ends)


def _check_options(arguments: argparse.Namespace) -> None:
    missing = [name for package, name in _PACKAGES.items() if find_spec(package) is None]
    if missing:
        raise TrainError(
            f"training needs the Python package {missing[0]}; install it with: pip install 'fluxion-sglang[train]'."
        )
    for name, legal, words in (
        ("quantile", 0 < arguments.quantile < 1, "a number between 0 and 1, such as 0.9"),
        ("coverage", 0 < arguments.coverage < 1, "a number between 0 and 1, such as 0.98"),
        ("miss_rate", 0 <= arguments.miss_rate < 1, "a number from 0 to below 1, such as 0.001"),
        ("epochs", arguments.epochs >= 1, "at least 1"),
    ):
        if not legal:
            raise TrainError(f"--{name.replace('_', '-')} is {getattr(arguments, name):g}; give {words}.")
    FluxionConfig.from_dict({name: getattr(arguments, name) for name in _OPTIONS})
    model = Path(arguments.model)
    if not model.is_dir() and arguments.out.resolve().is_relative_to(model.resolve()):
        raise TrainError(
            "--out lies in a folder named like the model; give another, and name it at serving with the option "
            "predictor."
        )


def _weights(model: str, config: Any) -> str:
    """Fingerprint of a folder's weights and tokenizer; of a name on the Hub, the commit."""
    from fluxion_sglang.scoring.fingerprint import fingerprint

    if not Path(model).is_dir():
        return str(getattr(config, "_commit_hash", None))
    try:
        return fingerprint(Path(model))
    except ValueError as error:
        raise TrainError(str(error)) from None


def _run(arguments: argparse.Namespace, plan: Plan) -> None:
    from fluxion_sglang.predictor import artifact
    from fluxion_sglang.predictor.features import NAMES
    from fluxion_sglang.training import artifact_writer, dataset, recorder
    from fluxion_sglang.training import tau as calibration
    from fluxion_sglang.training.fit import fit

    folder = arguments.out / "samples"
    _claim(folder, arguments, plan.weights)
    _record(arguments, plan, folder)
    trained: dict[float, artifact_writer.Trained] = {}
    for tau in plan.taus:
        found = dataset.table(folder, range(len(plan.sequences)), plan.layers, tau)
        print(f"tau {tau:g}: {len(found.features):,} samples, {found.streaming.float().mean():.0%} of them streaming")
        try:
            fitted = fit(
                found.features,
                found.bgt0,
                found.k,
                found.streaming,
                found.budgets,
                found.sequence,
                epochs=arguments.epochs,
                seed=arguments.seed,
                quantile=arguments.quantile,
                miss_rate=arguments.miss_rate,
                coverage=arguments.coverage,
            )
        except ValueError as error:
            raise TrainError(str(error)) from None
        trained[tau] = artifact_writer.Trained(*fitted)
    identity = artifact.Identity(**json.loads((folder / recorder.IDENTITY).read_text()))
    save = functools.partial(artifact_writer.save, arguments.out, trained, identity=identity, features=NAMES)
    save(calibrated=plan.taus[0])
    calibrated = calibration.outcome(_calibrate(arguments, plan), arguments.kl, arguments.accuracy)
    save(calibrated=calibrated["tau"])
    (arguments.out / calibration.NAME).write_text(json.dumps(calibrated, indent=1) + "\n")
    _report(arguments.out, plan.layers, trained, calibrated, found)
    print(f"\n{arguments.out}: {calibration.verdict(calibrated)}")


def _record(arguments: argparse.Namespace, plan: Plan, folder: Path) -> None:
    from fluxion_sglang.scoring.serve import EngineFailed
    from fluxion_sglang.training import collect

    try:
        collect.record(
            arguments.model,
            plan.sequences,
            folder,
            layers=plan.layers,
            placement=Placement(arguments.sinks, arguments.window),
            spread=arguments.spread,
            dtype=arguments.dtype,
            device=arguments.device,
            seed=arguments.seed,
        )
    except (RuntimeError, ValueError, SystemExit) as error:  # the engine did not start, or refused a sequence
        reason = [type(error).__name__, *str(error).strip().splitlines()[:1]]
        raise EngineFailed(f"The recording failed: {', '.join(reason)}") from error


def _calibrate(arguments: argparse.Namespace, plan: Plan) -> list[dict[str, Any]]:
    """The rows of `calibration.measure`, by an engine of its own."""
    from fluxion_sglang.scoring import serve
    from fluxion_sglang.scoring.kl import tokens_compared
    from fluxion_sglang.sglang.offline import CHUNK
    from fluxion_sglang.training import tau as calibration

    config = {"predictor": str(arguments.out), **{name: getattr(arguments, name) for name in _OPTIONS}}
    top = tokens_compared(plan.vocabulary)
    start = serve.starter(Path(arguments.model), top, arguments.dtype, arguments.device, config)
    longest = max(len(sequence.tokens) for sequence, _ in plan.ends)
    server = start("fluxion", serve.Needs(longest + CHUNK, 1, True))
    try:
        return calibration.measure(server, plan.ends, plan.taus)
    finally:
        server.close()


def _report(folder: Path, layers: int, trained: dict[float, Any], calibrated: dict[str, Any], table: Any) -> None:
    """Metrics as Markdown, and plots in the shape of the paper's figures 4 and 5, of the last tau's labels."""
    import numpy as np
    import torch

    from fluxion_sglang.predictor.features import INDEX
    from fluxion_sglang.training import report
    from fluxion_sglang.training import tau as calibration

    lines = ["# Predictor", "", report.metrics_table({tau: entry.metrics for tau, entry in trained.items()}), ""]
    lines += [report.calibration_table(calibrated["rows"]), calibration.verdict(calibrated), ""]
    error = (table.features[:, INDEX["lse_cpu"]] - table.lse_middle).double()
    lines += [
        f"The moment approximation of the LSE over the middle, less the exact one: mean {error.mean():+.2f}, "
        # torch's quantile refuses more than 16M numbers.
        f"mean absolute {error.abs().mean():.2f}, 99th percentile of the absolute "
        f"{np.quantile(error.abs().numpy(), 0.99):.2f}.",
    ]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        print("No plots without matplotlib; install it with: pip install 'fluxion-sglang[train]'.")
        return
    layer, head = (table.features[:, INDEX[name]].long() for name in ("layer", "head"))
    heads = int(head.max()) + 1
    shape = (layers, heads)
    at = layer * heads + head

    def mean(values: Any) -> Any:
        sums = torch.zeros(layers * heads).index_add_(0, at, values.float())
        return (sums / torch.bincount(at, minlength=layers * heads).clamp(min=1)).view(shape)

    by_block = torch.stack([mean(table.budgets[:, i]) for i in range(len(BLOCKS))], -1)
    report.plot_streaming_share(mean(table.streaming), folder / "streaming.svg")
    report.plot_budgets_by_head(by_block[..., [0, -1]], range(layers), folder / "budgets.svg", titles=("16", "128"))
    report.plot_budget_by_block(by_block, BLOCKS, range(layers), folder / "blocks.svg")


def _taus(text: str) -> list[float]:
    from fluxion_sglang.training.recorder import TAUS

    try:
        taus = sorted({float(word) for word in text.split(",")})
    except ValueError:
        taus = []
    if not taus or not set(taus) <= set(TAUS):
        legal = ", ".join(f"{tau:g}" for tau in sorted(TAUS))
        raise TrainError(f"--taus is {text!r}; give some of {legal}, separated by commas.")
    return taus


def _claim(folder: Path, arguments: argparse.Namespace, weights: str) -> None:
    """Samples of another model, other data or settings, or another version must not mix with these."""
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
