"""The native kernel of the features, for both training and serving."""

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
    """Compute the features of every head of a step, bit-identical on every ISA.

    Args:
        q: [B, Hq, D], KV dtype.
        parts: [B, Hq, 5] float32, of q (`PARTS`).
        rows: [B] int32, each request's row in the three anchor tensors.
        seq_lens: [B] int32, tokens with the query's own, at least 1.
        anchor: [R, Hq, 28] float32, the features `ANCHOR`.
        anchor_q: [R, Hq, D], KV dtype, q'.
        mean_k: [R, H, D] float32, mean key of the middle at the time of q'.
        layer, first_head: indices in the model of the layer and of q's head 0 (above 0 under tensor parallelism).
        sinks, window: tokens (`Placement`). scale: multiplies q.k.
        out: [B, Hq, 41] float32, all written.
        isa: one of `native.topology()["isas"]`; "": the best.

    Tensors are in host memory and contiguous, but for q's first dimension.

    Raises:
        ValueError: a shape, dtype, row or length that does not fit; nothing was written.
    """
    function("features")(
        isa, q, parts, rows, seq_lens, anchor, anchor_q, mean_k, layer, first_head, sinks, window, scale, out
    )
