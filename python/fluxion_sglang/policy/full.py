"""full: every head reads the whole middle; exact."""

from __future__ import annotations

from typing import ClassVar

from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.policy import arguments
from fluxion_sglang.policy.base import Context, Policy
from fluxion_sglang.policy.fixed import FixedPolicy


class FullPolicy(FixedPolicy):
    """A budget of 1 for every head, which is the whole middle at any block size. Executors skip the block scores."""

    forms: ClassVar[tuple[str, ...]] = ("full",)
    exact = True

    def __init__(self) -> None:
        super().__init__(BLOCKS[0], 1.0)

    @classmethod
    def from_spec(cls, context: Context, *words: str) -> Policy:
        arguments.at_most(words, 0)
        return cls()
