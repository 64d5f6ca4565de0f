"""Options that --enable-fluxion refuses, one sentence each. They are checked before SGLang resolves options, and again
on the result. `served_models.py` has the refusals of models.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from fluxion_sglang import environment
from fluxion_sglang.config import OBSERVERS, ConfigError, FluxionConfig
from fluxion_sglang.executor.device import maker_of
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.native import topology
from fluxion_sglang.policy import AUTO
from fluxion_sglang.predictor.artifact import JSON_NAME, load
from fluxion_sglang.predictor.features import NAMES
from fluxion_sglang.sglang import compat
from fluxion_sglang.sglang.memory import capacity

LARGEST_DRAFT = 64
"""Most tokens of a draft; a 64-bit word has a bit for each ancestor."""

NGRAM = "NGRAM"
"""The speculative algorithm that is served."""


class Refusal(NamedTuple):
    """An option, a model, or an attention layer that --enable-fluxion does not support.

    Attributes:
        refused: tests the option's value, a ModelConfig (with a view of the options), or a layer.
        why: completes "because"; for a layer, "its attention layer". May contain {0.attributes} of model or layer.
        instead: completes "; ": what to do. "": leave the option out, or serve the model without Fluxion.
    """

    refused: Callable[..., bool]
    why: str
    instead: str = ""


def _other_than(*legal: Any) -> Callable[[Any], bool]:
    return lambda value: value not in legal


_OWN_ATTENTION = "it brings its own attention backend for prefill and decode"
_WHOLE_REQUESTS = "every rank holds whole requests of its KV heads"
_NO_DRAFT_MODEL = "it verifies drafts of SGLang's n-gram cache; a draft model would need a KV cache of its own"

# Options that are refused if they are given, grouped by the reason.
_GIVEN = {
    "the host pool already holds all KV and the radix tree already indexes it": (
        *("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker"),
        "disaggregation_decode_enable_offload_kvcache",
    ),
    "both replace the attention and the KV pool": ("enable_hisparse",),
    "the KV pool is in host memory, which is not unified with weights": ("enable_unified_memory",),
    "host KV has a layout of its own": ("enable_page_major_kv_layout",),
    "the host pool is indexed by SGLang's own radix tree": ("radix_cache_backend",),
    "an encoder has no KV cache": ("encoder_only",),
    "an embedding model decodes nothing, and host KV is for decoding": ("is_embedding",),
    "prefill and decode share one attention backend and one host pool": ("enable_pdmux",),
    _WHOLE_REQUESTS: ("enable_prefill_cp", "enable_kv_cache_sharding"),
    "its attention backend keeps the state of one batch at a time": ("enable_two_batch_overlap",),
    "host memory is not released and restored with the GPU's": ("enable_memory_saver",),
    "it exists to keep a KV cache": ("prefill_only_disable_kv_cache",),
    "its attention depends on which pages are selected": ("enable_deterministic_inference",),
    "multi-item scoring needs masks that its attention does not have": ("enable_mis",),
    "diffusion models decode many tokens a step": ("dllm_algorithm",),
    "SGLang would size a device buffer by the host pool": (
        "enable_return_routed_experts",
        "enable_return_indexer_topk",
    ),
}

OPTIONS = {
    "attention_backend": Refusal(_other_than(None, compat.BACKEND), _OWN_ATTENTION),
    "prefill_attention_backend": Refusal(_other_than(None, compat.BACKEND), _OWN_ATTENTION),
    "decode_attention_backend": Refusal(_other_than(None, compat.BACKEND), _OWN_ATTENTION),
    "page_size": Refusal(
        _other_than(None, PAGE),
        f"host KV is kept in pages of {PAGE} tokens",
        f"use --page-size {PAGE} or leave --page-size out",
    ),
    "kv_cache_dtype": Refusal(
        _other_than("auto", "bf16", "bfloat16"),
        "what the host pool stores is an option of its own",
        'use --kv-cache-dtype auto, and for KV in 8 bits --fluxion-config \'{"kv_dtype": "int8"}\'',
    ),
    "dtype": Refusal(
        _other_than("auto", "bfloat16", "float", "float32"),
        "the kernels compute in bfloat16 and float32",
        "use --dtype bfloat16 or --dtype float32",
    ),
    "disaggregation_mode": Refusal(
        _other_than("null", "decode"),
        "KV is not sent out of the host pool",
        "start the prefill server without --enable-fluxion",
    ),
    "speculative_algorithm": Refusal(
        _other_than(None, NGRAM),
        _NO_DRAFT_MODEL,
        f"use --speculative-algorithm {NGRAM} or leave --speculative-algorithm out",
    ),
    "decoupled_spec_role": Refusal(_other_than(None, "null"), _NO_DRAFT_MODEL),
    "dcp_size": Refusal(_other_than(1), _WHOLE_REQUESTS, "use --dcp-size 1"),
    "attn_cp_size": Refusal(_other_than(1), _WHOLE_REQUESTS, "use --attn-cp-size 1"),
    "attn_dp_size": Refusal(
        _other_than(1), "its padded batches name rows and pages without an owner", "use --dp-size for replicas"
    ),
    "kv_canary": Refusal(_other_than("none"), "it reads KV from device buffers by slot", "use --kv-canary none"),
    **{field: Refusal(bool, why) for why, fields in _GIVEN.items() for field in fields},
}
"""By the name in ServerArgs. A missing name raises CompatError and is not taken for a disabled option."""


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _refuse(args: Any, table: Mapping[str, Refusal], who: str, ours: Container[str] = ()) -> None:
    """Raise as `check_options` for the options of `table`; `who` begins the sentence."""
    for field, option in table.items():
        flag = _flag(field)
        try:
            value = getattr(args, field)
        except AttributeError:
            raise compat.missing(f"the option {flag}") from None
        if option.refused(value) and field not in ours:
            shown = flag if value is True else f"{flag} {value}"
            instead = option.instead or f"leave {flag} out"
            raise ConfigError(f"{who} does not work with {shown}, because {option.why}; {instead}.")


def check_options(args: Any, ours: Container[str] = ()) -> None:
    """Refuse options that --enable-fluxion does not support.

    Args:
        args: ServerArgs, or one of SGLang's views of them.
        ours: options that Fluxion itself has set.

    Raises:
        ConfigError: the first refused option.
        CompatError: an option of the table does not exist in this SGLang.
    """
    _refuse(args, OPTIONS, "--enable-fluxion", ours)
    from sglang.srt.environ import envs

    if envs.SGLANG_RUST_SERVER.get():
        raise ConfigError(
            "--enable-fluxion does not work with SGLANG_RUST_SERVER, because requests would not pass the checks that "
            "keep one of them from ending the server; unset the variable."
        )
    if envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get():
        shown = os.environ.get("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
        raise ConfigError(
            f"--enable-fluxion does not work with SGLANG_ENABLE_POST_CAPTURE_KV_SIZING={shown}, because the "
            "size of the host pool does not depend on CUDA graphs; unset the variable."
        )
    if (problem := environment.socket_problem()) is not None:
        raise ConfigError(problem)


def check_config(config: FluxionConfig, args: Any) -> None:
    """Refuse keys of --fluxion-config that other options exclude. Raises ConfigError.

    Args:
        args: SGLang's resolving view.
    """
    folder = config.path("predictor")
    if folder is not None and not (folder / JSON_NAME).is_file():
        raise ConfigError(
            f"predictor is {config.predictor!r}, which has no {JSON_NAME}; give the folder that `fluxion train` "
            "wrote, or leave the key out."
        )
    if folder is not None and config.policy.partition(":")[0] in (AUTO, "fluxion"):
        load(folder, features=NAMES, tau=None)  # whether it fits the model is checked after the weights are loaded
    _check_disk(config, args)
    _check_cores(config, capacity.ranks_on_host(args))
    if config.canary > 0 and args.pp_size > 1:
        raise ConfigError(
            f"canary does not work with --pp-size {args.pp_size}, because a stage that finds corrupt KV cannot end "
            "the requests of the others; use --pp-size 1 or leave the key out."
        )
    for option in ("tp_size", "pp_size", "dp_size"):
        count = getattr(args, option)
        for key in OBSERVERS:
            if getattr(config, key) is not None and count > 1:
                raise ConfigError(
                    f"{key} does not work with {_flag(option)} {count}, because one process that has every head of "
                    f"every layer writes its files; use {_flag(option)} 1 or leave {key} out."
                )


def _check_cores(config: FluxionConfig, ranks: int) -> None:
    named, each = config.core_list(), config.workers or 1
    if not named:
        return
    there = {int(core) for core in topology()["cores"]}
    if absent := [core for core in named if core not in there]:
        raise ConfigError(
            f"cores is {config.cores!r}, but this process may not run on core {absent[0]}; name some of the "
            f"{len(there)} cores that `taskset -cp $$` lists, or leave the key out."
        )
    if len(named) < ranks * each:
        raise ConfigError(
            f"cores is {config.cores!r}, which names {len(named)}, but the {ranks} ranks of this host divide them and "
            f"need {each} each; name at least {ranks * each} or leave the key out."
        )


def _check_disk(config: FluxionConfig, args: Any) -> None:
    folder = config.path("disk")
    if folder is None:
        return
    if args.disable_radix_cache:
        raise ConfigError(
            "disk does not work with --disable-radix-cache, because what the radix tree has is what is kept; leave one "
            "of them out."
        )
    if args.pp_size > 1:
        raise ConfigError(
            f"disk does not work with --pp-size {args.pp_size}, because the stages of a pipeline would not agree on "
            "what is in files; use --pp-size 1 or leave the key out."
        )
    if args.enable_lora or args.lora_paths:
        raise ConfigError(
            "disk does not work with LoRA, because an adapter that is trained again has the same name; leave one of "
            "them out."
        )
    if config.prefill_budget < 1:
        raise ConfigError(
            "disk does not work with prefill_budget below 1, because only exact KV is kept; leave one of them out."
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"disk is {str(folder)!r}, where KV cannot be kept ({error.strerror}); name a folder that this user may "
            "write to, or leave the key out."
        ) from None


def check_device(device: str, config: FluxionConfig) -> None:
    """Refuse unsupported devices, and keys of --fluxion-config that the device excludes.

    The check does not touch the device, because the launcher must not allocate its memory.

    Raises:
        ConfigError: one sentence.
        DeviceError: the library of the device is missing or does not fit.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"--enable-fluxion serves on NVIDIA GPUs and on the CPU, and SGLang would use {device}; hide the "
            "accelerator and add --device cpu, or leave the option out."
        )
    if config.cuda_graphs and device != "cuda":
        raise ConfigError(
            f"cuda_graphs records what a GPU does in a decode step, and SGLang would use {device}; leave the key out."
        )
    if config.prefill_budget < 1 and device != "cpu":
        raise ConfigError(
            f"prefill_budget is {config.prefill_budget:g}, but a sparse prefill runs on a CPU alone, and SGLang would "
            f"use {device}; leave the key out."
        )
    if config.int8 and (device != "cpu" or maker_of(device) is not None):
        raise ConfigError(
            "kv_dtype is int8, but only the CPU reads KV of 8 bits, and the model would run beside it on a device; "
            "leave the key out."
        )
    if config.canary > 0 and device != "cpu":
        raise ConfigError(
            f"canary is {config.canary:g}, but host KV is checked where the CPU reads all of it, and SGLang would use "
            f"{device}; leave the key out."
        )
    maker_of(device)  # raises if the device's library is missing


