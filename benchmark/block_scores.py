"""How well a score of blocks finds the attention mass: recall at equal budgets, on a model's own queries and keys.

python benchmark/block_scores.py                # the bundled model
python benchmark/block_scores.py --quick

Every step of an answer asks every head for the blocks of its middle. The recall of a score is the share of the middle's
attention mass in the blocks it ranks highest, averaged over (head, step) pairs that need the middle (a tenth of their
mass or more lies there). Beside it: what the score's metadata takes, in vectors of head_dim a block.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import common
import torch
from states import capture
from torch import Tensor
from tqdm import tqdm

from fluxion_quality import suite_named
from fluxion_quality.model import Model
from fluxion_sglang.commands import needle
from fluxion_sglang.kv.placement import Placement

BUDGETS = (0.02, 0.05, 0.10, 0.25)
BLOCKS = (16, 32, 64)
SEED = 5_000_000
NEEDED = 0.1
"""Least attention mass in the middle of a (head, step) that counts."""

Score = Callable[[Tensor, Tensor], Tensor]
"""Queries [G, D] and blocks of keys [N, blk, D] to scores [G, N]."""


def interpolated(alpha: float) -> Score:
    """Center of the box of minima and maxima, plus alpha of what its half widths add; 1 is Quest's bound."""

    def score(q: Tensor, keys: Tensor) -> Tensor:
        low, high = keys.amin(1), keys.amax(1)
        return q @ ((low + high) / 2).T + alpha * q.abs() @ ((high - low) / 2).T

    return score


def box_spread(beta: float) -> Score:
    """Center of the box, plus beta standard deviations of a sum of independent dimensions."""

    def score(q: Tensor, keys: Tensor) -> Tensor:
        low, high = keys.amin(1), keys.amax(1)
        return q @ ((low + high) / 2).T + beta * (q.square() @ ((high - low) / 2).square().T).sqrt()

    return score


def mean_spread(beta: float) -> Score:
    """Mean key plus beta standard deviations, dimension by dimension."""

    def score(q: Tensor, keys: Tensor) -> Tensor:
        return q @ keys.mean(1).T + beta * (q.square() @ keys.var(1, unbiased=False).T).sqrt()

    return score


def cuboid_mean(q: Tensor, keys: Tensor) -> Tensor:
    """Center of the box plus the mean distance from it, dimension by dimension: ArkVale's digest, which PSA prefers."""
    center = (keys.amin(1) + keys.amax(1)) / 2
    return q @ center.T + q.abs() @ (keys - center.unsqueeze(1)).abs().mean(1).T


def outlier(q: Tensor, keys: Tensor) -> Tensor:
    """The better of two keys: the one farthest from the mean, and the mean of the others."""
    mean = keys.mean(1, keepdim=True)
    far = (keys - mean).norm(dim=-1).argmax(1)
    odd = keys[torch.arange(len(keys)), far]
    rest = (keys.sum(1) - odd) / (keys.shape[1] - 1)
    return torch.maximum(q @ odd.T, q @ rest.T)


def exact(q: Tensor, keys: Tensor) -> Tensor:
    """LSE of the block's true scores: no score of blocks finds more. q comes scaled."""
    return torch.einsum("gd,nbd->gnb", q, keys).logsumexp(-1)


SCORES: dict[str, tuple[float | None, Score]] = {
    "quest": (2, interpolated(1.0)),
    "spread 0.75": (2, interpolated(0.75)),
    "spread 0.5": (2, interpolated(0.5)),
    "spread 0.35": (2, interpolated(0.35)),
    "spread 0.25": (2, interpolated(0.25)),
    "center": (2, interpolated(0.0)),
    "center + 1 std": (2, box_spread(1.0)),
    "center + 2 std": (2, box_spread(2.0)),
    "center + 3 std": (2, box_spread(3.0)),
    "cuboid mean": (2, cuboid_mean),
    "mean": (1, mean_spread(0.0)),
    "mean + 1 std": (2, mean_spread(1.0)),
    "mean + 2 std": (2, mean_spread(2.0)),
    "mean + 3 std": (2, mean_spread(3.0)),
    "outlier and mean": (2, outlier),
    "exact": (None, exact),
}
SECOND_PASS = 4
"""Candidates of the second pass, as a multiple of the budget: their keys are read and scored exactly."""


