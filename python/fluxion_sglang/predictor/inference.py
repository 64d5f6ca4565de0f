"""Serves the predictor: native inference and the choice of block sizes and budgets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fluxion_sglang.kv.placement import BLOCKS
from fluxion_sglang.native import Workers, function
from fluxion_sglang.predictor.network import WIDTHS, HeadPredictor


class NativePredictor:
    """A HeadPredictor's weights, copied, rounded to bfloat16 and packed for one instruction set.

    One thread at a time may use an object.

    Args:
        network: its parameters and standardisation are copied; later changes have no effect.
        isa: kernels to use, one of `topology()["isas"]`; None: the best, or FLUXION_ISA.

    Raises:
        ValueError: weights that are not finite or too large for bfloat16, a std that is not positive, or an isa that
            this CPU cannot run.
    """

    def __init__(self, network: HeadPredictor, isa: str | None = None) -> None:
        def plain(values: torch.Tensor) -> torch.Tensor:
            return values.detach().to("cpu", torch.float32).contiguous()

        # Weight [out, in], then bias [out], of each layer in turn.
        parameters = torch.cat([plain(p).flatten() for layer in network.layers for p in layer.parameters()])
        self.handle = function("predictor_create")(
            isa or "", torch.tensor(WIDTHS, dtype=torch.int32), plain(network.mean), plain(network.std), parameters
        )
        self._forward = function("predictor_forward")

    @property
    def isa(self) -> str:
        """The kernels in use."""
        return str(function("predictor_isa")(self.handle))

    def forward(self, x: torch.Tensor, out: torch.Tensor, workers: Workers | None = None) -> None:
        """Predict any number of rows, one per head.

        A row's predictions do not depend on the other rows; a NaN among its features makes them NaN.

        Args:
            x: [N, 41] float32, contiguous. out: [N, 3] float32, written: bgt0, k, streaming logit.
            workers: threads that share the rows. None, or busy workers: the caller alone, with bit-identical results.

        Raises:
            ValueError: a shape or dtype that does not fit; nothing was written.
        """
        self._forward(self.handle, x, out, None if workers is None else workers.handle)


def plan_groups(
    pred: torch.Tensor,
    middle: torch.Tensor,
    kv_heads: int,
    threshold: float,
    margins: torch.Tensor,
    blk: torch.Tensor,
    budget: torch.Tensor,
    value: torch.Tensor,
    blocks: Sequence[int] = BLOCKS,
) -> None:
    """Choose block size, budgets and priority of every group: one block size a group, one budget a head.

    For a group of G heads over a middle of L tokens the data volume (metadata and KV) in blocks of blk tokens is

        V(blk) = 2 L / blk + 2 L * sum_h bgt_h(blk)                    (Fluxion, section 5.3, Eq. 3)

    The block size with the least V wins; of equal ones the larger, because its tiles form longer runs. A streaming head
    reads nothing and is not counted. Every other head has the budget on its line bgt0 + k log2(blk) (Eq. 1), at least
    one block, times the margin of the head and the block size.

    Budgets are rounded to float32 first, the engine's type, and summed in float64. These sums are exact, so ties are
    the same on every machine.

    Args:
        pred: [B * Hq, 3] float32, from `NativePredictor.forward`. middle: [B] int32, tokens of each middle.
        threshold: logits above it are streaming heads.
        margins: [Hq, 4] float32, contiguous, above 0: factors of each head's budgets (`margins.py`).
        blocks: distinct sizes to choose from.
        blk [B, H] int32, budget [B, Hq] float32, value [B, H] float32: written, as in `LayerPlan`.

    Raises:
        ValueError: a shape or dtype that does not fit; nothing was written.
    """
    function("predictor_plan")(pred, middle, kv_heads, threshold, margins, sum(blocks), blk, budget, value)