def check_speculation(args: Any, config: FluxionConfig) -> None:
    """Refuse options that speculative decoding excludes, once SGLang knows the device.

    Args:
        args: SGLang's resolving view.

    Raises:
        ConfigError, CompatError: one sentence.
    """
    if args.speculative_algorithm is None:
        return
    what, out = f"--speculative-algorithm {NGRAM}", "leave --speculative-algorithm out"
    if maker_of(args.device) is not None:
        raise ConfigError(
            f"--enable-fluxion works with {what} on a CPU alone, because a GPU's kernels attend to no trees of tokens; "
            f"hide the accelerator and add --device cpu, or {out}."
        )
    if args.tp_size * args.pp_size > 1:
        raise ConfigError(
            f"--enable-fluxion works with {what} on one rank alone, because ranks could accept different drafts; use "
            f"--tp-size 1 and --pp-size 1, or {out}."
        )
    if (key := next((key for key in OBSERVERS if getattr(config, key) is not None), None)) is not None:
        raise ConfigError(
            f"{key} does not work with {what}, because it watches steps of one token a request, and every step has a "
            f"draft; leave one of the two out."
        )


_RECEIVING = "--disaggregation-mode decode"
TRANSFER_OPTIONS = {
    "pp_size": Refusal(
        _other_than(1), "a stage that cannot take KV over cannot tell the other stages", "use --pp-size 1"
    ),
    "disaggregation_transfer_backend": Refusal(
        _other_than("mooncake", "mooncake_tcp", "fake"),
        "others would take the memory in which KV arrives for a GPU's",
        "use --disaggregation-transfer-backend mooncake, or mooncake_tcp where there is no RDMA",
    ),
    "speculative_algorithm": Refusal(_other_than(None), "the prompts of drafts are prefilled by their own server"),
    "enable_pd_role_switch": Refusal(bool, "KV is not sent out of the host pool"),
    "disaggregation_enable_kv_checksum": Refusal(bool, "the host pool keeps KV in another layout"),
    "disaggregation_decode_host_receive_threshold": Refusal(
        _other_than(1),
        "KV arrives in host memory in any case",
        "leave --disaggregation-decode-host-receive-threshold out",
    ),
    "disaggregation_decode_retraction_backup": Refusal(
        _other_than(None, "cpu_tensor", "none"),
        "the host pool already holds all KV",
        "use --disaggregation-decode-retraction-backup cpu_tensor or leave it out",
    ),
}
"""Options of SGLang 0.5.23 that are refused if another server prefills the prompts."""


