"""Trains the head predictor from features and labels, and evaluates it on unseen sequences.

Three tasks share one network (Fluxion, section 5.2): streaming or not (binary cross-entropy over all samples), bgt0 and
k (regression over retrieval heads only). Serving uses the budget bgt0 + k * log2(blk) at block sizes 16 to 128. So the
main regression term compares these four budgets with the labels measured there.

That term is a pinball loss, because errors of a budget are asymmetric: too small breaks the error bound tau and costs
quality, too large only costs bytes. The pinball loss at quantile p is minimal if the budget suffices for a share p of
similar cases. A squared error would fit the mean, which is too small for many heads of a skewed distribution. bgt0 and
k themselves are fitted at the median, because the sum of two upper quantiles exceeds the quantile of the sum.

The quantile does not hold for sequences outside the training set, so budgets get margins from the validation sequences
(`margins.py`).

Sequences, not samples, are divided into training, validation and test, because the steps of a sequence are similar.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.predictor.features import BUDGETS, COUNT, INDEX
from fluxion_sglang.predictor.network import HeadPredictor
from fluxion_sglang.training.artifact_writer import Trained
from fluxion_sglang.training.margins import fit_margins
from fluxion_sglang.training.scores import Samples, one_block, score

_LOG2 = torch.tensor([blk.bit_length() - 1 for blk in BLOCKS], dtype=torch.float32)
_SKEWED = 0.2
"""A class with a smaller share than this gets a higher weight."""


_BATCH, _LEARNING_RATE, _WEIGHT_DECAY = 4096, 2e-3, 1e-2


@dataclass(frozen=True)
class Settings:
    """Options of the training; every value is checked.

    Attributes:
        epochs: passes over the samples.
        quantile: in (0, 1), of the budgets: the share of heads whose budget must suffice.
        miss_rate: largest share of the validation sequences' retrieval heads that the threshold may call streaming.
        coverage: in (0, 1), the share of budgets that must suffice, for every head; margins are set to reach it on the
            validation sequences.

    Raises:
        ValueError: one sentence.
    """

    epochs: int
    seed: int
    quantile: float
    miss_rate: float
    coverage: float

    def __post_init__(self) -> None:
        for name, legal, words in (
            ("quantile", 0 < self.quantile < 1, "a number between 0 and 1, such as 0.9"),
            ("coverage", 0 < self.coverage < 1, "a number between 0 and 1, such as 0.98"),
            ("miss_rate", 0 <= self.miss_rate < 1, "a number from 0 to below 1, such as 0.001"),
            ("epochs", self.epochs >= 1, "at least 1"),
        ):
            if not legal:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name):g}; give {words}.")


class Split(NamedTuple):
    """Disjoint sets of samples, [S] bool each; all samples of a sequence are in the same set."""

    train: torch.Tensor
    validation: torch.Tensor
    test: torch.Tensor


def split_sequences(sequences: torch.Tensor, seed: int) -> Split:
    """Divide whole sequences: of every seven, five are for training, one for threshold and margins, and one for
    testing.

    Args:
        sequences: [S] integers, the sequence of each sample.

    Raises:
        ValueError: fewer than three sequences.
    """
    ids = sequences.unique()
    if len(ids) < 3:
        raise ValueError(
            f"The samples come from {len(ids)} sequences, but training, validation and test each need their own; "
            "collect samples from at least 3, better 30."
        )
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    part = max(1, len(ids) // 7)
    validation, test = torch.isin(sequences, ids[:part]), torch.isin(sequences, ids[part : 2 * part])
    return Split(~(validation | test), validation, test)


def fit(samples: Samples, settings: Settings, progress: bool = True) -> Trained:
    """Train a predictor. Equal arguments give the same network on the same machine and thread count.

    Args:
        progress: show a bar.

    Raises:
        ValueError: shapes that do not fit, values that are not finite, or too few samples or sequences.
    """
    samples = _checked(samples)
    split = split_sequences(samples.sequence, settings.seed)
    parts = {name: samples[which] for name, which in split._asdict().items()}
    for name, part in parts.items():
        if bool(part.streaming.all()):
            raise ValueError(
                f"The {'training' if name == 'train' else name} sequences hold no retrieval head, so there is nothing "
                "to learn a budget from or to measure one with; collect samples from more or longer sequences."
            )
    train, validation, test = parts.values()
    network, threshold, margins = _learn(train, validation, settings, progress)
    line, budgets, logits = _predicted(network, test.features)
    layer, head = _heads(test.features)
    metrics = {
        "samples": {name: len(part) for name, part in parts.items()},
        "sequences": {name: len(part.sequence.unique()) for name, part in parts.items()},
        "settings": asdict(settings),
        "streaming_share": float(test.streaming.float().mean()),
        "predictor": score(line, budgets * margins[layer, head], logits, logits > threshold, test),
        "without_margins": score(line, budgets, logits, logits > threshold, test),
        "head_constant": score(*_head_constant(train, test.features), test),
        "anchor": score(*_anchor(test.features), test),
    }
    return Trained(network, threshold, margins, metrics)


def _learn(
    train: Samples, validation: Samples, settings: Settings, progress: bool
) -> tuple[HeadPredictor, float, torch.Tensor]:
    """The network, in evaluation mode, the threshold of its streaming logit, and its margins [layers, Hq, 4]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        network = HeadPredictor()
    _standardise(network, train.features)
    _train(network, train, validation, settings, progress)
    network.round_weights()
    network = network.eval().requires_grad_(False)
    _, budgets, logits = _predicted(network, validation.features)
    threshold = streaming_threshold(logits, validation.streaming, settings.miss_rate)
    shape = tuple(int(numbers.max()) + 1 for numbers in _heads(torch.cat([train.features, validation.features])))
    return network, threshold, _margins(budgets, validation, (shape[0], shape[1]), settings)


