"""The training loop. An interrupted run continues with its next step."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from fluxion_sglang.commands import needle

from .data import CHAIN, COMMON, ECHO, FACT_VALUE, FREQUENT, KINDS, MULTI, WORD, Batch, Generator
from .feed import Feed
from .model import SINKS, WINDOW, NeedleModel
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
    # The pressure saturates: a head that needs the middle may use all of it, while others lose what they do not need.
    squared = error.pow(2)
    pressure = torch.zeros(2, device=ce.device)
    if probes is not None:
        pressure = torch.stack([(squared / (squared + recipe.tau**2)).mean(), size.pow(2).mean()])
    with torch.no_grad():
        hit = logits.argmax(-1) == targets
        counts = torch.stack(
            [torch.stack([(hit & (kinds == i)).sum(), (kinds == i).sum()]) for i in range(len(KINDS))], 1
        )
        streaming = (error < 0.1).float().mean() if probes is not None else ce.new_zeros(())
    return loss, pressure, torch.cat([counts.float(), streaming.expand(2, 1)], 1)


class Trainer:
    """State of a run: everything that a continued run needs to repeat the same steps.

    Args:
        compiled: use torch.compile. device: where to train.
    """

    def __init__(self, recipe: Recipe, out: Path, compiled: bool = True, device: str = "cpu") -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.out = out
        self.device = torch.device(device)
        self.model = NeedleModel(recipe.shape).to(self.device)
        self.data = Generator(recipe.seed + 1)
        self.rates = [recipe.lr, recipe.rest_lr]
        self.step = 0
        self.optimizers = self._optimizers()
        torch._dynamo.config.recompile_limit = 64  # each batch shape is compiled; the default is eight
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
        """Restart from the current weights as from exported ones: rounded to bf16, without momentum, with other
        data."""
        with torch.no_grad():
            for weight in self.model.weights().values():
                weight.copy_(weight.bfloat16())
        self.optimizers = self._optimizers()
        self.data = Generator(self.recipe.seed + 1 + self.step)

    def start_from(self, folder: Path) -> None:
        """Load an exported model in place of all stages before the last one with `anew`."""
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
        state = torch.load(path, weights_only=False, map_location=self.device)
        if state["recipe"] != dataclasses.asdict(self.recipe):
            raise SystemExit(f"{path} is of another recipe; give another --out, or delete it to start over.")
        with torch.no_grad():
            for name, weight in self.model.weights().items():
                weight.copy_(state["model"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.data.restore(state["data"])
        self.step = state["step"]

    def train_step(self, stage: Stage, number: int, batch: Batch | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Execute step `number` of the stage; language loss, pressure of the middle, hits and counts (`losses`)."""
        for optimizer, full in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = full * self.recipe.rate(self.step, stage, number)
        batch = batch or self.data.batch(*stage.at(number))
        arrays = [torch.from_numpy(array) for array in (batch.tokens, batch.targets, batch.kinds, batch.positions)]
        probes = None
        if stage.penalty > 0 and batch.tokens.shape[1] >= 2 * (SINKS + WINDOW):
            probes = self._probes(arrays[2], stage.probes).to(self.device)
        tokens, targets, kinds, positions = (array.to(self.device) for array in arrays)
        loss, pressure, counts = self.loss(self.model, self.recipe, stage, tokens, targets, kinds, positions, probes)
        (loss + stage.penalty * pressure[0] + stage.rest * pressure[1]).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach(), pressure[0].detach(), counts

    def _probes(self, kinds: Tensor, count: int) -> Tensor:
        """[B, count]: positions that have a middle; two thirds of them lie in answers if there are any."""
        start = SINKS + WINDOW + 64
        weights = torch.where(kinds >= FACT_VALUE, 1.0, 0.0)
        weights[:, :start] = 0
        share = weights.sum(1, keepdim=True).clamp(min=1)
        weights = weights / share * 2 / 3
        weights[:, start:] += 1 / 3 / (kinds.shape[1] - start)
        return torch.multinomial(weights, count, replacement=True)


def run(
    recipe: Recipe,
    out: Path,
    compiled: bool = True,
    stop: int | None = None,
    weights: Path | None = None,
    device: str = "cpu",
    workers: int = 0,
    save_s: float = 600.0,
) -> None:
    """Train in the folder `out`; continue an earlier run there.

    Args:
        compiled: use torch.compile. stop: end before this step, as an interruption would; for tests.
        weights: folder of a model that replaces all stages before the last one with `anew`.
        device: where to train. workers: processes that make batches; 0: this process makes them in sequence. save_s:
            seconds between saves of the state, in addition to every 50 steps on a CPU.
    """
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(recipe, out, compiled, device)
    if weights is not None:
        if (out / "state.pt").exists():
            raise SystemExit(f"{out} has a run already, which goes on without --from; give another --out to begin one.")
        trainer.start_from(weights)
    trainer.resume()
    log = Log(out / "log.jsonl", trainer.step, recipe.steps, trainer.device)
    saved = time.time()
    places = [place for place in recipe.places() if place[0] >= trainer.step and (stop is None or place[0] < stop)]
    feed = Feed(recipe.seed + 1, places, workers) if workers else None
    for step, stage, number in places:
        if stage.anew and number == 0:
            trainer.begin_anew()
        torch.manual_seed(recipe.seed * 1_000_003 + step)  # probes must not depend on interruptions
        found = trainer.train_step(stage, number, next(feed) if feed is not None else None)
        size, length, _ = stage.at(number)
        log.add(trainer.step, size * length, *found)
        if (trainer.step % SAVE_EVERY == 0 and trainer.device.type == "cpu") or time.time() - saved > save_s:
            trainer.save()
            saved = time.time()
    if feed is not None:
        feed.close()
    trainer.save()


class Log:
    """Writes a line every 25 steps to a file, beside a progress bar.

    Args:
        step: where the run continues; later lines are removed. steps: of the whole run.
    """

    def __init__(self, path: Path, step: int, steps: int, device: torch.device) -> None:
        rows = path.read_text().splitlines(keepends=True) if path.exists() else []
        path.write_text("".join(row for row in rows if json.loads(row)["step"] <= step))
        self._file = path.open("a")
        self._bar = tqdm(total=steps, initial=step, unit="step", mininterval=10)
        self._device = device
        self._begin()

    def _begin(self) -> None:
        self._since, self._tokens, self._count = time.time(), 0, 0
        self._sums = torch.zeros(2, device=self._device)
        self._total = torch.zeros(2, len(KINDS) + 1, device=self._device)

    def add(self, step: int, tokens: int, loss: Tensor, pressure: Tensor, counts: Tensor) -> None:
        """Add the results of step `step`; wait for the device only if a line is due."""
        self._total += counts
        self._sums += torch.stack([loss, pressure])
        self._tokens += tokens
        self._count += 1
        self._bar.update()
        if step % LOG_EVERY:
            return
        count, total = self._count, self._total.cpu()
        shares = (total[0] / total[1].clamp(min=1)).tolist()
        means = (self._sums / count).tolist()
        row: dict[str, Any] = {"step": step, "loss": round(means[0], 4), "pressure": round(means[1], 4)}
        row |= {name: round(shares[i], 3) for i, name in enumerate(KINDS) if total[1, i] > 0 and i}
        row |= {
            "streaming": round(total[0, -1].item() / count, 3),
            "tokens_per_s": round(self._tokens / (time.time() - self._since)),
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._bar.set_postfix_str(json.dumps(row))
        self._begin()