def check_transfer(args: Any, config: FluxionConfig) -> None:
    """Refuse options that KV from a prefill server excludes, once SGLang knows the device.

    Args:
        args: SGLang's resolving view.

    Raises:
        ConfigError, CompatError: one sentence.
    """
    if args.disaggregation_mode != "decode":
        return
    if maker_of(args.device) is not None:
        raise ConfigError(
            f"--enable-fluxion works with {_RECEIVING} on a CPU alone, because KV that arrives would have to wait for "
            "the passes of a GPU; hide the accelerator and add --device cpu, or leave --disaggregation-mode out."
        )
    compat.check(compat.TRANSFER_NEEDS)
    _refuse(args, TRANSFER_OPTIONS, f"--enable-fluxion with {_RECEIVING}")
    given = {
        "disk": config.disk is not None,
        "record": config.record is not None,
        "prefill_budget": config.prefill_budget < 1,
    }
    for key in (key for key, is_given in given.items() if is_given):
        raise ConfigError(
            f"{key} does not work with {_RECEIVING}, because it needs prompts that this server prefills; leave one of "
            "the two out."
        )
    from sglang.srt.environ import envs

    if envs.SGLANG_DISAGG_STAGING_BUFFER.get():
        raise ConfigError(
            f"--enable-fluxion with {_RECEIVING} does not work with SGLANG_DISAGG_STAGING_BUFFER, because KV "
            "arrives in a landing zone of its own; unset the variable."
        )
    if not envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get():
        raise ConfigError(
            f"--enable-fluxion with {_RECEIVING} needs SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE, which is 0, "
            "because memory that a prefill server still writes to would be another request's; unset the variable."
        )


