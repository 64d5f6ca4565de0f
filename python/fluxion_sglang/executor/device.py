"""The interface of a device, which holds the windows and runs the attention of forward passes.

One pass runs at a time: `begin_decode` or `begin_extend`, then its layers in order, then `finish`. `host.py` implements
it for the CPU. Devices with memory of their own come through entry points (`plugins.DEVICES`).
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
    """Called when the host pool has a chunk. `queries` [m, Hq, D], on the CPU: the last m = `request.queries`."""

    def __call__(self, layer: int, index: int, queries: torch.Tensor, scale: float) -> None: ...


class Device(ABC):
    """Runs passes over the host pool and the windows. Errors are RuntimeError with one sentence.

    Attributes:
        description: the device's name in the log.
        mixes: whether `begin_mixed` is supported.
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
        """Begin a decode step; arguments as for `DecodeEngine.begin_step`, all on the CPU."""

    @abstractmethod
    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, variant: Variant = PLAIN
    ) -> torch.Tensor:
        """Attention of one layer of the step, on the model's device.

        Args:
            q: [B, Hq, D]. k, v: [B, H, D], this step's token of each request. scale: multiplies q.k.

        Returns:
            [B, Hq, D] in q's dtype.
        """

    @abstractmethod
    def begin_extend(self, requests: Sequence[ExtendRequest], appended: Appended | None) -> None:
        """Begin an extend pass.

        Args:
            appended: called once for every layer without a window and every request with new tokens, by any thread,
                before `finish` returns. None: the new tokens are drafts, so the windows do not change.
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
        """Begin an extend pass that includes a decode step. Its tokens, one a request, follow those of `requests`.
        Arguments as for `begin_extend` and `begin_decode`."""
        raise NotImplementedError

    @abstractmethod
    def extend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, variant: Variant = PLAIN
    ) -> torch.Tensor:
        """Attention of one layer of the extend pass.

        Args:
            q: [T, Hq, D]. k, v: [T, H, D]. `ExtendRequest.tokens` is the slice of each request.

        Returns:
            [T, Hq, D] in q's dtype.
        """

    def begin_dummy(self) -> None:
        """Decode layers until the next pass serve no request: a warm-up, or the recording of a graph."""
        raise RuntimeError(
            "SGLang asked for a decode step without requests, which the CPU does not run; leave cuda_graphs out."
        )

    def finish(self) -> None:  # noqa: B027
        """Wait until the host has received everything from the pass, and raise its first failure."""

    def stats(self) -> dict[str, int]:
        """Cumulative counts of decode steps on the device (`device/timeline.py`)."""
        return {}

    def abort(self) -> None:  # noqa: B027
        """Drop a pass that failed at its launch; the next one starts clean."""

    def close(self) -> None:  # noqa: B027
        """Unregister host memory from the device's driver."""


class DeviceMaker(ABC):
    """Sets up a device before the model is loaded: its library, and its access to the pools."""

    def select(self) -> None:  # noqa: B027
        """Use the device that SGLang has chosen for this process."""

    def beside(self) -> Beside:
        """What shares the machine with the CPU's workers."""
        return ALONE

    @abstractmethod
    def reserved_tokens(self, shape: KVShape, config: FluxionConfig, host_tokens: int) -> int:
        """The device memory of passes, copies of tiles and metadata of `host_tokens`, in tokens of KV of all layers."""

    def request_tokens(self, shape: KVShape, config: FluxionConfig, group: int, max_tokens: int) -> int:
        """The same for each request of up to `max_tokens`, beside its window. group: query heads per KV head."""
        return 0

    @abstractmethod
    def adopt(self, pool: HostPool) -> None:
        """Make the pool's memory readable by the device until the process ends.

        Raises:
            DeviceError: the memory cannot be registered.
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
        """Make the device of a model.

        Args:
            scales: multiplies q.k, by layer. max_requests: largest batch. max_tokens: longest request.
            config: the device uses cuda_graphs and hot_tiles_gb.

        Raises:
            ConfigError: the device cannot serve the model.
        """


def maker_of(device: str) -> DeviceMaker | None:
    """The maker for tensors on `device` ("cuda", "cuda:1", "cpu"); None: the CPU is the device.

    For tests, FLUXION_DEVICE=sim serves the CPU's tensors by a simulated device.

    Raises:
        DeviceError: the library is missing or has another version.
    """
    name = "sim" if os.environ.get("FLUXION_DEVICE") == "sim" else device.partition(":")[0]
    if name == "cpu":
        return None
    maker: DeviceMaker = plugins.load(plugins.DEVICES, name)()
    return maker