def streaming_threshold(logits: torch.Tensor, streaming: torch.Tensor, miss_rate: float) -> float:
    """The least threshold that calls at most a share `miss_rate` of the retrieval heads streaming.

    It is never below 0, so a head that is more likely a retrieval head reads its budget for any `miss_rate`.

    Args:
        logits: [S] float32. streaming: [S] bool, the labels.
    """
    retrieval = logits[~streaming].sort(descending=True).values
    if len(retrieval) == 0:
        return 0.0
    # Heads strictly above the threshold stream, so this head and its ties do not.
    return max(0.0, float(retrieval[int(miss_rate * len(retrieval))]))


def pinball(error: torch.Tensor, quantile: float) -> torch.Tensor:
    """Loss of error = label - prediction: `quantile` a unit above the prediction, 1 - `quantile` below."""
    return torch.maximum(quantile * error, (quantile - 1) * error)


def _checked(samples: Samples) -> Samples:
    """The samples in float32; raises ValueError for wrong shapes or values that are not finite."""
    last = {"features": (COUNT,), "budgets": (len(BLOCKS),)}
    keep = ~samples.streaming.bool()
    for name, tensor in vars(samples).items():
        wanted = (len(samples), *last.get(name, ()))
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"{name} has the shape {list(tensor.shape)} and must have {list(wanted)}.")
        if not bool((tensor if name == "features" else tensor[keep]).isfinite().all()):
            raise ValueError(f"{name} holds values that are not finite; collect the samples again.")
    return Samples(
        samples.features.float(),
        samples.bgt0.float(),
        samples.k.float(),
        samples.budgets.float(),
        samples.streaming.bool(),
        samples.sequence,
    )


def _standardise(network: HeadPredictor, features: torch.Tensor) -> None:
    values = features.double()
    mean, std = values.mean(0), values.std(0, correction=0)
    # For a constant feature, a unit std also keeps rounding errors small.
    constant = std <= 1e-6 * mean.abs().clamp(min=1e-6)
    network.mean.copy_(mean)
    network.std.copy_(torch.where(constant, 1.0, std))


