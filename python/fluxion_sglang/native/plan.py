"""A layer's plan in the native library's hands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fluxion_sglang.native.loading import function


class NativePlan:
    """One object that any number of layers take, for as long as its tensors stay as they are.

    Args:
        blk, budget, value: as of `policy.base.LayerPlan`, which says what they mean.
        owner: [B, H] int32, the executor that alone may take each task (0 cpu: the workers, 1 torch, 2 gpu), 3 for any;
            None: any takes all. An executor takes its own before those for any, each by value.
        kinds: handles of what is not done by blocks (`policy.base.TaskKind.handle`).

    Raises:
        ValueError: a shape or dtype that does not fit the others.
    """

    __slots__ = ("_tensors", "handle")

    def __init__(
        self,
        blk: torch.Tensor,
        budget: torch.Tensor,
        value: torch.Tensor,
        owner: torch.Tensor | None = None,
        kinds: Sequence[Any] = (),
    ) -> None:
        # The library has their addresses.
        self._tensors = blk, budget, value, owner
        self.handle = function("plan_create")(*self._tensors, list(kinds) if kinds else None)
