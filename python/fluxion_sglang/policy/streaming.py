"""streaming: attends to sinks and window only (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from typing import ClassVar

from fluxion_sglang.policy import arguments
from fluxion_sglang.policy.base import Context, Policy
from fluxion_sglang.policy.fixed import FixedPolicy


class StreamingPolicy(FixedPolicy):
    """A budget of 0 for every head. It makes no task: decode attends to the residents only."""

    forms: ClassVar[tuple[str, ...]] = ("streaming",)

    def __init__(self) -> None:
        super().__init__(0, 0.0)

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        arguments.at_most(words, 0)
        return cls()
