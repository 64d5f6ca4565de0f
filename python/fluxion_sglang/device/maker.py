"""Makers of the devices: CUDA GPUs, and the simulated device of the tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.device import flashinfer
from fluxion_sglang.device.extend import stage_tokens
from fluxion_sglang.device.library import DeviceLibrary, load
from fluxion_sglang.device.near import metadata_bytes, request_bytes
from fluxion_sglang.device.pinned import Pinned
from fluxion_sglang.device.step import StreamDevice
from fluxion_sglang.executor.decode import DecodeEngine
from fluxion_sglang.executor.device import Device, DeviceMaker
from fluxion_sglang.executor.workers import Beside
from fluxion_sglang.kv.host_pool import GIB, HostPool, KVShape
from fluxion_sglang.kv.windows import Windows


class _StreamMaker(DeviceMaker):
    """Makes `StreamDevice`s of one device library."""

    def __init__(self, library: DeviceLibrary) -> None:
        self._library = library
        self._pinned: list[Pinned] = []

    def reserved_tokens(self, shape: KVShape, config: FluxionConfig, host_tokens: int) -> int:
        stages = -(-stage_tokens() // shape.layers)  # of one layer
        if config.hot_tiles_gb == 0:
            return stages
        kept = int(config.hot_tiles_gb * GIB) + metadata_bytes(shape, host_tokens)
        return stages + -(-kept // (shape.layers * shape.token_bytes))

    def request_tokens(self, shape: KVShape, config: FluxionConfig, group: int, max_tokens: int) -> int:
        if config.hot_tiles_gb == 0:
            return 0
        nbytes = request_bytes(shape, group, max_tokens, union=True)
        return -(-nbytes // (shape.layers * shape.token_bytes))

    def adopt(self, pool: HostPool) -> None:
        self._pinned.append(Pinned(self._library, pool.memory))

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
        if len(different := sorted(set(scales))) > 1:
            # The CPU's side takes one scale for all layers.
            raise ConfigError(
                "--enable-fluxion cannot serve this model on a GPU, because its attention layers scale scores "
                f"differently ({', '.join(f'{scale:g}' for scale in different)}); serve it with --device cpu or "
                "without --enable-fluxion."
            )
        return StreamDevice(
            self._library,
            pool,
            windows,
            engine,
            q_heads=q_heads,
            scale=different[0],
            max_requests=max_requests,
            graphs=config.cuda_graphs,
            max_tokens=max_tokens,
            copies_gb=config.hot_tiles_gb,
        )


class Cuda(_StreamMaker):
    """NVIDIA GPUs. Raises DeviceError if the library is missing or does not fit, or FlashInfer is missing."""

    def __init__(self) -> None:
        super().__init__(load("cuda"))
        flashinfer.check_installed()

    def beside(self) -> Beside:
        """The thread that launches kernels, and SGLang's other processes. Workers spin between the attention of two
        layers, because a GPU computes the rest of a layer in less than a millisecond."""
        return Beside(busy=2, spin_us=1000)

    def select(self) -> None:
        flashinfer.module()  # not in the launcher process: the import may initialize the GPU
        self._library.select(torch.cuda.current_device())


class Simulated(_StreamMaker):
    """Serves the CPU's tensors as a device's. Raises as `Cuda`."""

    def __init__(self) -> None:
        super().__init__(load("sim"))
