"""What describes a query head to the predictor: 41 numbers (Fluxion, appendix A), and their reference in torch.

q is this step's query, q' the anchor query: that of the last prefill token. Much depends on q' alone and is measured
once a request, the anchor part; per step the native kernel (`predictor.kernel`) adds what depends on q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from fluxion_sglang.kv.placement import BLOCKS, Placement

EMPTY_LSE = -30.0
"""The LSE of no tokens among the features, where -inf would reach the network."""

PARTS = ("lse_sink", "lse_local", "o_sink_norm", "o_local_norm", "o_resident_norm")
"""Numbers of `NativeEngine.layer_resident` for each head, in order; there an LSE of no tokens is -inf."""


@dataclass(frozen=True)
class Feature:
    """One number of a (request, layer, query head).

    Attributes:
        formula: sink, cpu and local are the request's sinks, middle and window (the query's own token included); k_i,
            v_i their keys and values, O the attention output over one of them, O~ that over sinks and window. mean,
            var, skew and kurt are those of a population; skew and kurt are 0 where var < 1e-12 mean^2, and kurt is
            m4 / m2^2. Of no tokens: 0, or `EMPTY_LSE`.
        part: "structure", known from the request's length; "anchor", measured once with q'; "decode", of every q.
    """

    name: str
    formula: str
    unit: str
    part: Literal["structure", "anchor", "decode"]


def _moments(name: str, of: str, unit: str) -> tuple[Feature, ...]:
    return (
        Feature(f"{name}_mean", f"mean of {of} over cpu", unit, "anchor"),
        Feature(f"{name}_var", f"var of {of} over cpu", f"{unit}^2", "anchor"),
        Feature(f"{name}_skew", f"skew of {of} over cpu", "1", "anchor"),
        Feature(f"{name}_kurt", f"kurt of {of} over cpu", "1", "anchor"),
    )


FEATURES: tuple[Feature, ...] = (
    Feature("layer", "index of the model's layer", "index", "structure"),
    Feature("head", "index of the model's query head", "index", "structure"),
    Feature("cpu_tokens", "ln(1 + tokens of the middle)", "ln tokens", "structure"),
    Feature("gpu_tokens", "ln(1 + resident tokens)", "ln tokens", "structure"),
    Feature("sink_k_norm", "mean of |k_i| over sink", "|k|", "anchor"),
    Feature("sink_v_norm", "mean of |v_i| over sink", "|v|", "anchor"),
    Feature("mean_k_norm", "|mean of k_i over cpu|", "|k|", "anchor"),
    Feature("mean_v_norm", "|mean of v_i over cpu|", "|v|", "anchor"),
    *_moments("k_norm", "|k_i|", "|k|"),
    *_moments("v_norm", "|v_i|", "|v|"),
    Feature("q_mean_k", "<q, mean of k_i over cpu> scale / |q|", "score / |q|", "decode"),
    *_moments("z", "z_i = <q', k_i> scale / |q'|", "score / |q|"),
    Feature("lse_sink", "LSE(q) over sink", "score", "decode"),
    Feature("lse_cpu", "ln L_cpu + |q| q_mean_k + |q|^2 z_var / 2", "score", "decode"),
    Feature("lse_local", "LSE(q) over local", "score", "decode"),
    Feature("anchor_lse_sink", "LSE(q') over sink", "score", "anchor"),
    Feature("anchor_lse_cpu", "LSE(q') over cpu", "score", "anchor"),
    Feature("anchor_lse_local", "LSE(q') over local", "score", "anchor"),
    Feature("o_sink_norm", "|O(q)| over sink", "|v|", "decode"),
    Feature("o_local_norm", "|O(q)| over local", "|v|", "decode"),
    Feature("anchor_o_sink_norm", "|O(q')| over sink", "|v|", "anchor"),
    Feature("anchor_o_cpu_norm", "|O(q')| over cpu", "|v|", "anchor"),
    Feature("anchor_o_local_norm", "|O(q')| over local", "|v|", "anchor"),
    Feature("q_norm", "|q|", "|q|", "decode"),
    Feature("anchor_q_norm", "|q'|", "|q|", "anchor"),
    Feature("q_cosine", "<q, q'> / (|q| |q'|), 0 where either is 0", "1", "decode"),
    *(
        Feature(f"anchor_budget_{blk}", f"least budget of blocks of {blk} within the error bound for q'", "1", "anchor")
        for blk in BLOCKS
    ),
    Feature("o_resident_max", "largest |O~(q)| of the process's query heads", "|v|", "decode"),
    Feature("anchor_o_resident_max", "largest |O~(q')| of the process's query heads", "|v|", "anchor"),
)  # fmt: skip

INDEX: dict[str, int] = {feature.name: i for i, feature in enumerate(FEATURES)}
"""Where the feature of a name stands."""

COUNT = len(FEATURES)
NAMES: tuple[str, ...] = tuple(INDEX)

BUDGETS = slice(INDEX[f"anchor_budget_{BLOCKS[0]}"], INDEX[f"anchor_budget_{BLOCKS[-1]}"] + 1)
"""Least budgets of the anchor query for every block size."""

ANCHOR: tuple[int, ...] = tuple(i for i, feature in enumerate(FEATURES) if feature.part == "anchor")
"""The features of the anchor query, in the order of the compact array `anchor`."""


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == -math.inf, EMPTY_LSE, lse)


def decode_features(
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
) -> None:
    """The features of every head of a step: the reference of `predictor.kernel.features`, computed in float64.

    Args:
        q: [B, Hq, D], KV dtype.
        parts: [B, Hq, 5] float32, of q (`PARTS`).
        rows: [B] int32, each request's row in the three anchor tensors.
        seq_lens: [B] int32, tokens with the query's own, at least 1.
        anchor: [R, Hq, 28] float32, the features `ANCHOR`.
        anchor_q: [R, Hq, D], KV dtype, q'.
        mean_k: [R, H, D] float32, mean key of the middle as it was for q'.
        layer, first_head: of the model; first_head is that of q's head 0, more than 0 under tensor parallelism.
        sinks, window: tokens (`Placement`). scale: multiplies q.k.
        out: [B, Hq, 41] float32, written whole.
    """
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
