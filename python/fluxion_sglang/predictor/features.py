"""The 41 features of a query head, the predictor's input (Fluxion, appendix A).

q is this step's query, q' the anchor query, that of the last prefill token. Most features depend only on q' and are
measured once a request (the anchor part). The native kernel (`predictor.kernel`) adds those of q in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fluxion_sglang.kv.placement import BLOCKS

EMPTY_LSE = -30.0
"""The feature value for the LSE of no tokens; -inf must not reach the network."""

PARTS = ("lse_sink", "lse_local", "o_sink_norm", "o_local_norm", "o_resident_norm")
"""Outputs of `NativeEngine.layer_resident` for each head, in order; there an LSE of no tokens is -inf."""


@dataclass(frozen=True)
class Feature:
    """One feature of a (request, layer, query head).

    Attributes:
        formula: sink, cpu and local are the request's sinks, middle and window (the query's own token included); k_i,
            v_i their keys and values, O the attention output over one of them, O~ that over sinks and window. mean,
            var, skew and kurt are those of a population; skew and kurt are 0 where var < 1e-12 mean^2, and kurt is m4 /
            m2^2. For no tokens: 0, or `EMPTY_LSE`.
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
"""Index of each feature by name."""

COUNT = len(FEATURES)
NAMES: tuple[str, ...] = tuple(INDEX)

BUDGETS = slice(INDEX[f"anchor_budget_{BLOCKS[0]}"], INDEX[f"anchor_budget_{BLOCKS[-1]}"] + 1)
"""Least budgets of the anchor query for every block size."""

ANCHOR: tuple[int, ...] = tuple(i for i, feature in enumerate(FEATURES) if feature.part == "anchor")
"""Indices of the features of the anchor query, in the order of the compact array `anchor`."""