def recalls(q: Tensor, keys: Tensor, blk: int) -> dict[tuple[str, float], Tensor]:
    """Recall [G] of every score and budget: queries [G, D] (scaled) of a step over the middle's keys [L, D]."""
    whole = len(keys) // blk * blk
    keys = keys[:whole].view(-1, blk, q.shape[1])
    mass = torch.einsum("gd,nbd->gnb", q, keys).flatten(1).softmax(-1).view(len(q), -1, blk).sum(-1)
    true = exact(q, keys)
    out = {}
    for name, (_, score) in SCORES.items():
        ranked = score(q, keys)
        order = ranked.argsort(descending=True, dim=1)
        for budget in BUDGETS:
            count = math.ceil(budget * keys.shape[0])
            out[name, budget] = mass.gather(1, order[:, :count]).sum(1)
            if name in ("quest", "spread 0.5"):
                candidates = order[:, : SECOND_PASS * count]
                best = true.gather(1, candidates).topk(min(count, candidates.shape[1]), dim=1).indices
                out[f"{name}, second pass", budget] = mass.gather(1, candidates.gather(1, best)).sum(1)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/needle"))
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=2, help="of each task")
    parser.add_argument("--steps", type=int, default=6, help="of each answer")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.length, args.samples = 2048, 1
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    described = Model.read(args.model)
    codec, placement = described.codec(), Placement()
    symbols = {symbol: i for i, symbol in enumerate(needle.VOCABULARY)}
    sums: dict[tuple[str, str, int, float], list[float]] = {}
    tasks = suite_named("ruler").tasks(codec, None)
    for task in tqdm(tasks, desc="block scores", unit="task"):
        for sample in task.samples(codec, args.length, args.samples, SEED):
            answer = [symbols[symbol] for symbol in sample.meta["answer"].split()]
            tokens = [*sample.prompt, *answer]
            at = range(len(sample.prompt), len(tokens) - 1)
            chosen = [at[i * len(at) // min(args.steps, len(at))] for i in range(min(args.steps, len(at)))]
            for query, key, _, scale in capture(model, tokens):
                group = query.shape[0] // key.shape[0]
                for step in chosen:
                    start = placement.window_start(step + 1)
                    for head in range(key.shape[0]):
                        q = query[head * group : (head + 1) * group, step] * scale
                        scores = q @ key[head, : step + 1].T
                        needs = scores.softmax(-1)[:, placement.sinks : start].sum(-1) >= NEEDED
                        if not needs.any():
                            continue
                        for blk in BLOCKS:
                            found = recalls(q[needs], key[head, placement.sinks : start], blk)
                            for (name, budget), values in found.items():
                                sums.setdefault((task.name, name, blk, budget), []).extend(values.tolist())
    names = list(dict.fromkeys(name for _, name, _, _ in sums))
    rows = []
    for name in names:
        for blk in BLOCKS:
            for budget in BUDGETS:
                values = [v for (_, n, b, x), found in sums.items() if (n, b, x) == (name, blk, budget) for v in found]
                rows.append(
                    {
                        "score": name,
                        "metadata": SCORES[name][0] if name in SCORES else None,
                        "blk": blk,
                        "budget": budget,
                        "recall": sum(values) / len(values),
                        "pairs": len(values),
                    }
                )
    data = {**common.header("block_scores"), "model": {"id": described.id, "sha256": described.sha256()}}
    data |= {"length": args.length, "samples": args.samples, "second_pass": SECOND_PASS, "rows": rows}
    out = common.RESULTS / common.machine_name() / ("block_scores_quick.json" if args.quick else "block_scores.json")
    out.write_text(json.dumps(data, indent=1) + "\n")
    for blk in BLOCKS:
        print(f"blk {blk}: recall at budgets {', '.join(map(str, BUDGETS))}")
        for name in names:
            values = [row["recall"] for row in rows if (row["score"], row["blk"]) == (name, blk)]
            print(f"  {name:28}" + "  ".join(f"{value:.3f}" for value in values))


if __name__ == "__main__":
    main()
