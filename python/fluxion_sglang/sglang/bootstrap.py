"""Activates the plug-in during `import sglang`, in every process of an environment that has this package.

It must be cheap, and must not break SGLang without the flag. It adds the two options, the names of the attention
backend and of a quantization, and four steps of option resolution that do nothing without the flag.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from fluxion_sglang.sglang import compat

logger = logging.getLogger(__name__)

_CPU_PLATFORM = "fluxion_sglang.sglang.start.cpu_platform.PortableCpuPlatform"


def activate() -> str | None:
    """Entry point of the group `sglang.srt.platforms`.

    Returns:
        The class of the CPU platform on a machine without an accelerator; else None, for SGLang's own platform.
    """
    try:
        _install()
    except Exception as error:
        compat.activation_problem = (
            f"--enable-fluxion is not available, because the plug-in does not fit this SGLang ({error}); "
            f"install SGLang {compat.SUPPORTED} or leave the option out."
        )
        logger.warning("Fluxion is inactive: %s", error)
        # The option may not even exist, and "unrecognized arguments" would not give the reason.
        if any(word == "--enable-fluxion" for word in sys.argv[1:]):
            raise SystemExit(compat.activation_problem) from None
    return None if _has_own_platform() else _CPU_PLATFORM


def _install() -> None:
    from fluxion_sglang.sglang.start import server_fields

    server_fields.install()
    # The options exist from here on. If the rest fails, publication refuses the flag (plugin.install_if_enabled).
    from sglang.srt.arg_groups import choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    if compat.BACKEND not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([compat.BACKEND])
    if compat.INT8_WEIGHTS not in choices.QUANTIZATION_CHOICES:
        choices.add_quantization_method_choices([compat.INT8_WEIGHTS])
    for step in STEPS:
        register_resolution_hook(step)(_lazy_step(step))


# Fluxion's steps of SGLang's option resolution; `resolution` has their bodies by the same names.
STEPS = (
    "handle_missing_default_values",
    "handle_cuda_graph_config",
    "handle_model_specific_adjustments",
    "validate_deepep_v2_dispatch_token_budget",
)


def _lazy_step(step: str) -> Any:
    def run(server_args: Any, previous: Any) -> None:
        ours = server_args.fluxion_config is not None or server_args.quantization == compat.INT8_WEIGHTS
        if not server_args.enable_fluxion and not ours:
            previous(server_args)
            return
        from fluxion_sglang.sglang.start import resolution

        resolution.run(step, server_args, previous)

    run.__qualname__ = f"fluxion.{step}"
    return run


def _has_own_platform() -> bool:
    """Whether SGLang's own platforms support this machine."""
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return True
    accelerator = getattr(torch, "accelerator", None)
    return bool(torch.cuda.is_available() or (accelerator is not None and accelerator.is_available()))
