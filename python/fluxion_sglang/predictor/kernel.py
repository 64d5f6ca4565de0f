"""The native kernel of the features, which training and serving both call."""

from __future__ import annotations

import torch

from fluxion_sglang.native import function


def features(
    q: torch.Tensor,
    parts: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    anchor: torch.Tensor,
    anchor_q: torch.Tensor,
    mean_k: torch.Tensor,
    layer: int,
    first_head: int,
    sinks: int,
    window: int,
    scale: float,
    out: torch.Tensor,
    isa: str = "",
) -> None:
    """The features of every head of a step, the same bits on every ISA.

    Args:
        isa: one of `native.topology()["isas"]`; "": the best.
        The others are as in `features.decode_features`, in host memory and contiguous, but for q's first dimension.

    Raises:
        ValueError: a shape, dtype, row or length that does not fit; nothing was written.
    """
    function("features")(
        isa, q, parts, rows, seq_lens, anchor, anchor_q, mean_k, layer, first_head, sinks, window, scale, out
    )
