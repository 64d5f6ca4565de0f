"""streaming: sinks and window only, no head reads anything of the middle (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from fluxion_sglang.policy.fixed import FixedPolicy


class StreamingPolicy(FixedPolicy):
    """A budget of 0 for every head. It makes no task: decode is attention to what is resident."""

    def __init__(self) -> None:
        super().__init__(0, 0.0)
