"""The head predictor: a small network from a head's 41 features to what it needs to read (Fluxion, section 5.2)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from fluxion_sglang.predictor.features import COUNT

WIDTHS = (COUNT, 272, 240, 144, 3)
"""Features, hidden layers, outputs: a shared backbone, the three predictions apart only in the last layer. 0.112 M
parameters, as in the paper."""

CLIP = 8.0
"""Standardised features beyond this many standard deviations are cut: what training never saw must not run away."""


class HeadPredictor(nn.Module):
    """41 standardised features to (bgt0, k, streaming logit), float32, ReLU between the layers.

    Where it serves, weights are bfloat16 and sums float32; an instruction set that multiplies bfloat16 rounds what a
    layer takes in, too.

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
        """Round the weights to bfloat16, as they serve, so that what is measured of this network holds there."""
        with torch.no_grad():
            for layer in self.layers:
                weight = layer.get_parameter("weight")
                weight.copy_(weight.bfloat16())
