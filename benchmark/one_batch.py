"""TPOT of plain SGLang and of Fluxion, measured by `sglang.benchmark.one_batch`.

    python benchmark/one_batch.py            # every cell; about half an hour on two cores, nearly all of it prefill
    python benchmark/one_batch.py --quick    # short prompts, to see that it runs
    python benchmark/one_batch.py --device cuda   # on a GPU; --device sim is the simulated one, to see that it runs

A cell is one process of one_batch with one model and one length, with or without the flag. With the flag, all policies
decode in turns after one prefill (decode_turns.py). Results go to one_batch_MODEL.json in benchmark/results/<machine>,
or with --name to one_batch_NAME.json, cell by cell. An interrupted run continues there. A file that differs in commit,
versions, machine, device, configuration, policies or batches is refused unless --fresh is given. If passes run on a
device, rows contain its wait for the CPU. The layers of the longest prompt's last steps go to
one_batch_NAME_timeline.json, plotted beside it (plot.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import common
import drawn
import plot
import torch
from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
from tqdm import tqdm

from fluxion_sglang.commands.needle import NeedlePrompt, needle_prompt
from fluxion_sglang.kv.host_pool import KVShape
from fluxion_sglang.scoring.model_files import public

BEST_FIXED = "fixed:16:0.80"
"""The fixed policy with the fewest bytes whose answers come near those of `fluxion`; none is as good (table
`large`)."""

OFF = "off"
POLICIES = (OFF, "full", "fixed:16:0.05", BEST_FIXED, "fluxion")
MODELS = ("llama-slice", "needle")
SECOND = "second"
"""A second model, of another shape, for quality and speed: `needle_model --recipe second` in build/second."""
PUBLIC = ("smollm2", "gemma3")
"""Checkpoints from `make checkpoints`."""
LARGE = ("llama-3.1-8b", "qwen2.5-7b")
"""Shapes with random weights for --device cuda. `drawn` replaces `fluxion` there, which needs a trained model."""
ON_DEVICE = {
    "policies": (OFF, "fixed:16:0.05", "drawn"),
    "batches": (4, 8, 16),
    "lengths": (32768, 65536, 131072 - 1024),
}
"""Cells of --device cuda, as in Fluxion's Fig. 7 and Table 5."""
BATCHES = (1, 4, 8)
# The needle model has 32,768 positions, which include the generated tokens.
LENGTHS = (8192, 16384, 32256)
QUICK_LENGTHS = (2048, 4096)
OFF_LONGEST = 16384
"""Longest prompts that plain SGLang decodes; longer ones take it almost an hour."""
TURNS = 5
STEPS = 6
"""Steps of a turn; the first does not count."""


TIMELINE = "timeline.jsonl"
"""File that a cell on a device leaves in its folder."""


def decoded(policies: int, batches: int) -> int:
    """Tokens that a request of the smallest batch decodes in a cell with `policies` policies and `batches` batches."""
    return batches * TURNS * STEPS * policies


def model_folder(model: str) -> Path:
    made = {"needle": common.NEEDLE, SECOND: common.ROOT / "build" / SECOND}
    return Path(public(model)) if model in PUBLIC else made.get(model, common.MODELS / model)


def serves(model: str, policy: str) -> bool:
    """Whether the model has what the policy needs: `fluxion` needs a predictor."""
    return not policy.startswith("fluxion") or (model_folder(model) / common.PREDICTOR.name).is_dir()


def those_that_fit(model: str, policies: list[str], length: int, batches: Sequence[int], device: str) -> list[int]:
    """Batches whose KV fits into memory (the device's memory for plain SGLang). Print a line for each of the others."""
    shape = kv_shape(json.loads((model_folder(model) / "config.json").read_text()))
    tokens = length + decoded(len(policies), len(batches))
    room = 0.8 * available_host_memory_bytes(allow_cgroup_fallback=True)
    if device == "cuda" and policies == [OFF] and (gpu := common.gpu()) is not None:
        room = 0.6 * gpu[1]  # the rest is for weights and SGLang's buffers
    shape = replace(shape, sketched=any(policy.startswith("sketch") for policy in policies))
    fit = [batch for batch in batches if shape.pool_bytes(batch * tokens) < room]
    for batch in batches:
        if batch not in fit:
            print(f"left out: {policies[0]} at {batch} x {length}: its KV is larger than {room / 2**30:.0f} GiB")
    return fit


def kv_shape(config: dict[str, Any]) -> KVShape:
    """KV shape of a model's config.json, in bfloat16."""
    heads = config["num_attention_heads"]
    return KVShape(
        layers=config["num_hidden_layers"],
        kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        dtype=torch.bfloat16,
    )


def stream(prompt: NeedlePrompt, tokens: int) -> list[int]:
    """The answer to the prompt's question, then its other questions, each with its answer."""
    parts = [prompt.questions[0].answer_ids]
    parts += [(*question.token_ids, *question.answer_ids) for question in prompt.questions[1:]]
    return list(itertools.islice(itertools.cycle(itertools.chain.from_iterable(parts)), tokens))


