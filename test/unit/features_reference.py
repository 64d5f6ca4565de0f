"""The features of the predictor, in torch."""

from __future__ import annotations

import math

import torch

from fluxion_sglang.kv.placement import Placement
from fluxion_sglang.predictor.features import ANCHOR, EMPTY_LSE, INDEX, PARTS


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == -math.inf, EMPTY_LSE, lse)


def decode_features(
    q: torch.Tensor, parts: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, anchor: torch.Tensor,
    anchor_q: torch.Tensor, mean_k: torch.Tensor, layer: int, first_head: int, sinks: int, window: int, scale: float,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Features of every head of a step, in float64; for arguments see `predictor.kernel.features`."""
    B, Hq, _ = q.shape
    at = rows.long()
    placement = Placement(sinks, window)
    cpu = torch.tensor([placement.middle(n) for n in seq_lens.tolist()], dtype=torch.float64).view(B, 1).expand(B, Hq)
    middle = cpu > 0
    queries, anchors = q.double(), anchor_q[at].double()
    means = mean_k[at].double().repeat_interleave(Hq // mean_k.shape[1], 1)
    norm, anchor_norm = queries.norm(dim=-1), anchors.norm(dim=-1)
    score = torch.where(middle, (queries * means).sum(-1) * scale, 0.0)
    z_var = anchor[at][..., ANCHOR.index(INDEX["z_var"])].double()
    cosine = (queries * anchors).sum(-1) / (norm * anchor_norm)
    lse_cpu = torch.where(middle, cpu.log() + score + norm**2 * z_var / 2, EMPTY_LSE)
    numbers = {
        "layer": torch.full((B, Hq), float(layer)),
        "head": (first_head + torch.arange(float(Hq))).expand(B, Hq),
        "cpu_tokens": cpu.log1p(),
        "gpu_tokens": (seq_lens.double().view(B, 1) - cpu).log1p(),
        "q_mean_k": torch.where(norm > 0, score / norm, 0.0),
        "lse_sink": _finite(parts[..., PARTS.index("lse_sink")]),
        "lse_cpu": lse_cpu,
        "lse_local": _finite(parts[..., PARTS.index("lse_local")]),
        "o_sink_norm": parts[..., PARTS.index("o_sink_norm")],
        "o_local_norm": parts[..., PARTS.index("o_local_norm")],
        "q_norm": norm,
        "q_cosine": torch.where((norm > 0) & (anchor_norm > 0), cosine, 0.0),
        "o_resident_max": parts[..., PARTS.index("o_resident_norm")].amax(1, keepdim=True).expand(B, Hq),
    }
    out[..., list(ANCHOR)] = anchor[at]
    for name, number in numbers.items():
        out[..., INDEX[name]] = number.float()
