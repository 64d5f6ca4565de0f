"""The training loop. An interrupted run goes on where it was, with the very next step."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from fluxion_sglang.commands import needle

from .data import CHAIN, COMMON, ECHO, FACT_VALUE, FREQUENT, KINDS, MULTI, WORD, Generator
from .model import SINKS, WINDOW, NeedleModel, Shape
from .muon import Muon
from .recipe import Recipe, Stage

ANSWERS = (FACT_VALUE, MULTI, CHAIN, COMMON, FREQUENT)
SAVE_EVERY, LOG_EVERY = 50, 25


def losses(
    model: NeedleModel,
    recipe: Recipe,
    stage: Stage,
    tokens: Tensor,
    targets: Tensor,
    kinds: Tensor,
    positions: Tensor,
    probes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Language loss, pressures on heads [2], and hits and counts [2, KINDS + 1]."""
    logits, (error, size) = model(tokens, positions, probes)
    ce = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    answer = (kinds >= FACT_VALUE).float() * torch.where(kinds == ECHO, 0.5, 1.0)
    answer = torch.where((kinds == COMMON) | (kinds == FREQUENT), stage.counted, answer)
    answer = torch.where((tokens == needle.ANSWER) & (kinds == ECHO), stage.opening, answer)
    word = (kinds == WORD).float()
    loss = (ce * answer).sum() / (answer.sum() + 1) + recipe.word * (ce * word).sum() / (word.sum() + 1)
    # Saturates: a head that needs the middle may need all of it, the others lose what they do not need.
    squared = error.pow(2)
    pressure = torch.zeros(2)
    if probes is not None:
        pressure = torch.stack([(squared / (squared + recipe.tau**2)).mean(), size.pow(2).mean()])
    with torch.no_grad():
        hit = logits.argmax(-1) == targets
        counts = torch.stack(
            [torch.stack([(hit & (kinds == i)).sum(), (kinds == i).sum()]) for i in range(len(KINDS))], 1
        )
        streaming = (error < 0.1).float().mean() if probes is not None else torch.zeros(())
    return loss, pressure, torch.cat([counts.float(), streaming.expand(2, 1)], 1)


