"""The interface of an observer, which watches passes without changing them.

The options `audit` and `record` each enable one; it comes through an entry point (`plugins.OBSERVERS`).
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
    """Receives what an engine computes. Every method is optional."""

    def began(self, step: DecodeStep, policies: Sequence[Policy]) -> None:
        """A decode step began; policies: one a request."""

    @property
    def watches(self) -> bool:
        """Whether the observer needs the layers of the current step."""
        return True

    def decoded(self, layer: Layer) -> None:
        """A layer of the step is done. The native engine has its result and reads; no layer is open. Not called for
        steps that no observer watches, nor for steps whose tiles a device selected (option hot_tiles_gb)."""

    def prefilled(
        self, layer: int, request: ExtendRequest, wishes: Mapping[str, Any], queries: torch.Tensor, scale: float
    ) -> None:
        """A chunk of a request with `wishes` is in the host pool (on servers with the option record).

        Args:
            wishes: what to record, from the request's custom_params.
            queries: [m, Hq, D] on the CPU, of all tokens of the chunk. scale: multiplies q.k.
        """

    def check(self, wishes: object, tokens: int) -> None:
        """Check the `wishes` (as for `prefilled`) of a request of `tokens` prompt tokens.

        Raises:
            ValueError: they are illegal; one sentence for the client.
        """

    def released(self, row: int) -> None:
        """The request in `row` has ended."""

    def count(self, stats: dict[str, int]) -> dict[str, int]:
        """Correct the engine's counts: subtract the work that the observer itself caused."""
        return stats


MakeObserver = Callable[["DecodeEngine", "FluxionConfig", Callable[[], "Identity"]], Observer]
"""Makes an observer from the engine, the server's options, and the identity of a predictor for this server."""