def passages(folder: Path, length: int, steps: int, count: int) -> tuple[list[str], list[list[int]]]:
    """Lines of real text as prompts of `length` tokens, and the `steps` tokens that follow each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = " ".join(Path(public("handbook", "texts")).read_text(encoding="utf-8").split())
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    lines: list[str] = []
    forced = []
    at, size = 0, length - len(tokenizer("")["input_ids"])
    while len(lines) < count:
        if at + size + steps > len(tokens):
            raise SystemExit(f"error: the text is too short for {count} prompts of {length} tokens")
        line = tokenizer.decode(tokens[at : at + size]).strip()
        if len(tokenizer(line)["input_ids"]) == length:  # a cut word may be tokenised differently
            lines.append(line)
            forced.append(tokens[at + size : at + size + steps])
            at += size
        at += 1
    return lines, forced


def command(cell: dict[str, Any], scratch: Path) -> list[str]:
    """Command line of a cell; every prompt has exactly `length` tokens."""
    model, policies, length = cell["model"], cell["policies"], cell["length"]
    batches = sorted(cell["batches"], reverse=True)
    largest = batches[0]
    run = [sys.executable, str(Path(__file__).with_name("decode_turns.py"))]
    run += ["--policies", ",".join(policies), "--turns", str(TURNS), "--steps", str(STEPS)]
    run += ["--device", "cuda" if cell["device"] == "cuda" else "cpu", "--max-running-requests", str(largest)]
    run += ["--model-path", str(model_folder(model))]
    if cell["device"] == "cuda":  # packages that every SGLang has; the same for both sides
        run += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]
        if policies == [OFF]:
            # Graphs of the measured batches. Prefill graphs are for shorter chunks.
            run += ["--attention-backend", "flashinfer", "--cuda-graph-backend-prefill", "disabled"]
            run += ["--cuda-graph-bs-decode", *map(str, sorted(batches))]
    steps = decoded(len(policies), len(batches))
    if model in ("needle", SECOND, *PUBLIC):
        prompts, streams = scratch / f"prompts-{length}.txt", scratch / f"streams-{length}.json"
        if model in PUBLIC:
            lines, forced = passages(model_folder(model), length, steps, largest)
        else:
            found = [needle_prompt(length, seed=seed) for seed in range(largest)]
            lines, forced = [prompt.text() for prompt in found], [stream(prompt, steps) for prompt in found]
        prompts.write_text("".join(line + "\n" for line in lines))
        streams.write_text(json.dumps(forced))
        run += ["--prompt-filename", str(prompts), "--streams", str(streams)]
    else:
        run += ["--load-format", "dummy", "--tokenizer-path", str(common.NEEDLE)]
    tokens = largest * (length + steps + 64) // 16 * 16
    if policies == [OFF]:
        run += ["--max-total-tokens", str(tokens)]
    else:
        # decode_turns.py sets the policy of every step.
        config = {"policy": "full" if policies[0] == drawn.SPEC else policies[0], "host_tokens": tokens}
        config |= {"sketches": any(policy.startswith("sketch") for policy in policies)} | cell["config"]
        run += ["--enable-fluxion", "--fluxion-config", json.dumps(config)]
        run += ["--timeline", str(scratch / TIMELINE)]
    return [*run, "--batch-size", *map(str, batches), "--input-len", str(length), "--output-len", str(steps)]


def idle(found: dict[str, Any], policy: str) -> dict[str, float]:
    """How long the device waits for the CPU: milliseconds per layer, and share of the steps' time (Fluxion, Table 5).

    With `hot_tiles_gb`, also the share of all tiles that the device reads.
    """
    if "device_wait_s" not in found:
        return {}
    waited, seconds, reads = found["device_wait_s"][policy], found["decode_s"][policy], found["reads"][policy]
    share = round(reads["gpu_tile_bytes"] / max(reads["tile_bytes"], 1), 3)
    return {
        **({"gpu_share": share} if share else {}),
        "idle_ms": round(sum(waited) / (len(waited) * found["layers"]) * 1e3, 4),
        "idle_ratio": round(sum(waited) / sum(seconds), 4),
    }


def save_timeline(cell: dict[str, Any], scratch: Path, path: Path) -> None:
    """Save and plot the timeline of a cell, if it recorded one; it replaces an earlier cell's."""
    recorded = scratch / TIMELINE
    if not recorded.exists():
        return
    place = {key: cell[key] for key in ("model", "length")}
    rows = [{**place, **json.loads(line)} for line in recorded.read_text().splitlines()]
    recorded.unlink()
    out = path.with_name(f"{path.stem}_timeline.json")
    common.save(out, {**common.header("one_batch"), "rows": rows})
    try:
        plot.draw_timeline({"rows": rows}, out.with_suffix(".svg"))
    except ImportError as error:
        print(f"not drawn ({error}): python benchmark/plot.py {out.relative_to(common.ROOT)}")


