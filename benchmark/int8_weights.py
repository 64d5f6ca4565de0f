"""What 8-bit weights (`--quantization fluxion-int8`) cost in quality and save in time, on public checkpoints.

    python benchmark/int8_weights.py            # both models; ten minutes
    python benchmark/int8_weights.py --quick

Answers: perplexity of real text by the checkpoint in float32 and with rounded weights, KL divergence, and agreement of
the likeliest token, all by transformers. Time: whole decode steps and the first token under `full`, in alternating
processes, round by round; a ratio is the median over rounds. Results go to int8_weights.json in
benchmark/results/<machine>. `make checkpoints` fetches the models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import common
import torch
from racers.driver import Plan

from fluxion_sglang.scoring.model_files import public
from fluxion_sglang.sglang.compat import INT8_WEIGHTS
from fluxion_sglang.sglang.weights.rounding import FORMAT, rounded

MODELS = ("smollm2", "gemma3")
TEXT, WINDOWS, TOKENS = "handbook", 16, 1024
DEPTHS, BATCHES, STEPS, ROUNDS = [512], [8, 4, 1], 16, 3
WAYS = {"bf16": (), "int8": ("--quantization", INT8_WEIGHTS)}


def round_all(model: Any) -> None:
    """Round the weights that a server rounds: those of linear layers. A head that shares the embedding gets a copy."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.in_features % FORMAT.group == 0:
            wide = rounded(module.weight.data.to(torch.bfloat16)).wide()
            module.weight = torch.nn.Parameter(wide, requires_grad=False)


def compared(p: torch.Tensor, q: torch.Tensor, target: torch.Tensor) -> tuple[float, float, float, float]:
    """Sums over logits [n, words]: losses of p and of q, KL divergence, and number of equal likeliest tokens."""
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    losses = (-float(x.gather(1, target[:, None]).sum()) for x in (p, q))
    return *losses, float((p.exp() * (p - q)).sum()), float((p.argmax(-1) == q.argmax(-1)).sum())


def answers(name: str, windows: int, tokens: int) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = public(name)
    codec = AutoTokenizer.from_pretrained(folder)
    ids = codec(Path(public(TEXT, "texts")).read_text(), add_special_tokens=False)["input_ids"]
    step = (len(ids) - tokens) // windows
    first = [] if codec.bos_token_id is None else [codec.bos_token_id]
    batches = [torch.tensor([(first + ids[i * step :])[:tokens]]) for i in range(windows)]
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in WAYS]
    round_all(models[1])
    losses, kl, same = [], [], []
    with torch.inference_mode():
        for batch in batches:
            p, q = (model(batch).logits[0, :-1] for model in models)
            parts = [compared(p[i : i + 128], q[i : i + 128], batch[0, 1 + i : 129 + i]) for i in range(0, len(p), 128)]
            sums = [sum(part) / len(p) for part in zip(*parts, strict=True)]
            losses.append(sums[:2])
            kl.append(sums[2])
            same.append(sums[3])
    exact, ours = torch.tensor(losses).T
    changes = (ours - exact).exp() - 1
    drawn = changes[torch.randint(windows, (2000, windows), generator=torch.Generator().manual_seed(0))].mean(1)
    low, high = drawn.quantile(torch.tensor([0.025, 0.975])).tolist()
    return {
        "perplexity": round(float(exact.mean().exp()), 4),
        "change": round(float(changes.mean()), 6),
        "low": round(low, 6),
        "high": round(high, 6),
        "kl": round(sum(kl) / windows, 6),
        "same": round(sum(same) / windows, 5),
    }


def timed(folder: str, flags: tuple[str, ...], plan: Plan) -> dict[tuple[int, int], float]:
    """Milliseconds of a decode step by (depth, batch); batch 0 holds the time to the first token."""
    options = {"policies": ["full"], "flags": list(flags)}
    words = json.dumps({**vars(plan), "model": folder, "options": options})
    script = Path(__file__).with_name("racers") / "run_sglang.py"
    done = subprocess.run([sys.executable, str(script), words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {script.name} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    found = {}
    for cell in map(json.loads, done.stdout.splitlines()):
        if cell["event"] == "cell":
            found[cell["depth"], 0] = cell["prefill_s"] * 1e3
            for row in cell["decode"]:
                found[cell["depth"], row["batch"]] = median(row["decode_s"]) * 1e3
    return found


def times(folder: str, rounds: int) -> list[dict[str, Any]]:
    threads = common.machine()["cores"]
    plan = Plan(folder, DEPTHS, BATCHES, STEPS, threads, {}, [5, 6, 7], 1, 32000)
    ways = list(WAYS)
    found = [{way: timed(folder, WAYS[way], plan) for way in (ways, ways[::-1])[i % 2]} for i in range(rounds)]
    return [
        {
            "depth": depth,
            "batch": batch,
            **{f"{way}_ms": round(median(one[way][depth, batch] for one in found), 3) for way in WAYS},
            "ratio": round(median(one["int8"][depth, batch] / one["bf16"][depth, batch] for one in found), 4),
        }
        for depth, batch in found[0]["bf16"]
    ]


def main() -> None:
    parser = common.arguments(__doc__, "one window and one round")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rounds, windows = (1, 1) if args.quick else (ROUNDS, WINDOWS)
    rows = []
    for name in args.models:
        tokens = 256 if args.quick else TOKENS
        rows.append({"model": name, **answers(name, windows, tokens), "times": times(public(name), rounds)})
        print(json.dumps(rows[-1]), flush=True)
    common.publish(args, "int8_weights", rows, windows=windows, tokens=TOKENS, text=TEXT, rounds=rounds, steps=STEPS)


if __name__ == "__main__":
    main()
