"""The policy `drawn`: groups read what groups of the bundled model would read, on any model.

    python benchmark/drawn.py OUT/samples     # writes benchmark/plans.json from what `fluxion train` recorded

A model with random weights has no heads worth predicting. To time what `fluxion` would cost on it, every group of every
step draws a plan (block size, a budget a head) from those that the bundled model's predictor makes for its own heads.
The deciding itself is not in that time: `plan` draws before the step. `deciding` decides as well, for nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from fluxion_sglang.policy import DecodeStep, LayerPlan, Needs, Policy
from fluxion_sglang.policy.base import UNSEEN, Observed, task_value
from fluxion_sglang.policy.fluxion import FluxionPolicy
from fluxion_sglang.predictor.artifact import LoadedPredictor

PLANS = Path(__file__).with_name("plans.json")
SPEC = "drawn"
DECIDING = "deciding"


class DrawnPolicy(Policy):
    """Draws the plan of every group anew at every step; the draws of a run are the same in every run.

    Args:
        plans: [N, 1 + G] float32: a group's block size (0: all its heads stream) and its heads' budgets. A group of
            another size than G draws the heads that it lacks from further plans of the same block size.
    """

    spec = SPEC

    def __init__(self, plans: torch.Tensor, seed: int = 0) -> None:
        self._plans = plans
        self._random = torch.Generator().manual_seed(seed)
        self._same = {int(blk): plans[plans[:, 0] == blk, 1:] for blk in plans[:, 0].unique()}

    def begin_step(self, step: DecodeStep) -> None:
        self._step = step

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        step = self._step
        groups, group = step.batch * step.kv_heads, step.q_heads // step.kv_heads
        drawn = self._plans[self._draw(len(self._plans), groups)]
        budget = drawn[:, 1 : 1 + group]
        while budget.shape[1] < group:
            more = [self._same[int(blk)][self._draw(len(self._same[int(blk)]), 1)] for blk in drawn[:, 0]]
            budget = torch.cat([budget, *([torch.cat(more)] if more else [budget])], dim=1)[:, :group]
        blk = drawn[:, 0].to(torch.int32).view(step.batch, step.kv_heads).contiguous()
        blk[step.middle == 0] = 0
        budget = budget.reshape(step.batch, step.q_heads).contiguous()
        return LayerPlan(blk, budget, task_value(step.middle, blk, budget))

    def _draw(self, below: int, count: int) -> torch.Tensor:
        return torch.randint(below, (count,), generator=self._random)


class DecidingPolicy(DrawnPolicy):
    """Describes each head and asks a network, as `fluxion` does on a model of any shape, and reads what is drawn.

    Args:
        predictor: of the bundled model; what it says of another one means nothing, and takes as long.
    """

    spec = DECIDING
    needs = Needs.FEATURES

    def __init__(self, plans: torch.Tensor, predictor: LoadedPredictor, seed: int = 0) -> None:
        super().__init__(plans, seed)
        self._predictor = predictor
        self._fluxion: FluxionPolicy | None = None

    def begin_step(self, step: DecodeStep) -> None:
        super().begin_step(step)
        assert self.world is not None
        if self._fluxion is None:
            margins = torch.ones(self.world.layers, step.q_heads, 4)
            self._fluxion = FluxionPolicy(self._predictor._replace(margins=margins))
            self.criterion = self._fluxion.criterion
        self._fluxion.begin_step(step)
        self._ready = [super(DecidingPolicy, self).plan(layer, step.rows) for layer in range(self.world.layers)]

    def plan(self, layer: int, q: torch.Tensor, observed: Observed = UNSEEN) -> LayerPlan:
        assert self._fluxion is not None
        self._fluxion.plan(layer, q, observed)
        return self._ready[layer]


def plans() -> torch.Tensor:
    """Those of plans.json."""
    return torch.tensor(json.loads(PLANS.read_text())["plans"])


def drawn() -> DrawnPolicy:
    """The policy with the plans of plans.json."""
    return DrawnPolicy(plans())


def planned(samples: Path, predictor: Path, shortest: int) -> torch.Tensor:
    """[N, 1 + G]: what a predictor plans for the recorded groups with a middle of at least `shortest` tokens."""
    from fluxion_lab.granularity import select_granularity
    from fluxion_sglang.predictor import artifact
    from fluxion_sglang.predictor.features import INDEX, NAMES
    from fluxion_sglang.predictor.inference import NativePredictor
    from fluxion_sglang.training import dataset, recorder

    model = json.loads((predictor.parent / "config.json").read_text())
    heads = model["num_key_value_heads"]
    loaded = artifact.load(predictor, features=NAMES)
    sequences = sorted({int(path.name.split("-")[0]) for path in samples.glob("*.npz")})
    native, parts = NativePredictor(loaded.network), []
    for _, found in dataset.samples(samples, sequences, model["num_hidden_layers"]):
        features = torch.from_numpy(found.features.copy())
        at = recorder.TAUS.index(loaded.tau)
        features[..., dataset.BUDGETS] = torch.from_numpy(found.anchor_budgets[..., at, 1:])
        features = features.view(-1, *features.shape[-2:])
        middle = features[:, 0, INDEX["cpu_tokens"]].expm1().round().to(torch.int32)
        features, middle = features[middle >= shortest].contiguous(), middle[middle >= shortest]
        if not len(middle):
            continue
        margins = loaded.margins[int(features[0, 0, INDEX["layer"]])]
        predicted = torch.empty(features.shape[:2].numel(), 3)
        native.forward(features.flatten(0, 1), predicted)
        plan = select_granularity(predicted, middle, heads, loaded.threshold, margins)
        parts.append(torch.cat([plan.blk.view(-1, 1).float(), plan.budget.view(plan.blk.numel(), -1)], dim=1))
    return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the plans that the policy `drawn` draws from.")
    parser.add_argument("samples", type=Path, help="the folder `samples` that `fluxion train` leaves in --out")
    parser.add_argument("--shortest", type=int, default=4096, help="tokens of a middle to count")
    parser.add_argument("--count", type=int, default=2048, help="plans to keep")
    args = parser.parse_args()
    import common

    plans = planned(args.samples, common.PREDICTOR, args.shortest)
    kept = plans[torch.randperm(len(plans), generator=torch.Generator().manual_seed(0))[: args.count]]
    rows = [[int(row[0]), *(round(x, 4) for x in row[1:])] for row in kept.tolist()]
    about = {"of": "bundled model, its predictor", "recorded": len(plans), "shortest_middle": args.shortest}
    PLANS.write_text(json.dumps({**about, "plans": rows}).replace("], [", "],\n[") + "\n")
    read = sum(sum(row[1:]) for row in rows) / (len(rows) * (plans.shape[1] - 1))
    print(f"{len(rows)} plans of {len(plans)}: heads read {read:.1%} of the middle on average")


if __name__ == "__main__":
    main()
