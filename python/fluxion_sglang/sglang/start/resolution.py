"""Fluxion's part in SGLang's resolution of options: refuses illegal combinations and sets dependent options."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fluxion_sglang import environment
from fluxion_sglang.config import ConfigError
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.sglang import compat
from fluxion_sglang.sglang.memory import capacity
from fluxion_sglang.sglang.start import gguf_model, language_model, refusals, served_models, validation
from fluxion_sglang.sglang.start.offline import CHUNK
from fluxion_sglang.sglang.start.options import options_of, rank_options

logger = logging.getLogger(__name__)

_Step = Callable[[Any], None]

_LORA = "torch_native"
"""SGLang's LoRA backend in pure PyTorch."""

WATCHDOG_S = 3600.0
"""Default timeout of SGLang's watchdog on a CPU, in seconds. A late pass of 131,072 tokens of an 8B takes 8 minutes on
2 AVX-512-BF16 cores."""


def run(step: str, server_args: Any, previous: _Step) -> None:
    """Run one step. A refusal is one sentence in a terminal, and an exception for a caller."""
    try:
        _STEPS[step](server_args, previous)
    except Exception as error:
        if refusals.is_ours(error):
            refusals.print_as_sentence(type(error))
        raise


def _handle_missing_default_values(server_args: Any, previous: _Step) -> None:
    """Our first step, before other options are derived."""
    if not server_args.enable_fluxion:
        given = (
            "--fluxion-config" if server_args.fluxion_config is not None else f"--quantization {compat.INT8_WEIGHTS}"
        )
        raise ConfigError(f"{given} has no effect without --enable-fluxion; add that option or leave this one out.")
    compat.check(())  # only the version: checking all names imports most of SGLang, which takes seconds
    config = options_of(server_args, again=True)
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    validation.check_options(view)
    from fluxion_sglang import native, openmp

    native.library()  # raises NativeLibraryError
    if slow := native.without_best_isa(native.topology()):
        logger.warning("Fluxion: %s.", slow)
    validation.check_config(config, view)
    compat.check()
    # Child processes inherit these settings.
    openmp.wait_passively()
    refusals.listen()
    if around := environment.bypass_proxies(*filter(None, [view.host])):
        logger.warning(
            "Fluxion: %s is set, and the server asks itself without a proxy: no_proxy has %s now",
            " and ".join(environment.proxies()),
            ", ".join(around),
        )
    previous(server_args)
    validation.check_device(view.device, config)
    from_gguf = _prepare_gguf(server_args, view)
    if not from_gguf:
        _serve_language_model(server_args, view)
    quantised = not from_gguf and served_models.check_quantised(view)
    if quantised and view.dtype == "auto":
        # The checkpoint's configuration gives the dtype of its scales, usually float16.
        declare_resolution(server_args, "fluxion", dtype="bfloat16")
    if view.device == "cpu" and (view.enable_lora or view.lora_paths):
        _compute_adapters(server_args, view)
    validation.check_speculation(view, config)
    validation.check_transfer(view, config)
    if config.disk is not None:
        compat.check(compat.DISK_NEEDS)
        # SGLang loads the plug-in for KV of prompts that these options of its own name (`disk.py`).
        linker = {"linker": "DiskLinker", "linker_module_path": "fluxion_sglang.sglang.memory.disk"}
        declare_resolution(
            server_args,
            "fluxion",
            enable_unified_cache_external_linker=True,
            unified_cache_external_linker_backend="dynamic",
            unified_cache_external_linker_config=linker,
        )
    if view.disaggregation_mode == "decode" and view.disaggregation_decode_retraction_backup is None:
        # SGLang's default needs the tiers of HiCache.
        declare_resolution(server_args, "fluxion", disaggregation_decode_retraction_backup="cpu_tensor")
    _narrow_drafts(server_args, view)
    # One host pool has all layers, so a cached prefix also serves layers with a window.
    declare_resolution(
        server_args,
        "fluxion",
        attention_backend=compat.BACKEND,
        page_size=PAGE,
        disable_hybrid_swa_memory=True,
    )


