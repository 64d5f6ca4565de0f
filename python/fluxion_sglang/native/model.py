"""Layers of the model. CPU tensors go in and out; nothing copies them."""

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
        self._norm = function("layers_norm")
        self._silu_mul = function("layers_silu_mul")
        self._rope = function("layers_rope")

    @staticmethod
    def into_huge_pages(weights: torch.Tensor) -> None:
        """Have the kernel move weights into huge pages, where they are: reading them takes fewer address translations.

        What Linux before 6.1 or a machine without free huge pages cannot move stays as it is.

        Args:
            weights: [outputs, in], bfloat16 or float32; each row is contiguous.

        Raises:
            ValueError: shapes, dtypes or strides that do not fit.
        """
        function("layers_into_huge_pages")(weights)

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

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """RMSNorm of every row; [rows, size].

        Args:
            x: [rows, size], weight: [size]; bfloat16 or float32, both the same.

        Raises:
            ValueError: shapes, dtypes or strides that do not fit; so for the other layers.
        """
        out = torch.empty_like(x)
        self._norm(self.handle, x, None, weight, epsilon, out, None)
        return out

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RMSNorm of x + residual, from the sum before it is rounded; and the sum. Both [rows, size], as x is."""
        out, total = torch.empty_like(x), torch.empty_like(x)
        self._norm(self.handle, x, residual, weight, epsilon, out, total)
        return out, total

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """silu(left half), rounded, times right half, of x [rows, 2 n]; [rows, n]."""
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        self._silu_mul(self.handle, x, out)
        return out

    def rope(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        head_dim: int,
        halves: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary embedding of queries and keys.

        Args:
            positions: [rows] int64. q: [rows, query heads * head_dim], k: [rows, KV heads * head_dim], rows apart by
                any stride. cos_sin: [positions, rotary], the dtype of q and k: cosines, then sines, of the angles of
                a position; rotary is even and at most head_dim.
            halves: elements i and i + rotary / 2 of a head turn together (NeoX), or else 2 i and 2 i + 1 (GPT-J).

        Returns:
            q and k turned, as new contiguous tensors.

        Raises:
            IndexError: a position that cos_sin does not have.
        """
        q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
        self._rope(self.handle, positions, q, k, cos_sin, head_dim, halves, q_out, k_out)
        return q_out, k_out
