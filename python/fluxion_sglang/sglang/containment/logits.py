"""Keeps logits finite, whatever factors or biases a request applies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LARGEST = 1e30
"""Still a float32 after division by the least temperature, 1e-6."""


def preprocess_logits(original: Callable[..., Any], sampler: Any, logits: Any, sampling_info: Any) -> Any:
    """AROUND Sampler._preprocess_logits: remove NaN and infinity from sampled rows.

    torch.multinomial raises for such a row, which fails the whole batch. Greedy requests accept any row.
    """
    logits = original(sampler, logits, sampling_info)
    if not sampling_info.is_all_greedy:
        logits.nan_to_num_(nan=-_LARGEST, posinf=_LARGEST, neginf=-_LARGEST).clamp_(-_LARGEST, _LARGEST)
    return logits