class _Loss:
    """The loss of the three tasks, scaled to values around 1, which the last layer predicts.

    Args:
        train: gives the scales, and the weight of the rarer class.
    """

    def __init__(self, train: Samples, quantile: float) -> None:
        retrieval = train[~train.streaming]
        lines = torch.stack([retrieval.bgt0, retrieval.k], 1)
        one = torch.ones(1)
        self.scale = torch.cat([lines.std(0, correction=0).clamp(min=1e-3), one])
        self.shift = torch.cat([lines.mean(0), 0 * one])
        self._budget_scale = retrieval.budgets.std(0, correction=0).clamp(min=1e-3)
        self._quantile = quantile
        share = float(train.streaming.float().mean())
        self._weight = (1 - share) / share if 0 < min(share, 1 - share) < _SKEWED else 1.0
        self._classify = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(self._weight))

    def __call__(self, network: HeadPredictor, part: Samples) -> torch.Tensor:
        raw = network(part.features)
        keep = ~part.streaming
        loss: torch.Tensor = self._classify(raw[:, 2], part.streaming.float())
        if bool(keep.any()):
            pred = raw[keep] * self.scale + self.shift
            lines, labels = pred[:, :1] + pred[:, 1:2] * _LOG2, part.budgets[keep]
            # Budgets are clipped at 1 when they are used, so a prediction above 1 is no error if the label is 1.
            lines = torch.where(labels >= 1, lines.clamp(max=1.0), lines)
            loss = loss + pinball((labels - lines) / self._budget_scale, self._quantile).mean()
            targets = torch.stack([part.bgt0[keep], part.k[keep]], 1)
            loss = loss + 0.25 * pinball((targets - pred[:, :2]) / self.scale[:2], 0.5).mean()
        return loss

    def fold_units(self, network: HeadPredictor) -> None:
        """Fold the scales into the last layer, so that the network predicts true units."""
        last = network.layers[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.weight.mul_(self.scale.unsqueeze(1))
            last.bias.mul_(self.scale).add_(self.shift)
            # The class weight shifted the logit by its logarithm; undo it.
            last.bias[2] -= math.log(self._weight)


def _train(network: HeadPredictor, train: Samples, validation: Samples, settings: Settings, progress: bool) -> None:
    """Train, and keep the weights of the epoch with the least validation loss."""
    loss_of = _Loss(train, settings.quantile)
    # At least eight steps an epoch, even for few samples.
    batch = max(1, min(_BATCH, math.ceil(len(train) / 8)))
    optimizer = torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
    steps = settings.epochs * math.ceil(len(train) / batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    random = torch.Generator().manual_seed(settings.seed)
    best, kept = math.inf, copy.deepcopy(network.state_dict())
    with tqdm(total=steps, desc="training", unit="step", disable=not progress) as bar:
        for _ in range(settings.epochs):
            network.train()
            for chosen in torch.randperm(len(train), generator=random).split(batch):
                optimizer.zero_grad(set_to_none=True)
                loss = loss_of(network, train[chosen])
                loss.backward()
                nn.utils.clip_grad_norm_(network.parameters(), 5.0)
                optimizer.step()
                schedule.step()
                bar.update()
            network.eval()
            with torch.no_grad():
                parts = torch.arange(len(validation)).split(65536)
                current = sum(float(loss_of(network, validation[p])) * len(p) for p in parts) / len(validation)
            bar.set_postfix(validation=f"{current:.4f}")
            if current < best:
                best, kept = current, copy.deepcopy(network.state_dict())
    if not math.isfinite(best):
        raise ValueError("The training diverged; look for outliers in the features.")
    network.load_state_dict(kept)
    loss_of.fold_units(network)


def _predicted(network: HeadPredictor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bgt0 and k [S, 2], budgets without margins [S, 4], at least one block, and logits of streaming [S]."""
    with torch.no_grad():
        pred = torch.cat([network(part) for part in features.split(65536)])
    lines = pred[:, :1] + pred[:, 1:2] * _LOG2
    return pred[:, :2], torch.maximum(lines, one_block(features)), pred[:, 2]


def _heads(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return features[:, INDEX["layer"]].long(), features[:, INDEX["head"]].long()


def _margins(budgets: torch.Tensor, samples: Samples, shape: tuple[int, int], settings: Settings) -> torch.Tensor:
    """Fit the margins on the samples' retrieval heads. budgets: [S, 4], predicted for all samples."""
    keep = ~samples.streaming
    layer, head = _heads(samples.features[keep])
    return fit_margins(budgets[keep], samples.budgets[keep], layer, head, shape, settings.coverage)


def _head_constant(
    train: Samples, features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Baseline: every (layer, head) always has its mean in training; unseen ones have the mean of all heads."""
    names = torch.cat([train.features, features])[:, [INDEX["layer"], INDEX["head"]]]
    where = names.unique(dim=0, return_inverse=True)[1]
    seen, asked = where[: len(train)], where[len(train) :]
    heads = int(where.max()) + 1

    def average(values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(heads, values.shape[1], dtype=torch.float64).index_add_(0, at, values.double())
        counts = torch.zeros(heads, 1, dtype=torch.float64).index_add_(0, at, torch.ones(len(at), 1).double())
        return torch.where(counts > 0, sums / counts.clamp(min=1), values.double().mean(0)).float()

    retrieval = ~train.streaming
    labels = torch.cat([train.bgt0.unsqueeze(1), train.k.unsqueeze(1), train.budgets], 1)[retrieval]
    means = average(labels, seen[retrieval])[asked]
    share = average(train.streaming.float().unsqueeze(1), seen)[asked, 0]
    return means[:, :2], means[:, 2:], share, share > 0.5


def _anchor(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Baseline: the anchor query's budgets, without training; bgt0 and k from a line through the four."""
    budgets = features[:, BUDGETS]
    centred = _LOG2 - _LOG2.mean()
    k = (budgets * centred).sum(1) / (centred**2).sum()
    line = torch.stack([budgets.mean(1) - k * _LOG2.mean(), k], 1)
    return line, budgets, -budgets.sum(1), (budgets == 0).all(1)