def _prepare_gguf(server_args: Any, view: Any) -> bool:
    """Let SGLang load a GGUF file from a folder with all files that it needs. Returns whether the model is a GGUF file.
    Raises ConfigError."""
    from sglang.srt.utils.hf_transformers_utils import check_gguf_file

    if view.device != "cpu" or view.load_format not in ("auto", "gguf") or not check_gguf_file(view.model_path):
        return False
    from sglang.srt.arg_groups.overrides import declare_resolution

    header = gguf_model.check(Path(view.model_path), view)
    own_tokenizer = view.tokenizer_path == view.model_path
    path = gguf_model.prepared(header, own_tokenizer and not view.skip_tokenizer_init)
    declare_resolution(server_args, "fluxion", model_path=str(path))
    if own_tokenizer:
        declare_resolution(server_args, "fluxion", tokenizer_path=str(path.parent))
    return True


def _serve_language_model(server_args: Any, view: Any) -> None:
    """Let SGLang load the language model of a vision-language checkpoint. Raises ConfigError."""
    if view.model_config_parser not in ("auto", "hf"):
        return
    if not language_model.is_checkpoint(served_models.configuration(view)):
        return
    if view.enable_multimodal:
        raise ConfigError(
            "--enable-fluxion does not work with --enable-multimodal, because it serves the language model of this "
            "checkpoint alone; leave --enable-multimodal out."
        )
    language_model.check_load_format(view.load_format)
    from sglang.srt.arg_groups.overrides import declare_resolution

    language_model.register()
    declare_resolution(
        server_args,
        "fluxion",
        model_config_parser=language_model.PARSER,
        json_model_override_args=language_model.overrides(view.json_model_override_args),
    )
    logger.info(
        "Fluxion serves the language model of this checkpoint; requests with images, video or audio are refused"
    )


def _compute_adapters(server_args: Any, view: Any) -> None:
    """Compute LoRA with PyTorch, because SGLang's other backends need GPU kernels. Raises ConfigError."""
    if view.lora_backend not in (_LORA, _default(server_args, "lora_backend")):
        raise ConfigError(
            f"--enable-fluxion does not work with --lora-backend {view.lora_backend} on a CPU, because its kernels are "
            f"for GPUs; use --lora-backend {_LORA} or leave --lora-backend out."
        )
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(server_args, "fluxion", lora_backend=_LORA)


def _narrow_drafts(server_args: Any, view: Any) -> None:
    """Set the breadth of drafts to 1: SGLang needs pages of one token for more. ConfigError for an explicit other
    one."""
    if view.speculative_algorithm is None:
        return
    from sglang.srt.arg_groups.overrides import declare_resolution

    breadth = view.speculative_ngram_max_bfs_breadth
    if breadth not in (1, _default(server_args, "speculative_ngram_max_bfs_breadth")):
        raise ConfigError(
            f"--speculative-ngram-max-bfs-breadth is {breadth}, and with pages of {PAGE} tokens SGLang drafts with a "
            "breadth of 1 alone; leave the option out."
        )
    declare_resolution(server_args, "fluxion", speculative_ngram_max_bfs_breadth=1)


def _handle_cuda_graph_config(server_args: Any, previous: _Step) -> None:
    """Disable graphs by default, because decode calls the host. Precedes the memory heuristic, which counts graphs."""
    previous(server_args)
    if not server_args.enable_fluxion:
        return
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    recorded = options_of(server_args).cuda_graphs
    for phase in Phase.ALL:
        backend = Backend.FULL if recorded and phase == Phase.DECODE else Backend.DISABLED
        config = with_phase(resolving_view(server_args).cuda_graph_config, phase, backend=backend)
        declare_resolution(server_args, "fluxion", cuda_graph_config=config)


