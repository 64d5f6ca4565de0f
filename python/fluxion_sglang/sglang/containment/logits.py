"""Logits stay finite, whatever a request adds to them or multiplies them by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LARGEST = 1e30
"""Divided by the least temperature, 1e-6, it is still a float32."""


def preprocess_logits(original: Callable[..., Any], sampler: Any, logits: Any, sampling_info: Any) -> Any:
    """AROUND Sampler._preprocess_logits: rows that are sampled have no NaN and no infinity.

    torch.multinomial raises for such a row, and the whole batch would fail with it. Greedy requests take any row.
    """
    logits = original(sampler, logits, sampling_info)
    if not sampling_info.is_all_greedy:
        logits.nan_to_num_(nan=-_LARGEST, posinf=_LARGEST, neginf=-_LARGEST).clamp_(-_LARGEST, _LARGEST)
    return logits
