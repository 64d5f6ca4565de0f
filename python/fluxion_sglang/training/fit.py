"""Training of the head predictor from features and labels, and what it is worth on sequences it has not seen.

Three tasks share one network (Fluxion, section 5.2): streaming or not (binary cross-entropy over all samples), bgt0 and
k (regression over retrieval heads only). What serving uses of the last two is the budget bgt0 + k * log2(blk) at block
sizes 16 to 128, so the main regression term is on these four budgets against the labels measured there.

That term is a pinball loss. An error of a budget does not cost the same on both sides: too small breaks the error bound
tau, so it costs quality, and too large only costs bytes. The pinball loss at quantile p has its minimum where the
budget suffices for a share p of the cases that look alike; a squared error would aim at the mean, which is too small
for many heads of a skewed distribution. bgt0 and k by themselves are fitted at the median: two upper
quantiles added up would be more than the quantile of the sum.

Off the training sequences no quantile is promised: budgets get margins from the validation sequences (`margins.py`).

Sequences, not samples, are dealt to training, validation and test: the steps of one sequence resemble each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.policy.selector import LOG2_BLOCKS
from fluxion_sglang.predictor.features import BUDGETS, COUNT, INDEX
from fluxion_sglang.predictor.network import HeadPredictor
from fluxion_sglang.training.margins import fit_margins
from fluxion_sglang.training.scores import Samples, one_block, score

_LOG2 = torch.tensor(LOG2_BLOCKS, dtype=torch.float32)
_SKEWED = 0.2
"""A class with a smaller share than this is weighted up."""


class Fitted(NamedTuple):
    """A trained network on the CPU; streaming heads are those with a logit above the threshold; margins
    [layers, Hq, 4] float32 (`margins.py`); metrics are JSON."""

    network: HeadPredictor
    threshold: float
    margins: torch.Tensor
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Split:
    """Which samples train, choose and test: [S] bool each, no sequence in two of them."""

    train: torch.Tensor
    validation: torch.Tensor
    test: torch.Tensor


def split_sequences(sequences: torch.Tensor, seed: int) -> Split:
    """Deal whole sequences: of every seven five train, one chooses the threshold and the margins, one tests.

    Args:
        sequences: [S] integers, the sequence a sample comes from.

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


def fit(
    features: torch.Tensor,
    bgt0: torch.Tensor,
    k: torch.Tensor,
    streaming: torch.Tensor,
    budgets: torch.Tensor,
    sequences: torch.Tensor,
    *,
    epochs: int,
    seed: int,
    quantile: float,
    miss_rate: float,
    coverage: float,
    progress: bool = True,
    batch: int = 4096,
    learning_rate: float = 2e-3,
    weight_decay: float = 1e-2,
    device: str = "cpu",
) -> Fitted:
    """Train a predictor; the same arguments give the same network on the same machine and thread count.

    Args:
        features: [S, 41] float32. bgt0, k: [S] float32. streaming: [S] bool. budgets: [S, 4] float32 (see `Samples`).
        sequences: [S] integers, the sequence a sample comes from.
        quantile: in (0, 1), of the budgets: the share of heads whose budget shall suffice.
        miss_rate: the share of the validation sequences' retrieval heads that the streaming threshold may call
            streaming.
        coverage: in (0, 1), the share of budgets that shall suffice, for every head: margins are set so on the
            validation sequences.
        progress: show a bar.
        batch: samples of an optimiser step, fewer where there are few samples.

    Raises:
        ValueError: shapes that do not fit, values that are not finite, or too few samples or sequences.
    """
    if not 0 < quantile < 1 or not 0 < coverage < 1 or not 0 <= miss_rate < 1 or epochs < 1:
        raise ValueError(
            f"quantile is {quantile:g}, coverage {coverage:g}, miss_rate {miss_rate:g} and epochs {epochs}; give a "
            "quantile and a coverage between 0 and 1, a miss rate from 0 to below 1 and at least 1 epoch."
        )
    samples = _checked(features, bgt0, k, streaming, budgets, sequences)
    split = split_sequences(sequences, seed)
    train, validation, test = (samples[which] for which in (split.train, split.validation, split.test))
    for part, name in ((train, "training"), (validation, "validation"), (test, "test")):
        if bool(part.streaming.all()):
            raise ValueError(
                f"The {name} sequences hold no retrieval head, so there is nothing to learn a budget from or to "
                "measure one with; collect samples from more or longer sequences."
            )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = HeadPredictor()
    _standardise(network, train.features)
    _train(network, train, validation, epochs, seed, progress, quantile, batch, learning_rate, weight_decay, device)
    network = network.to("cpu").eval().requires_grad_(False)
    line, budgets, logits = _predicted(network, validation.features)
    threshold = streaming_threshold(logits, validation.streaming, miss_rate)
    layers, heads = (int(numbers.max()) + 1 for numbers in _heads(features))
    margins = _margins(budgets, validation, (layers, heads), coverage)
    line, budgets, logits = _predicted(network, test.features)
    layer, head = _heads(test.features)
    with_margins = budgets * margins[layer, head]
    metrics = {
        "samples": {"train": len(train), "validation": len(validation), "test": len(test)},
        "sequences": {
            name: len(sequences[which].unique())
            for name, which in (("train", split.train), ("validation", split.validation), ("test", split.test))
        },
        "settings": {
            "epochs": epochs,
            "seed": seed,
            "quantile": quantile,
            "miss_rate": miss_rate,
            "coverage": coverage,
        },
        "streaming_share": float(test.streaming.float().mean()),
        "predictor": score(line, with_margins, logits, logits > threshold, test),
        "without_margins": score(line, budgets, logits, logits > threshold, test),
        "head_constant": score(*_head_constant(train, test.features), test),
        "anchor": score(*_anchor(test.features), test),
    }
    return Fitted(network, threshold, margins, metrics)


