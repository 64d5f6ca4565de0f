"""Where plain SGLang, with the KV cache on the device, would be faster: said at start, once."""

from __future__ import annotations

from dataclasses import dataclass

from fluxion_sglang.device.rates import Rates
from fluxion_sglang.kv.host_pool import KVShape
from fluxion_sglang.kv.placement import PAGE, Placement

READ_SHARE = 0.1
"""Of a middle that heads read, where a policy does not say beforehand."""


@dataclass(frozen=True)
class Crossover:
    """Attention of a decode step by both, for requests of one length.

    Attributes:
        context: tokens of a request. requests: those whose KV fits on the device, 0 if not one does; both sides below
            are of them, and of one where none fits.
        plain_s: the device reads all of it in its own memory; infinite where not one fits.
        fluxion_s: the device reads sinks and windows, CPU and device what the policy takes of the middle.
        read_share: of the middle, that the policy takes.
    """

    context: int
    read_share: float
    requests: int
    plain_s: float
    fluxion_s: float

    @property
    def plain_is_faster(self) -> bool:
        return self.plain_s < self.fluxion_s

    def sentence(self) -> str:
        """One line for the log."""
        if self.requests == 0:
            return f"no request of {self.context} tokens fits on the device: plain SGLang cannot serve them"
        fit = f"as many as {self.requests} requests of {self.context} tokens fit on the device"
        times = (
            f"{self.plain_s * 1e3:.2f} ms a step against {self.fluxion_s * 1e3:.2f} ms if heads read "
            f"{self.read_share:.0%} of the middle"
        )
        if self.plain_is_faster:
            return (
                f"{fit}: where no more run, plain SGLang is faster (attention {times}); Fluxion pays where more or "
                "longer ones do"
            )
        return f"{fit}: even there Fluxion's attention is faster than plain SGLang's ({times} with Fluxion)"


def crossover(
    shape: KVShape,
    placement: Placement,
    rates: Rates,
    *,
    context: int,
    device_bytes: int,
    read_share: float = READ_SHARE,
    blk: int = 16,
) -> Crossover:
    """Compare the two at the most requests of `context` tokens that the device could hold.

    Args:
        device_bytes: memory that plain SGLang would have for its KV cache.
        read_share: of the middle, that heads read. blk: block size whose metadata is ranked for it.
    """
    each = shape.layers * shape.token_bytes * context
    requests = device_bytes // each if each else 0
    batch = max(requests, 1)
    middle = max(0, (context - placement.sinks - placement.window) // PAGE * PAGE)
    per_layer = shape.token_bytes * batch
    tiles = int(per_layer * middle * read_share)
    metadata = per_layer * middle // blk if 0 < read_share < 1 else 0
    share = rates.share(tiles, metadata)
    busy = ((1 - share) * tiles + metadata) / rates.cpu if rates.cpu else float("inf")
    resident = per_layer * (context - middle) / rates.hot if rates.hot else float("inf")
    plain = each * batch / rates.hot if requests and rates.hot else float("inf")
    return Crossover(context, read_share, requests, plain, shape.layers * max(busy, resident))
