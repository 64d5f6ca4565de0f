"""Who watches passes without a part in them: the interface of an observer.

The options `audit` and `record` each ask for one; it comes through an entry point (`plugins.OBSERVERS`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fluxion_sglang.policy.base import DecodeStep, Policy

if TYPE_CHECKING:
    from fluxion_sglang.config import FluxionConfig
    from fluxion_sglang.executor.decode import DecodeEngine, Layer
    from fluxion_sglang.executor.prefill import ExtendRequest
    from fluxion_sglang.predictor.artifact import Identity


class Observer:
    """Sees what an engine computes. Every method may be left out."""

    def began(self, step: DecodeStep, policies: Sequence[Policy]) -> None:
        """A decode step began; policies: one a request."""

    @property
    def watches(self) -> bool:
        """Whether it wants to see the layers of the step that began."""
        return True

    def decoded(self, layer: Layer) -> None:
        """A layer of the step is done. The native engine has its result and reads; no layer is open. Not of steps that
        no observer watches, nor of those whose tiles a device has chosen (option hot_tiles_gb)."""

    def prefilled(
        self, layer: int, request: ExtendRequest, wishes: Mapping[str, Any], queries: torch.Tensor, scale: float
    ) -> None:
        """A chunk of a request that wants something recorded is in the host pool (on servers with the option record).

        Args:
            wishes: what the request's custom_params want recorded of it.
            queries: [m, Hq, D] on the CPU, of all its tokens. scale: multiplies q.k.
        """

    def check(self, wishes: object, tokens: int) -> None:
        """Whether a request of so many prompt tokens may have this recorded (`wishes` of `prefilled`).

        Raises:
            ValueError: one sentence for the client.
        """

    def released(self, row: int) -> None:
        """The request in `row` has ended."""

    def count(self, stats: dict[str, int]) -> dict[str, int]:
        """The engine's counts without what the observer itself had it do."""
        return stats


MakeObserver = Callable[["DecodeEngine", "FluxionConfig", Callable[[], "Identity"]], Observer]
"""From the engine to watch, the server's options, and what a predictor of this server would be trained for."""
