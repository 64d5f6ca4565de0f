"""TPOT of plain SGLang and of Fluxion, measured by `sglang.benchmark.one_batch`.

    python benchmark/one_batch.py            # every cell; about two hours on two cores, nearly all of it prefill
    python benchmark/one_batch.py --quick    # short prompts, to see that it runs

A cell is one process of one_batch: one model, one policy, one length, all batch sizes. Policies take turns
within a length, so that a machine that drifts drifts for all of them. Results go to one_batch_MODEL.json in
benchmark/results/<machine>, cell by cell; an interrupted run continues there, unless commit, versions or
machine have changed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
from tqdm import tqdm

from fluxion_sglang import openmp
from fluxion_sglang.needle import needle_prompt

BEST_FIXED = "fixed:16:0.25"
"""The fixed policy whose answers come closest to those of `fluxion`; none of the grid is as good (table `pareto`)."""

POLICIES = ("off", "full", "fixed:16:0.05", BEST_FIXED, "fluxion")
MODELS = ("llama-slice", "needle")
BATCHES = (1, 4, 8)
# The needle model ends at 32,768 positions, and the generated tokens take their part.
LENGTHS = (8192, 16384, 32704)
QUICK_LENGTHS = (2048, 4096)
STEPS = 33
WARM_UP_LENGTH = 256

# one_batch warms up with token ids drawn below this, whatever the prompts are.
ONE_BATCH_VOCABULARY = 10_000


def padded_needle(folder: Path) -> Path:
    """The needle model with zero rows added to its embedding, so that one_batch's warm-up ids exist.

    KV and attention stay what they are; the output layer gets wider. The predictor comes along and is told so.
    """
    from safetensors.torch import load_file, save_file

    from fluxion_sglang.predictor.artifact import JSON_NAME

    shutil.copytree(common.NEEDLE, folder)
    weights = load_file(common.NEEDLE / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    rows = -(-ONE_BATCH_VOCABULARY // 64) * 64
    weights["model.embed_tokens.weight"] = table.new_zeros(rows, table.shape[1])
    weights["model.embed_tokens.weight"][: len(table)] = table
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
    predictor = folder / common.PREDICTOR.name / JSON_NAME
    trained = json.loads(predictor.read_text())
    trained["model"]["vocab_size"] = rows
    predictor.write_text(json.dumps(trained))
    return folder


def model_folder(model: str) -> Path:
    return common.NEEDLE if model == "needle" else common.MODELS / model


def serves(model: str, policy: str) -> bool:
    """Whether the model has what the policy needs: `fluxion` a predictor."""
    return not policy.startswith("fluxion") or (model_folder(model) / common.PREDICTOR.name).is_dir()


def command(cell: dict[str, Any], scratch: Path) -> list[str]:
    """The one_batch command line of a cell; every prompt has exactly `length` tokens."""
    model, policy, length = cell["model"], cell["policy"], cell["length"]
    run = [
        sys.executable,
        "-m",
        "sglang.benchmark.one_batch",
        "--device",
        "cpu",
        "--max-running-requests",
        "8",
    ]
    lengths = [length]
    if model == "needle":
        run += ["--model-path", str(scratch / "needle-padded")]
        prompts = scratch / f"prompts-{length}.txt"
        if not prompts.exists():
            texts = [needle_prompt(length, seed=seed).text() for seed in range(max(BATCHES))]
            prompts.write_text("\n".join(texts) + "\n")
        run += ["--prompt-filename", str(prompts)]
    else:
        run += ["--model-path", str(model_folder(model)), "--load-format", "dummy"]
        run += ["--tokenizer-path", str(common.NEEDLE)]
        # Warms up briefly. With a prompt file this would run the whole prompt once more instead.
        lengths = [WARM_UP_LENGTH, length]
    tokens = (max(BATCHES) * (length + STEPS + 64)) // 16 * 16
    if policy == "off":
        run += ["--max-total-tokens", str(tokens)]
    else:
        run += ["--enable-fluxion", "--fluxion-config", json.dumps({"policy": policy, "host_tokens": tokens})]
    run += ["--batch-size", *map(str, BATCHES), "--input-len", *map(str, lengths), "--output-len", str(STEPS)]
    return run


def measure(cell: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    """Run one cell; one row per batch size."""
    results = scratch / "results.jsonl"
    results.unlink(missing_ok=True)
    run = command(cell, scratch)
    load = os.getloadavg()[0]
    common.run_logged([*run, "--result-filename", str(results)], scratch / "cell.log")
    measured = [json.loads(line) for line in results.read_text().splitlines()]
    rows = [
        {
            **cell,
            "batch": row["batch_size"],
            "prefill_s": round(row["prefill_latency"], 4),
            "tpot_ms": round(row["median_decode_latency"] * 1e3, 3),
            "load_before": round(load, 2),
            "command": " ".join(common.relative(run)).replace(str(scratch), "$SCRATCH"),
        }
        for row in measured
        if row["input_len"] == cell["length"]
    ]
    if len(rows) != len(BATCHES):
        raise SystemExit(f"one_batch left out a batch size of {cell}; its output is in {scratch / 'cell.log'}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="TPOT of plain SGLang and of Fluxion, by sglang's one_batch.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--policies", nargs="+", default=POLICIES, help='"off" is SGLang without the flag')
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of the whole table; tables show medians")
    parser.add_argument("--quick", action="store_true", help="2K and 4K; the result file is not a published one")
    parser.add_argument("--fresh", action="store_true", help="start over instead of continuing a result file")
    parser.add_argument("--machine", default=common.machine_name(), help="folder under benchmark/results")
    args = parser.parse_args()

    openmp.wait_passively()  # for plain SGLang too
    for model in args.models:
        run(model, args)


def run(model: str, args: argparse.Namespace) -> None:
    """Every cell of a model that its result file does not have yet."""
    lengths = args.lengths or (QUICK_LENGTHS if args.quick else LENGTHS)
    path = common.RESULTS / args.machine / f"one_batch_{model}{'_quick' if args.quick else ''}.json"
    if args.fresh:
        path.unlink(missing_ok=True)
    data = common.resume(path, common.header("one_batch"), common.SAME)
    cells = [
        {"model": model, "policy": policy, "length": length, "round": turn}
        for turn, length, policy in itertools.product(range(args.rounds), lengths, args.policies)
        if serves(model, policy)
    ]
    done = [{key: row[key] for key in ("model", "policy", "length", "round")} for row in data["rows"]]
    cells = [cell for cell in cells if cell not in done]
    with tempfile.TemporaryDirectory(prefix="fluxion-one-batch-") as folder:
        scratch = Path(folder)
        if model == "needle" and cells:
            padded_needle(scratch / "needle-padded")
        # Long prompts cost most, and the bar's estimate should know.
        with tqdm(
            total=sum(cell["length"] ** 2 for cell in cells), bar_format="{l_bar}{bar}| {elapsed}<{remaining}"
        ) as bar:
            for cell in cells:
                bar.set_description(f"{model} {cell['policy']} {cell['length']}")
                data.setdefault("memory_read_gb_per_s", []).append(
                    common.memory_read_gb_per_s(data["machine"]["cores"])
                )
                data["rows"] += measure(cell, scratch)
                common.save(path, data)
                bar.update(cell["length"] ** 2)
    print(f"{path.relative_to(common.ROOT)}: {len(data['rows'])} rows. Now: python benchmark/tables.py")


if __name__ == "__main__":
    main()