def streaming_threshold(logits: torch.Tensor, streaming: torch.Tensor, miss_rate: float) -> float:
    """The least threshold that calls at most a share `miss_rate` of the retrieval heads streaming.

    Never below 0: a head that is more likely a retrieval head than not reads its budget, however many misses are
    allowed.

    Args:
        logits: [S] float32. streaming: [S] bool, the labels.
    """
    retrieval = logits[~streaming].sort(descending=True).values
    if len(retrieval) == 0:
        return 0.0
    # Streaming is what lies above the threshold: the heads before this one in the order, and no tie of it.
    return max(0.0, float(retrieval[int(miss_rate * len(retrieval))]))


def pinball(error: torch.Tensor, quantile: float) -> torch.Tensor:
    """Loss of error = label - prediction: `quantile` a unit above the prediction, 1 - `quantile` below."""
    return torch.maximum(quantile * error, (quantile - 1) * error)


def _checked(
    features: torch.Tensor,
    bgt0: torch.Tensor,
    k: torch.Tensor,
    streaming: torch.Tensor,
    budgets: torch.Tensor,
    sequences: torch.Tensor,
) -> Samples:
    count = len(features)
    wanted = {"features": (COUNT,), "bgt0": (), "k": (), "streaming": (), "budgets": (len(BLOCKS),), "sequences": ()}
    given = (features, bgt0, k, streaming, budgets, sequences)
    for (name, shape), tensor in zip(wanted.items(), given, strict=True):
        if tuple(tensor.shape) != (count, *shape):
            raise ValueError(f"{name} has the shape {list(tensor.shape)} and must have {[count, *shape]}.")
    streaming = streaming.bool()
    for name, tensor in (
        ("features", features),
        ("bgt0", bgt0[~streaming]),
        ("k", k[~streaming]),
        ("budgets", budgets[~streaming]),
    ):
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} holds values that are not finite; collect the samples again.")
    return Samples(features.float(), bgt0.float(), k.float(), budgets.float(), streaming)


def _standardise(network: HeadPredictor, features: torch.Tensor) -> None:
    values = features.double()
    mean, std = values.mean(0), values.std(0, correction=0)
    # A feature that does not vary in training says nothing: a unit std keeps its rounding errors small, too.
    constant = std <= 1e-6 * mean.abs().clamp(min=1e-6)
    network.mean.copy_(mean)
    network.std.copy_(torch.where(constant, 1.0, std))