def check_draft(args: Any) -> None:
    """Refuse drafts that are too long for the kernels, once SGLang has resolved their size. Raises ConfigError."""
    if args.speculative_algorithm is not None and args.speculative_num_draft_tokens > LARGEST_DRAFT:
        raise ConfigError(
            f"--speculative-num-draft-tokens is {args.speculative_num_draft_tokens}, and the kernels take drafts of "
            f"at most {LARGEST_DRAFT} tokens; use a smaller number."
        )


def check_resolved(args: Any, config: FluxionConfig) -> None:
    """Check the resolved options, because a model or another step may have overridden ours.

    Args:
        args: SGLang's resolving view.

    Raises:
        ConfigError, CompatError: as for `check_options`.
    """
    check_options(args, () if config.disk is None else (compat.LINKER_OPTION,))
    check_draft(args)
    from sglang.srt.arg_groups.overrides import attention_backends_of
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase

    for backend in attention_backends_of(args):
        if backend != compat.BACKEND:
            raise ConfigError(
                f"--enable-fluxion lost its attention backend to {backend!r}, which SGLang chose for this "
                "model; serve the model without --enable-fluxion."
            )
    if args.page_size != PAGE:
        raise ConfigError(
            f"--enable-fluxion needs pages of {PAGE} tokens, and SGLang chose {args.page_size} for this "
            f"model; add --page-size {PAGE} or serve the model without --enable-fluxion."
        )
    for phase in Phase.ALL:
        chosen = args.cuda_graph_config[phase].backend
        asked = config.cuda_graphs and phase == Phase.DECODE and chosen == Backend.FULL
        if chosen != Backend.DISABLED and not asked:
            raise ConfigError(
                f"--enable-fluxion does not work with CUDA graphs that are {chosen}, which SGLang chose for {phase}; "
                f"add --cuda-graph-backend-{phase} disabled."
            )
