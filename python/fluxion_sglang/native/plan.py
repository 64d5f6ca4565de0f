"""A layer's plan as an object of the native library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fluxion_sglang.native.loading import function


class NativePlan:
    """A plan that any number of layers may use while its tensors are unchanged.

    Args:
        blk, budget, value: see `policy.base.LayerPlan`.
        owner: [B, H] int32, the only executor that may take each task (0 cpu: the workers, 1 torch, 2 gpu), 3 for any;
            None: any for all. An executor takes its own tasks before unowned ones, each in order of value.
        kinds: handles of task kinds that are not done by blocks (`policy.base.TaskKind.handle`).

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
        # Keep the tensors alive: the library holds their addresses.
        self._tensors = blk, budget, value, owner
        self.handle = function("plan_create")(*self._tensors, list(kinds) if kinds else None)
