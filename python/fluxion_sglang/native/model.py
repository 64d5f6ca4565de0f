"""Layers of the model for the few rows of a decode step. CPU tensors go in and out; nothing copies them."""

from __future__ import annotations

import torch

from fluxion_sglang.native.loading import function
from fluxion_sglang.native.pool import Workers


class NativeLayers:
    """What computes layers on the workers. One layer at a time.

    Args:
        isa: kernels to use, one of `topology()["isas"]`; None: the best, or FLUXION_ISA.

    Raises:
        ValueError: instructions that this CPU does not have.
    """

    def __init__(self, workers: Workers, isa: str | None = None) -> None:
        self.handle = function("layers_create")(workers.handle, isa or "")
        self._linear = function("layers_linear")

    def linear(
        self, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x weights^T + bias, in float32 rounded once; [rows, outputs]. An output depends on its row of x alone.

        Args:
            x: [rows, in], weights: [outputs, in], bias: [outputs], out: [rows, outputs] or None for a new one;
                bfloat16 or float32, the same for all. Rows may be apart by any stride, each is contiguous.

        Raises:
            ValueError: shapes, dtypes or strides that do not fit.
        """
        if out is None:
            out = x.new_empty(x.shape[0], weights.shape[0])
        self._linear(self.handle, x, weights, bias, out)
        return out