def measure(cell: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    """Run one cell; one row per batch size and policy."""
    results = scratch / "results.jsonl"
    results.unlink(missing_ok=True)
    run = command(cell, scratch)
    load = os.getloadavg()[0]
    env = common.SIMULATED if cell["device"] == "sim" else {}
    common.run_logged([*run, "--result-filename", str(results)], scratch / "cell.log", env)
    said = {
        **{key: cell[key] for key in ("model", "length", "round", "device")},
        "load_before": round(load, 2),
        "command": " ".join(common.relative(run)).replace(str(scratch), "$SCRATCH"),
    }
    rows = [
        {
            **said,
            "policy": policy,
            "batch": found["batch_size"],
            "prefill_s": round(found["prefill_s"], 3),
            "tpot_ms": round(median(seconds) * 1e3, 3),
            "steps": len(seconds),
            **idle(found, policy),
        }
        for found in map(json.loads, results.read_text().splitlines())
        for policy, seconds in found["decode_s"].items()
    ]
    if len(rows) != len(cell["batches"]) * len(cell["policies"]):
        raise SystemExit(f"one_batch left out a batch size of {cell}; its output is in {scratch / 'cell.log'}")
    return rows


def main() -> None:
    parser = common.arguments(__doc__, "2K and 4K", rounds=1, fresh=True)
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "sim"), default="cpu", help="where the model and the windows are"
    )
    parser.add_argument("--config", type=json.loads, default={}, help="further keys of --fluxion-config, as JSON")
    known = (*MODELS, SECOND, *PUBLIC, *LARGE)
    parser.add_argument("--models", nargs="+", choices=known, help="default: those of the device")
    parser.add_argument("--policies", nargs="+", help=f'"{OFF}" is SGLang without the flag')
    parser.add_argument("--name", help="of a list of policies whose results are apart, in one_batch_NAME.json")
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--batches", nargs="+", type=int)
    args = parser.parse_args()
    chosen = ON_DEVICE if args.device == "cuda" else {"policies": POLICIES, "batches": BATCHES, "lengths": LENGTHS}
    args.models = args.models or (LARGE if args.device == "cuda" else MODELS)
    args.policies, args.batches = args.policies or chosen["policies"], args.batches or chosen["batches"]
    args.lengths = args.lengths or (QUICK_LENGTHS if args.quick else chosen["lengths"])
    if args.name and len(args.models) > 1:
        parser.error("--name makes one file of one model; say which with --models.")
    if args.config and not args.name:
        parser.error("--config makes results that are apart; name them with --name.")

    for model in args.models:
        run(model, args)


def run(model: str, args: argparse.Namespace) -> None:
    """Measure every cell of a model that its result file lacks."""
    path = common.result_path(args, f"one_batch_{args.name or model}")
    policies = [policy for policy in args.policies if serves(model, policy)]
    settings = {"policies": policies, "batches": list(args.batches), "device": args.device, "config": args.config}
    data = common.resume(path, {**common.header("one_batch"), **settings}, (*common.SAME, *settings), args.fresh)
    sides = [side for side in ([OFF] if OFF in policies else [], [p for p in policies if p != OFF]) if side]
    done = {(row["length"], row["round"], row["policy"]) for row in data["rows"]}
    cells = [
        {
            "model": model,
            "policies": side,
            "batches": batches,
            "length": length,
            "round": turn,
            "device": args.device,
            "config": args.config,
        }
        for turn, length, side in itertools.product(range(args.rounds), args.lengths, sides)
        if (length, turn, side[0]) not in done and (side != [OFF] or length <= OFF_LONGEST or args.device == "cuda")
        if (batches := those_that_fit(model, side, length, args.batches, args.device))
    ]
    with tempfile.TemporaryDirectory(prefix="fluxion-one-batch-") as folder:
        scratch = Path(folder)
        # Long prompts cost most, so the progress bar counts length squared.
        with tqdm(
            total=sum(cell["length"] ** 2 for cell in cells), bar_format="{l_bar}{bar}| {elapsed}<{remaining}"
        ) as bar:
            for cell in cells:
                bar.set_description(f"{model} {cell['policies'][0]}.. {cell['length']}")
                data.setdefault("memory_read_gb_per_s", []).append(
                    common.memory_read_gb_per_s(data["machine"]["cores"])
                )
                data["rows"] += measure(cell, scratch)
                common.save(path, data)  # save before steps that may fail
                save_timeline(cell, scratch, path)
                bar.update(cell["length"] ** 2)
    if not data["rows"]:
        raise SystemExit(
            f"error: nothing of {model} was measured, because no batch fits; choose --batches or --lengths"
        )
    print(f"{path.relative_to(common.ROOT)}: {len(data['rows'])} rows. Now: python benchmark/tables.py")


if __name__ == "__main__":
    main()