class Trainer:
    """The state of a run: everything that a continued run needs to make the same steps."""

    def __init__(self, recipe: Recipe, out: Path, compiled: bool = True) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.out = out
        self.model = NeedleModel(Shape())
        self.data = Generator(recipe.seed + 1)
        self.rates = [recipe.lr, recipe.rest_lr]
        self.step = 0
        self.optimizers = self._optimizers()
        torch._dynamo.config.recompile_limit = 64  # each shape of a batch is compiled, and the default is eight
        self.loss = torch.compile(losses, dynamic=False) if compiled else losses

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        recipe, weights = self.recipe, self.model.weights()
        matrices = [w for name, w in weights.items() if "layers" in name and w.ndim == 2]
        rest = [w for name, w in weights.items() if not ("layers" in name and w.ndim == 2)]
        return [
            Muon(matrices, lr=recipe.lr, weight_decay=recipe.weight_decay),
            torch.optim.AdamW(rest, lr=recipe.rest_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]

    def begin_anew(self) -> None:
        """As if the run began here from the exported weights: rounded to bf16, without momentum, with other data."""
        with torch.no_grad():
            for weight in self.model.weights().values():
                weight.copy_(weight.bfloat16())
        self.optimizers = self._optimizers()
        self.data = Generator(self.recipe.seed + 1 + self.step)

    def start_from(self, folder: Path) -> None:
        """Take an exported model as what the stages before the last one that begins anew would give."""
        self.step, found = 0, None
        for stage in self.recipe.stages:
            found = self.step if stage.anew else found
            self.step += stage.steps
        if found is None:
            raise SystemExit("No stage of this recipe begins anew from exported weights; run it from the start.")
        self.step = found
        saved = load_file(folder / "model.safetensors")
        with torch.no_grad():
            for name, weight in self.model.weights().items():
                weight.copy_(saved[name])

    def save(self) -> None:
        state = {
            "recipe": dataclasses.asdict(self.recipe),
            "step": self.step,
            "model": self.model.weights(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "data": self.data.state(),
        }
        partial = self.out / "state.partial"
        torch.save(state, partial)
        partial.replace(self.out / "state.pt")

    def resume(self) -> None:
        path = self.out / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=False)
        if state["recipe"] != dataclasses.asdict(self.recipe):
            raise SystemExit(f"{path} is of another recipe; give another --out, or delete it to start over.")
        with torch.no_grad():
            for name, weight in self.model.weights().items():
                weight.copy_(state["model"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.data.restore(state["data"])
        self.step = state["step"]

    def train_step(self, stage: Stage, number: int) -> tuple[float, float, Tensor]:
        """One step, the stage's step `number`: language loss, pressure of the middle, hits and counts (`losses`)."""
        for optimizer, full in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = full * self.recipe.rate(self.step, stage, number)
        size, length, mix = stage.at(number)
        batch = self.data.batch(size, length, mix)
        tokens, targets, kinds, positions = (
            torch.from_numpy(array) for array in (batch.tokens, batch.targets, batch.kinds, batch.positions)
        )
        probes = None
        if stage.penalty > 0 and length >= 2 * (SINKS + WINDOW):
            probes = self._probes(kinds, stage.probes)
        loss, pressure, counts = self.loss(self.model, self.recipe, stage, tokens, targets, kinds, positions, probes)
        (loss + stage.penalty * pressure[0] + stage.rest * pressure[1]).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item(), pressure[0].item(), counts

    def _probes(self, kinds: Tensor, count: int) -> Tensor:
        """[B, count]: places late enough to have a middle; two thirds in answers where there are any."""
        start = SINKS + WINDOW + 64
        weights = torch.where(kinds >= FACT_VALUE, 1.0, 0.0)
        weights[:, :start] = 0
        share = weights.sum(1, keepdim=True).clamp(min=1)
        weights = weights / share * 2 / 3
        weights[:, start:] += 1 / 3 / (kinds.shape[1] - start)
        return torch.multinomial(weights, count, replacement=True)


def run(recipe: Recipe, out: Path, compiled: bool = True, stop: int | None = None, weights: Path | None = None) -> None:
    """Train in the folder `out`, from where an earlier run there has stopped.

    Args:
        compiled: use torch.compile. stop: end before this step, as an interruption would; for tests.
        weights: folder of a model to begin the last stage that begins anew with, instead of the stages before it.
    """
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(recipe, out, compiled)
    if weights is not None:
        if (out / "state.pt").exists():
            raise SystemExit(f"{out} has a run already, which goes on without --from; give another --out to begin one.")
        trainer.start_from(weights)
    trainer.resume()
    log = _log(out / "log.jsonl", trainer.step)
    bar = tqdm(total=recipe.steps, initial=trainer.step, unit="step", mininterval=10)
    since, tokens, total = time.time(), 0, torch.zeros(2, len(KINDS) + 1)
    sums, count = [0.0, 0.0], 0
    first = 0
    for stage in recipe.stages:
        for number in range(stage.steps):
            if first + number < trainer.step or trainer.step == stop:
                continue
            if stage.anew and number == 0:
                trainer.begin_anew()
            torch.manual_seed(recipe.seed * 1_000_003 + trainer.step)  # probes do not depend on interruptions
            loss, pressure, counts = trainer.train_step(stage, number)
            total += counts
            sums, count = [sums[0] + loss, sums[1] + pressure], count + 1
            size, length, _ = stage.at(number)
            tokens += size * length
            bar.update()
            if trainer.step % LOG_EVERY == 0:
                shares = (total[0] / total[1].clamp(min=1)).tolist()
                row: dict[str, Any] = {
                    "step": trainer.step,
                    "loss": round(sums[0] / count, 4),
                    "pressure": round(sums[1] / count, 4),
                }
                row |= {name: round(shares[i], 3) for i, name in enumerate(KINDS) if total[1, i] > 0 and i}
                row |= {
                    "streaming": round(total[0, -1].item() / count, 3),
                    "tokens_per_s": round(tokens / (time.time() - since)),
                }
                log.write(json.dumps(row) + "\n")
                log.flush()
                bar.set_postfix_str(json.dumps(row))
                since, tokens, total, sums, count = time.time(), 0, torch.zeros(2, len(KINDS) + 1), [0.0, 0.0], 0
            if trainer.step % SAVE_EVERY == 0:
                trainer.save()
        first += stage.steps
    trainer.save()


def _log(path: Path, step: int) -> TextIO:
    """The run's log, without what was logged after the state that the run goes on from."""
    rows = path.read_text().splitlines(keepends=True) if path.exists() else []
    path.write_text("".join(row for row in rows if json.loads(row)["step"] <= step))
    return path.open("a")