def _handle_model_specific_adjustments(server_args: Any, previous: _Step) -> None:
    """Check the model's configuration, whose source SGLang has resolved by now."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    model, view = model_config_of(server_args), resolving_view(server_args)
    served_models.check_model(model, view)
    served_models.check_stored(model, options_of(server_args))
    if served_models.has_states(model):
        _keep_states(server_args, model, view)
    _check_host_pool(model, view)
    if not served_models.is_gpt_oss(model):
        previous(server_args)
        return
    # This step of SGLang accepts only backends that it knows to support windows and sinks; ours is not among them.
    from sglang.srt.arg_groups.overrides import declare_resolution

    dtype, runner = view.dtype, {} if view.moe_runner_backend != "auto" else {"moe_runner_backend": "triton"}
    declare_resolution(server_args, "fluxion", attention_backend="triton", **runner)
    previous(server_args)
    # It also sets bfloat16 for MXFP4, which only SGLang's own kernels need.
    declare_resolution(server_args, "fluxion", attention_backend=compat.BACKEND, dtype=dtype)


def _keep_states(server_args: Any, model: Any, view: Any) -> None:
    """Let SGLang keep states of prefixes, in float32; those of convolutions in the model's dtype.

    Raises:
        ConfigError: the operator asked for another type.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.platforms import current_platform

    if view.mamba_ssm_dtype not in (None, "float32"):
        raise ConfigError(
            f"--enable-fluxion does not work with --mamba-ssm-dtype {view.mamba_ssm_dtype}, because its kernels keep "
            "states in float32; leave --mamba-ssm-dtype out."
        )
    compat.check(compat.STATE_NEEDS)
    declare_resolution(server_args, "fluxion", mamba_ssm_dtype="float32")
    current_platform.keeps_states = True
    # Also for child processes.
    os.environ["SGLANG_MAMBA_CONV_DTYPE"] = str(model.dtype).removeprefix("torch.")


def _check_host_pool(model: Any, view: Any) -> None:
    """Refuse a host pool that cannot fit, before any process is started.

    The ranks size it again after the weights are loaded, with less memory; a pool refused here would be refused there.
    """
    from fluxion_sglang.kv.host_pool import KVShape

    config = rank_options(view)
    shape = KVShape(
        layers=max(len(served_models.attention_layers(model)) // view.pp_size, 1),
        kv_heads=model.get_num_kv_heads(view.tp_size),
        head_dim=model.head_dim,
        dtype=model.dtype,
        int8=config.int8,
        sketched=config.sketched and view.speculative_algorithm is None,  # as pools.py
    )
    capacity.plan_tokens(config, shape, capacity.available_bytes(view))


def _validate_deepep_v2_dispatch_token_budget(server_args: Any, previous: _Step) -> None:
    """Our last step: check that the models' and other steps' decisions can be served."""
    previous(server_args)
    from sglang.srt.arg_groups.overrides import resolving_view

    if resolving_view(server_args).device == "cpu":
        _make_time_for_passes(server_args)
    validation.check_resolved(resolving_view(server_args), options_of(server_args))


_STEPS: dict[str, Callable[[Any, _Step], None]] = {
    "handle_missing_default_values": _handle_missing_default_values,
    "handle_cuda_graph_config": _handle_cuda_graph_config,
    "handle_model_specific_adjustments": _handle_model_specific_adjustments,
    "validate_deepep_v2_dispatch_token_budget": _validate_deepep_v2_dispatch_token_budget,
}


def _make_time_for_passes(server_args: Any) -> None:
    """Adapt SGLang's defaults, which are for GPUs, to passes that take a CPU minutes: shorter passes, so that /health
    is answered between them, and a longer watchdog timeout. Explicit options of the operator stay."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    # SGLang derives the chunk size from the memory as if it were a GPU's, up to 16,384 tokens.
    if server_args.chunked_prefill_size is None and (view.chunked_prefill_size or 0) > CHUNK:
        declare_resolution(server_args, "fluxion", chunked_prefill_size=CHUNK)
    if view.watchdog_timeout == _default(server_args, "watchdog_timeout"):
        declare_resolution(server_args, "fluxion", watchdog_timeout=WATCHDOG_S)


def _default(server_args: Any, name: str) -> Any:
    import msgspec

    return next(field.default for field in msgspec.structs.fields(type(server_args)) if field.name == name)
