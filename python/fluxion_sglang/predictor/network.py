"""The head predictor: a small network from a head's 41 features to its budgets (Fluxion, section 5.2)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from fluxion_sglang.predictor.features import COUNT

WIDTHS = (COUNT, 272, 240, 144, 3)
"""Features, hidden layers, outputs. The three predictions share all but the last layer. 0.112 M parameters, as in the
paper."""

CLIP = 8.0
"""Standardised features are clipped at this many standard deviations, so that unseen inputs cannot diverge."""


class HeadPredictor(nn.Module):
    """41 standardised features to (bgt0, k, streaming logit), float32, ReLU between the layers.

    When served, weights are bfloat16 and sums float32; an instruction set with bfloat16 products also rounds the inputs
    of a layer.

    The budget of the head in blocks of `blk` tokens is bgt0 + k * log2(blk) (Eq. 1), a fraction of the middle.

    Attributes:
        mean, std: [41] float32 buffers, of the training features; std > 0.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(COUNT))
        self.register_buffer("std", torch.ones(COUNT))
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(WIDTHS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, 41] float32. Returns [N, 3] float32: bgt0, k, streaming logit."""
        y = ((x - self.mean) / self.std).clamp(-CLIP, CLIP)
        for layer in self.layers[:-1]:
            y = torch.relu(layer(y))
        out: torch.Tensor = self.layers[-1](y)
        return out

    def round_weights(self) -> None:
        """Round the weights to bfloat16, as served, so that measurements of this network hold when it is served."""
        with torch.no_grad():
            for layer in self.layers:
                weight = layer.get_parameter("weight")
                weight.copy_(weight.bfloat16())
