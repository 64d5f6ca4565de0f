"""`fluxion train`: a predictor for a model, from sequences to a folder that `--fluxion-config` can name.

Four parts, each of which an interrupted run skips where it is done: record samples (one prefill a sequence, through
SGLang), train a predictor for every tau, report, and calibrate: serve held-out sequences with every tau, and make the
largest one the default that keeps the quality target.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.kv.placement import BLOCKS, Placement

if TYPE_CHECKING:
    from fluxion_sglang.predictor import calibration

SPARE: Final = 8
"""Positions of the model that a text leaves free: SGLang needs some for what it generates."""


class TrainError(Exception):
    """The training cannot go on; the message is one sentence."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--model", required=True, help="folder or name of the model")
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
    option("--miss-rate", type=float, default=0.001, help="share of needed heads that may be called streaming")
    option("--seed", type=int, default=0, help="of steps, split and training (default: %(default)s)")
    option("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="default: the model's")
    option("--device", help="as of SGLang's --device; default: its choice")


def main(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    from fluxion_sglang.predictor.dataset import DataError

    try:
        _run(arguments)
    except (DataError, TrainError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nInterrupted; the same command goes on from what is in {arguments.out}.", file=sys.stderr)
        return 130
    return 0


def _run(arguments: argparse.Namespace) -> None:
    from transformers import AutoConfig, AutoTokenizer

    from fluxion_sglang.predictor import artifact, calibration, dataset, recorder
    from fluxion_sglang.predictor.features import NAMES
    from fluxion_sglang.predictor.train import fit, split_sequences
    from fluxion_sglang.sglang import collect

    taus = _taus(arguments.taus)
    placement = Placement(arguments.sinks, arguments.window)
    config = AutoConfig.from_pretrained(arguments.model).get_text_config()
    layers = int(config.num_hidden_layers)

    tokenizer = functools.cache(lambda: AutoTokenizer.from_pretrained(arguments.model))  # token ids need none

    def encode(text: str) -> list[int]:
        return list(tokenizer()(text)["input_ids"])

    sequences = dataset.read_sequences(arguments.data, encode)
    room = int(config.max_position_embeddings) - SPARE
    sequences = [s if s.answer else dataclasses.replace(s, tokens=s.tokens[:room]) for s in sequences]
    folder = arguments.out / "samples"
    _claim(folder, arguments)
    collect.record(
        arguments.model,
        sequences,
        folder,
        layers=layers,
        placement=placement,
        spread=arguments.spread,
        dtype=arguments.dtype,
        device=arguments.device,
        seed=arguments.seed,
    )

    trained: dict[float, artifact.Trained] = {}
    for tau in taus:
        found = dataset.table(folder, range(len(sequences)), layers, tau)
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
            )
        except ValueError as error:
            raise TrainError(str(error)) from None
        trained[tau] = artifact.Trained(*fitted)
    held = found.sequence[split_sequences(found.sequence, arguments.seed).test].unique().tolist()
    ends = calibration.ends(sequences[i] for i in held)
    if not ends:
        raise TrainError(
            "No held-out sequence ends in two tokens that could be decoded, so nothing can be calibrated; give more "
            "sequences, longer answers, or another --seed."
        )
    identity = artifact.Identity(**json.loads((folder / recorder.IDENTITY).read_text()))
    save = functools.partial(artifact.save, arguments.out, trained, identity=identity, features=NAMES)
    save(calibrated=taus[0])
    rows = _calibrate(arguments, ends, taus, int(config.vocab_size))
    calibrated = calibration.outcome(rows, arguments.kl, arguments.accuracy)
    save(calibrated=calibrated["tau"])
    (arguments.out / calibration.NAME).write_text(json.dumps(calibrated, indent=1) + "\n")
    _report(arguments.out, layers, trained, calibrated, found)
    print(f"\n{arguments.out}: {calibration.verdict(calibrated)}")


def _calibrate(
    arguments: argparse.Namespace, ends: list[calibration.End], taus: list[float], vocabulary: int
) -> list[dict[str, Any]]:
    """The rows of `calibration.measure`, by an engine of its own."""
    from fluxion_quality import serve
    from fluxion_quality.kl import tokens_compared
    from fluxion_sglang.predictor import calibration

    config = {
        "predictor": str(arguments.out),
        "sinks": arguments.sinks,
        "window": arguments.window,
        "spread": arguments.spread,
    }
    start = serve.starter(Path(arguments.model), tokens_compared(vocabulary), arguments.dtype, arguments.device, config)
    longest = max(len(sequence.tokens) for sequence, _ in ends)
    server = start("fluxion", serve.Needs(longest + serve.CHUNK, 1, True))
    try:
        return calibration.measure(server, ends, taus)
    finally:
        server.close()


def _report(folder: Path, layers: int, trained: dict[float, Any], calibrated: dict[str, Any], table: Any) -> None:
    """Metrics as Markdown, and plots in the shape of the paper's figures 4 and 5, of the last tau's labels."""
    from fluxion_sglang.predictor import calibration, report
    from fluxion_sglang.predictor.features import INDEX

    lines = ["# Predictor", "", report.metrics_table({tau: entry.metrics for tau, entry in trained.items()}), ""]
    lines += [report.calibration_table(calibrated["rows"]), calibration.verdict(calibrated), ""]
    error = (table.features[:, INDEX["lse_cpu"]] - table.lse_middle).double()
    lines += [
        f"The moment approximation of the LSE over the middle, less the exact one: mean {error.mean():+.2f}, "
        f"mean absolute {error.abs().mean():.2f}, 99th percentile of the absolute {error.abs().quantile(0.99):.2f}.",
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
        import torch

        sums = torch.zeros(layers * heads).index_add_(0, at, values.float())
        return (sums / torch.bincount(at, minlength=layers * heads).clamp(min=1)).view(shape)

    import torch

    by_block = torch.stack([mean(table.budgets[:, i]) for i in range(len(BLOCKS))], -1)
    report.plot_streaming_share(mean(table.streaming), folder / "streaming.svg")
    report.plot_budgets_by_head(by_block[..., [0, -1]], range(layers), folder / "budgets.svg", titles=("16", "128"))
    report.plot_budget_by_block(by_block, BLOCKS, range(layers), folder / "blocks.svg")


def _taus(text: str) -> list[float]:
    from fluxion_sglang.predictor.recorder import TAUS

    try:
        taus = sorted({float(word) for word in text.split(",")})
    except ValueError:
        taus = []
    if not taus or not set(taus) <= set(TAUS):
        legal = ", ".join(f"{tau:g}" for tau in sorted(TAUS))
        raise TrainError(f"--taus is {text!r}; give some of {legal}, separated by commas.")
    return taus


def _claim(folder: Path, arguments: argparse.Namespace) -> None:
    """Samples of other sequences or settings must not mix with these."""
    digest = hashlib.sha256(arguments.data.read_bytes()).hexdigest() if arguments.data.is_file() else ""
    mine = {
        "model": str(arguments.model),
        "data": digest,
        "seed": arguments.seed,
        "sinks": arguments.sinks,
        "window": arguments.window,
        "spread": arguments.spread,
        "dtype": arguments.dtype,
    }
    folder.mkdir(parents=True, exist_ok=True)
    claim = folder / "settings.json"
    if claim.exists() and json.loads(claim.read_text()) != mine:
        raise TrainError(f"{folder} has samples of another run (see {claim.name}); give another --out, or delete it.")
    claim.write_text(json.dumps(mine, indent=1) + "\n")
