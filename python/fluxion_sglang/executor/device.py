"""Where the windows live and forward passes run: what the attention backend asks of a device.

One pass at a time: `begin_decode` or `begin_extend`, then its layers in order, then `finish`. `host.py` computes where
it is called. Devices with memory of their own come through entry points (`plugins.DEVICES`).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from fluxion_sglang import plugins
from fluxion_sglang.config import FluxionConfig
from fluxion_sglang.executor.prefill import ExtendRequest
from fluxion_sglang.executor.variant import PLAIN, Variant
from fluxion_sglang.executor.workers import ALONE, Beside
from fluxion_sglang.policy.base import Policy

if TYPE_CHECKING:
    from fluxion_sglang.executor.decode import DecodeEngine
    from fluxion_sglang.kv.host_pool import HostPool, KVShape
    from fluxion_sglang.kv.windows import Windows


class Appended(Protocol):
    """Told when the host pool has a chunk: `queries` [m, Hq, D] on the CPU are the m = `request.queries` last ones."""

    def __call__(self, layer: int, index: int, queries: torch.Tensor, scale: float) -> None: ...


class Device(ABC):
    """Runs passes over the host pool and the windows. Errors are RuntimeError, a sentence each.

    Attributes:
        description: what this is, for the log.
        mixes: `begin_mixed` works.
    """

    description: str = "the CPU"
    mixes: bool = False

    @abstractmethod
    def heal(self, row: int, n: int, pages: torch.Tensor) -> None:
        """Refill a row's windows from the host: the residents of a request of n tokens with page list `pages`."""

    @abstractmethod
    def begin_decode(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        pages: torch.Tensor,
        policies: Sequence[Policy] | None,
    ) -> None:
        """A decode step; arguments as of `DecodeEngine.begin_step`, all on the CPU."""

    @abstractmethod
    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, variant: Variant = PLAIN
    ) -> torch.Tensor:
        """Attention of one layer of the step, where the model runs.

        Args:
            q: [B, Hq, D]. k, v: [B, H, D], this step's token of each request. scale: multiplies q.k.

        Returns:
            [B, Hq, D] in q's dtype.
        """

    @abstractmethod
    def begin_extend(self, requests: Sequence[ExtendRequest], appended: Appended | None) -> None:
        """An extend pass.

        Args:
            appended: called once for every layer without a window and request with new tokens, by whatever thread,
                before `finish` returns. None: what is appended are drafts, not all of which will be there to stay:
                windows keep what they have.
        """

    def begin_mixed(
        self,
        requests: Sequence[ExtendRequest],
        appended: Appended,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        pages: torch.Tensor,
        policies: Sequence[Policy] | None,
    ) -> None:
        """An extend pass in which a decode step rides along: its tokens, one a request, come after those of
        `requests`. Arguments as of `begin_extend` and `begin_decode`."""
        raise NotImplementedError

    @abstractmethod
    def extend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, variant: Variant = PLAIN
    ) -> torch.Tensor:
        """Attention of one layer of the extend pass.

        Args:
            q: [T, Hq, D]. k, v: [T, H, D]; tokens of all requests, each at its `tokens`.

        Returns:
            [T, Hq, D] in q's dtype.
        """

    def begin_dummy(self) -> None:
        """Decode layers until the next pass are nobody's: a warm-up, or the recording of a graph."""
        raise RuntimeError("The CPU runs no decode steps that are nobody's; leave cuda_graphs out.")

    def finish(self) -> None:  # noqa: B027
        """Wait until the host has all that the pass had for it, and raise the first failure of it."""

    def stats(self) -> dict[str, int]:
        """Cumulative counts of what decode steps were on the device (`device/timeline.py`)."""
        return {}

    def abort(self) -> None:  # noqa: B027
        """Drop a pass that failed where it was launched; the next one starts clean."""

    def close(self) -> None:  # noqa: B027
        """Give back what the device's driver knows of host memory."""


class DeviceMaker(ABC):
    """What there is of a device before the model is: its library, and what it has to do with the pools."""

    def select(self) -> None:  # noqa: B027
        """Use the device that SGLang has chosen for this process."""

    def beside(self) -> Beside:
        """What the CPU's workers are beside."""
        return ALONE

    @abstractmethod
    def reserved_tokens(self, shape: KVShape, config: FluxionConfig, host_tokens: int) -> int:
        """Tokens of KV, all layers, for which there is no room on the device because passes, copies of tiles, and
        metadata of a host pool of so many tokens need it."""

    def request_tokens(self, shape: KVShape, config: FluxionConfig, group: int, max_tokens: int) -> int:
        """The same for each request of at most so many tokens, beside its window. group: query heads of a KV head."""
        return 0

    @abstractmethod
    def adopt(self, pool: HostPool) -> None:
        """Make the pool's memory readable by the device, for as long as the process lives.

        Raises:
            DeviceError: it cannot be.
        """

    @abstractmethod
    def make(
        self,
        pool: HostPool,
        windows: Windows,
        engine: DecodeEngine,
        *,
        q_heads: int,
        scales: Sequence[float],
        max_requests: int,
        max_tokens: int,
        config: FluxionConfig,
    ) -> Device:
        """The device of a model.

        Args:
            scales: of q.k, of every layer. max_requests: of a batch. max_tokens: of a request.
            config: cuda_graphs and hot_tiles_gb count.

        Raises:
            ConfigError: a model that it cannot serve.
        """


def maker_of(device: str) -> DeviceMaker | None:
    """What serves tensors on `device` ("cuda", "cuda:1", "cpu"); None: the CPU is the device.

    FLUXION_DEVICE=sim, for tests, has the CPU's tensors served as a device's by the simulated one.

    Raises:
        DeviceError: the library is missing or does not fit.
    """
    name = "sim" if os.environ.get("FLUXION_DEVICE") == "sim" else device.partition(":")[0]
    if name == "cpu":
        return None
    maker: DeviceMaker = plugins.load(plugins.DEVICES, name)()
    return maker