def _train(
    network: HeadPredictor,
    train: Samples,
    validation: Samples,
    epochs: int,
    seed: int,
    progress: bool,
    quantile: float,
    batch: int,
    learning_rate: float,
    weight_decay: float,
    device: str,
) -> None:
    """Leaves the weights of the epoch with the least validation loss in the network."""
    retrieval = ~train.streaming
    scale = torch.stack([train.bgt0[retrieval].std(correction=0), train.k[retrieval].std(correction=0), torch.ones(())])
    shift = torch.stack([train.bgt0[retrieval].mean(), train.k[retrieval].mean(), torch.zeros(())])
    scale[:2] = scale[:2].clamp(min=1e-3)
    budget_scale = train.budgets[retrieval].std(0, correction=0).clamp(min=1e-3).to(device)
    share = float(train.streaming.float().mean())
    weight = (1 - share) / share if 0 < min(share, 1 - share) < _SKEWED else 1.0
    classify = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(weight, device=device))
    network.to(device)
    scale, shift, log2 = scale.to(device), shift.to(device), _LOG2.to(device)

    def loss_of(part: Samples) -> torch.Tensor:
        # The last layer learns numbers around 1; the true units are folded into its weights at the end.
        raw = network(part.features)
        keep = ~part.streaming
        loss: torch.Tensor = classify(raw[:, 2], part.streaming.float())
        if bool(keep.any()):
            pred = raw[keep] * scale + shift
            lines, labels = pred[:, :1] + pred[:, 1:2] * log2, part.budgets[keep]
            # A budget of everything is a ceiling that the selector clips to: a line above it is no error.
            lines = torch.where(labels >= 1, lines.clamp(max=1.0), lines)
            loss = loss + pinball((labels - lines) / budget_scale, quantile).mean()
            targets = torch.stack([part.bgt0[keep], part.k[keep]], 1)
            loss = loss + 0.25 * pinball((targets - pred[:, :2]) / scale[:2], 0.5).mean()
        return loss

    def on_device(part: Samples) -> Samples:
        return Samples(
            part.features.to(device),
            part.bgt0.to(device),
            part.k.to(device),
            part.budgets.to(device),
            part.streaming.to(device),
        )

    train, validation = on_device(train), on_device(validation)
    # At least some steps an epoch, however few the samples.
    batch = max(1, min(batch, math.ceil(len(train) / 8)))
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate, weight_decay=weight_decay)
    steps = epochs * math.ceil(len(train) / batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    random = torch.Generator().manual_seed(seed)
    best, kept = math.inf, {name: value.clone() for name, value in network.state_dict().items()}
    bar = tqdm(total=steps, desc="training", unit="step", disable=not progress)
    for _ in range(epochs):
        network.train()
        for chosen in torch.randperm(len(train), generator=random).split(batch):
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(train[chosen.to(device)])
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 5.0)
            optimizer.step()
            schedule.step()
            bar.update()
        network.eval()
        with torch.no_grad():
            parts = torch.arange(len(validation), device=device).split(65536)
            current = sum(float(loss_of(validation[p])) * len(p) for p in parts) / len(validation)
        bar.set_postfix(validation=f"{current:.4f}")
        if current < best:
            best, kept = current, {name: value.clone() for name, value in network.state_dict().items()}
    bar.close()
    if not math.isfinite(best):
        raise ValueError("The training diverged; lower learning_rate, or look for outliers in the features.")
    network.load_state_dict(kept)
    last = network.layers[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight.mul_(scale.unsqueeze(1))
        last.bias.mul_(scale).add_(shift)
        # The weight of the rarer class moved the logit by its logarithm; back to odds.
        last.bias[2] -= math.log(weight)


def _predict(network: HeadPredictor, features: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([network(part) for part in features.split(65536)])


def _predicted(network: HeadPredictor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bgt0 and k [S, 2], budgets without margins [S, 4], at least one block, and logits of streaming [S]."""
    pred = _predict(network, features)
    lines = pred[:, :1] + pred[:, 1:2] * _LOG2
    return pred[:, :2], torch.maximum(lines, one_block(features)), pred[:, 2]


def _heads(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return features[:, INDEX["layer"]].long(), features[:, INDEX["head"]].long()


def _margins(budgets: torch.Tensor, samples: Samples, shape: tuple[int, int], coverage: float) -> torch.Tensor:
    """Of the samples' retrieval heads, whose predicted budgets are among `budgets` [S, 4]."""
    keep = ~samples.streaming
    layer, head = _heads(samples.features[keep])
    return fit_margins(budgets[keep], samples.budgets[keep], layer, head, shape, coverage)


def _head_constant(
    train: Samples, features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Baseline: every (layer, head) always as it was on average in training; unseen ones as all heads were."""
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
    """Baseline: the anchor query's budgets, which need no training; bgt0 and k by a line through the four."""
    budgets = features[:, BUDGETS]
    centred = _LOG2 - _LOG2.mean()
    k = (budgets * centred).sum(1) / (centred**2).sum()
    line = torch.stack([budgets.mean(1) - k * _LOG2.mean(), k], 1)
    return line, budgets, -budgets.sum(1), (budgets == 0).all(1)
