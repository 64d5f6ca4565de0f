"""Variants of a layer's attention beyond a causal softmax over all tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """The attention variant of one layer.

    Attributes:
        window: number of newest tokens that a token attends to, itself included (sliding-window attention); None: all.
        sinks: [Hq] float32, contiguous: a logit of each head that joins the softmax and has no value (learned attention
            sinks). None: there are none.
        cap: logits are cap * tanh(logit / cap) (logit soft capping); 0: they are not capped.
    """

    window: int | None = None
    sinks: torch.Tensor | None = None
    cap: float = 0.0


PLAIN = Variant()
