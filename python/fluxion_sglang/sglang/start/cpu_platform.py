"""SGLang's device on a machine without an accelerator.

SGLang's own CPU engine needs kernels that PyPI does not have. An out-of-tree platform selects the portable code paths:
`forward_native` for every layer, the torch allocators, gloo between ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


# The mixin comes first, because it implements abstract methods of SRTPlatform.
class PortableCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """The CPU with PyTorch alone. Serves any model, with or without Fluxion."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    capabilities = PlatformCapabilities()
    keeps_states = False
    """Whether SGLang may keep states of prefixes; set with the flag (`steps/states.py`)."""

    def get_device(self, device_id: int | None = 0) -> str:
        # The mixin returns a torch.device, but SGLang needs a string as the default of --device.
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_quantization_config(self, quantization: str) -> type | None:
        """Only with the flag: SGLang has kernels for GGUF files only on GPUs."""
        from fluxion_sglang.sglang import hooking

        if quantization != "gguf" or not hooking.enabled_here():
            return None
        from fluxion_sglang.sglang.weights.gguf import GgufConfig

        return GgufConfig

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        """Only with the flag: SGLang's own attention backends cannot verify trees of tokens on a CPU."""
        from fluxion_sglang.sglang import hooking

        if not hooking.enabled_here():
            return None
        from fluxion_sglang.sglang.steps import speculation

        return speculation.worker_class(algorithm)

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor] | None:
        from fluxion_sglang.sglang.steps import speculation

        return speculation.cache_locs

    def support_mamba_cache_extra_buffer(self) -> bool:
        return self.keeps_states

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False
