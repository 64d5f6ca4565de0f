"""What --enable-fluxion refuses, one sentence each: options, models, attention layers.

Three tables of refusals, applied where what they read is known: options before SGLang resolves anything and
once more on what it resolved, the model's configuration when it has been read, its layers when they have been
built.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.executor.device import maker_of
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.predictor.artifact import JSON_NAME
from fluxion_sglang.sglang import capacity, compat

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.radix_attention import RadixAttention

# Limits of the kernels.
HEAD_DIMS = range(32, 257, 16)
LARGEST_GROUP = 16
LARGEST_DRAFT = 64
"""Tokens of a draft, of which a word's bits name each one's ancestors."""

NGRAM = "NGRAM"
"""The one speculative algorithm that is served."""


_OTHER_MODEL = "serve it without --enable-fluxion"


class Refusal(NamedTuple):
    """What --enable-fluxion does not go with: an option, a model, or an attention layer.

    Attributes:
        refused: whether the option's value, a ModelConfig (with a view of the options), or a layer is refused.
        why: completes "because"; of a layer, "its attention layer". It may name {0.attributes} of model or layer.
        instead: completes "; ": what to do. "": to leave the option out.
    """

    refused: Callable[..., bool]
    why: str
    instead: str = ""


def _other_than(*legal: Any) -> Callable[[Any], bool]:
    return lambda value: value not in legal


_OWN_ATTENTION = "it brings its own attention backend for prefill and decode"
_WHOLE_REQUESTS = "every rank holds whole requests of its KV heads"
_NO_DRAFT_MODEL = "it verifies drafts of SGLang's n-gram cache; a draft model would need a KV cache of its own"

# Options that are refused wherever they are given, by the reason.
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
        'use --kv-cache-dtype auto, and for KV in 8 bits --fluxion-config \'{"kv_dtype": "mxint8"}\'',
    ),
    "dtype": Refusal(
        _other_than("auto", "bfloat16", "float", "float32"),
        "the kernels compute in bfloat16 and float32",
        "use --dtype bfloat16 or --dtype float32",
    ),
    "disaggregation_mode": Refusal(
        _other_than("null"),
        "KV cannot be sent from or into the host pool yet",
        "use --disaggregation-mode null, which prefills and decodes in one server",
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
        _other_than(1), "its padded batches name rows and pages that nobody owns", "use --dp-size for replicas"
    ),
    "kv_canary": Refusal(_other_than("none"), "it reads KV from device buffers by slot", "use --kv-canary none"),
    **{field: Refusal(bool, why) for why, fields in _GIVEN.items() for field in fields},
}
"""By the name in ServerArgs; one that does not exist is a CompatError, not an option that is off."""


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def check_options(args: Any, ours: Container[str] = ()) -> None:
    """Refuse options that do not go with --enable-fluxion.

    Args:
        args: ServerArgs, or one of SGLang's views of them.
        ours: options that Fluxion itself has set.

    Raises:
        ConfigError: the first refused option.
        CompatError: an option of the table does not exist in this SGLang.
    """
    for field, option in OPTIONS.items():
        flag = _flag(field)
        try:
            value = getattr(args, field)
        except AttributeError:
            raise compat.missing(f"the option {flag}") from None
        if option.refused(value) and field not in ours:
            shown = flag if value is True else f"{flag} {value}"
            instead = option.instead or f"leave {flag} out"
            raise ConfigError(f"--enable-fluxion does not work with {shown}, because {option.why}; {instead}.")
    from sglang.srt.environ import envs

    if envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get():
        shown = os.environ.get("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
        raise ConfigError(
            f"--enable-fluxion does not work with SGLANG_ENABLE_POST_CAPTURE_KV_SIZING={shown}, because the "
            "size of the host pool does not depend on CUDA graphs; unset the variable."
        )


def check_config(config: FluxionConfig, args: Any) -> None:
    """Refuse keys of --fluxion-config that do not go with other options. Raises ConfigError.

    Args:
        args: SGLang's resolving view.
    """
    folder = config.path("predictor")
    if folder is not None and not (folder / JSON_NAME).is_file():
        raise ConfigError(
            f"predictor is {config.predictor!r}, which has no {JSON_NAME}; give the folder that `fluxion train` "
            "wrote, or leave the key out."
        )
    _check_disk(config, args)
    cores, ranks, each = len(config.core_list()), capacity.ranks_on_host(args), config.workers or 1
    if cores and cores < ranks * each:
        raise ConfigError(
            f"cores is {config.cores!r}, which names {cores}, but the {ranks} ranks of this host divide them and need "
            f"{each} each; name at least {ranks * each} or leave the key out."
        )
    for option in ("tp_size", "pp_size", "dp_size"):
        count = getattr(args, option)
        for key in ("audit", "record"):
            if getattr(config, key) is not None and count > 1:
                raise ConfigError(
                    f"{key} does not work with {_flag(option)} {count}, because one process that has every head of "
                    f"every layer writes its files; use {_flag(option)} 1 or leave {key} out."
                )


def _check_disk(config: FluxionConfig, args: Any) -> None:
    folder = config.path("disk")
    if folder is None:
        return
    if (problem := compat.disk_problem(compat.sglang_version())) is not None:
        raise ConfigError(problem)
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
            f"disk is {config.disk!r}, where KV cannot be kept ({error.strerror}); name a folder that this user may "
            "write to, or leave the key out."
        ) from None


def check_device(device: str, config: FluxionConfig) -> None:
    """Refuse devices that there is no code for, and keys of --fluxion-config that do not go with the device.

    The device itself is not looked at: the launcher must not take part of its memory.

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
    if config.mxint8 and (device != "cpu" or maker_of(device) is not None):
        raise ConfigError(
            "kv_dtype is mxint8, but only the CPU reads KV of 8 bits, and the model would run beside it on a device; "
            "leave the key out."
        )
    if config.canary > 0 and device != "cpu":
        raise ConfigError(
            f"canary is {config.canary:g}, but host KV is checked where the CPU reads all of it, and SGLang would use "
            f"{device}; leave the key out."
        )
    maker_of(device)  # raises where its library is missing


def check_speculation(args: Any, config: FluxionConfig) -> None:
    """Refuse what does not go with speculative decoding, once SGLang knows the device.

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
    if (problem := compat.ngram_problem(compat.sglang_version())) is not None:
        raise ConfigError(problem)
    if args.tp_size * args.pp_size > 1:
        raise ConfigError(
            f"--enable-fluxion works with {what} on one rank alone, because ranks could accept different drafts; use "
            f"--tp-size 1 and --pp-size 1, or {out}."
        )
    if (key := next((key for key in ("audit", "record") if getattr(config, key) is not None), None)) is not None:
        raise ConfigError(
            f"{key} does not work with {what}, because it watches steps of one token a request, and every step has a "
            f"draft; leave one of the two out."
        )


def check_draft(args: Any) -> None:
    """Refuse drafts that the kernels cannot take, once SGLang has settled their size. Raises ConfigError."""
    if args.speculative_algorithm is not None and args.speculative_num_draft_tokens > LARGEST_DRAFT:
        raise ConfigError(
            f"--speculative-num-draft-tokens is {args.speculative_num_draft_tokens}, and the kernels take drafts of "
            f"at most {LARGEST_DRAFT} tokens; use a smaller number."
        )


def check_resolved(args: Any, config: FluxionConfig) -> None:
    """Check what SGLang made of the options: a model or another step may have decided against ours.

    Args:
        args: SGLang's resolving view.

    Raises:
        ConfigError, CompatError: as `check_options`.
    """
    check_options(args, () if config.disk is None else (compat.LINKER_OPTION,))
    check_draft(args)
    if args.device == "cpu" and args.tp_size * args.pp_size > 1:
        problem = compat.cpu_ranks_problem(compat.sglang_version())
        if problem is not None:
            raise ConfigError(problem)
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


def _first(table: Sequence[Refusal], source: str, subject: Any, *args: Any) -> tuple[str, str] | None:
    """The reason of the first refusal of `subject`, and what to do instead.

    Raises:
        CompatError: an attribute that the table reads does not exist in this SGLang; `source` says whose.
    """
    try:
        for refusal in table:
            if refusal.refused(subject, *args):
                return refusal.why.format(subject), refusal.instead or _OTHER_MODEL
    except AttributeError as error:
        raise compat.missing(f"{source} attribute {error.name!r}") from None
    return None


def _is_latent(model: ModelConfig, args: Any) -> bool:
    from sglang.srt.configs.model_config import AttentionArch

    return model.attention_arch != AttentionArch.MHA


def _is_linear(model: ModelConfig, args: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model) is not None


def _has_sparse_index(model: ModelConfig, args: Any) -> bool:
    from sglang.srt.configs.model_config import is_minimax_sparse

    return bool(is_minimax_sparse(model.hf_config))


def _layer_types(model: ModelConfig) -> set[str]:
    return set(getattr(model.hf_text_config, "layer_types", None) or ())


def _has_chunked_layers(model: ModelConfig, args: Any) -> bool:
    chunked = "chunked_attention" in _layer_types(model)
    return bool(model.is_local_attention_model or model.attention_chunk_size or chunked)


def _has_pools_by_layer(model: ModelConfig, args: Any) -> bool:
    return bool(model.is_hybrid_swa)  # the option that our resolution sets has no say for this model


def _needs_expert_kernels(model: ModelConfig, args: Any) -> bool:
    return "GptOssForCausalLM" in (model.hf_config.architectures or ())


def _caps_logits(model: ModelConfig) -> bool:
    return bool(getattr(model.hf_text_config, "attn_logit_softcapping", None))


def _varies_beside_device(model: ModelConfig, args: Any) -> bool:
    varies = model.has_attention_sinks or "sliding_attention" in _layer_types(model) or _caps_logits(model)
    return varies and maker_of(args.device) is not None


def _whole_groups(q_heads: int, kv_heads: int) -> bool:
    return q_heads % kv_heads == 0 and q_heads // kv_heads <= LARGEST_GROUP


def _groups_of_a_rank(model: ModelConfig, args: Any) -> bool:
    # Attention data parallelism makes groups no larger than this.
    return _whole_groups(model.get_num_attention_heads(args.tp_size), model.get_num_kv_heads(args.tp_size))


MODELS = (
    Refusal(lambda m, _: m.is_encoder_decoder, "it is an encoder-decoder, which attends across"),
    Refusal(
        lambda m, _: m.is_multimodal or m.is_audio_model,
        "it is multimodal, and SGLang would size input buffers by the host pool",
        "serve its language model alone with --language-model-only where SGLang supports that, or " + _OTHER_MODEL,
    ),
    Refusal(
        _is_linear,
        "it has linear-attention or state-space layers, which SGLang computes with kernels for GPUs alone, and there "
        "keeps state of in a pool that the host pool cannot stand in for",
    ),
    Refusal(_is_latent, "its attention is {0.attention_arch.name} and not multi-head (it stores no key per KV head)"),
    Refusal(_has_sparse_index, "it brings a sparse index of its own"),
    Refusal(_has_chunked_layers, "it has chunked-attention layers, whose masks the kernels do not have"),
    Refusal(_has_pools_by_layer, "its sliding-window layers need a KV pool of their own"),
    Refusal(_needs_expert_kernels, "SGLang computes its experts with kernels that need a GPU or AMX"),
    Refusal(
        _varies_beside_device,
        "it has sliding windows, learned attention sinks or capped logits, which Fluxion serves only where the CPU is "
        "the device",
        "hide the accelerator and add --device cpu, or " + _OTHER_MODEL,
    ),
    Refusal(
        lambda m, _: bool(getattr(m, "use_alibi", False)),
        "it adds position biases (ALiBi) to attention logits, which the kernels do not",
    ),
    Refusal(
        lambda m, _: m.dtype not in (torch.bfloat16, torch.float32),
        "it would run in {0.dtype} and the kernels compute in bfloat16 and float32",
        "add --dtype bfloat16 or --dtype float32",
    ),
    Refusal(
        lambda m, args: args.kv_cache_dtype in ("bf16", "bfloat16") and m.dtype != torch.bfloat16,
        "it runs in {0.dtype} and --kv-cache-dtype asks for another type",
        "use --kv-cache-dtype auto",
    ),
    Refusal(
        lambda m, _: m.v_head_dim != m.head_dim,
        "its keys have {0.head_dim} elements and its values {0.v_head_dim}, and tiles hold both in one size",
    ),
    Refusal(
        lambda m, _: m.head_dim not in HEAD_DIMS,
        f"its head dimension is {{0.head_dim}} and the kernels take multiples of {HEAD_DIMS.step} "
        f"from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}",
    ),
    Refusal(
        lambda m, args: not _groups_of_a_rank(m, args),
        f"its {{0.num_attention_heads}} query heads do not form whole groups of at most {LARGEST_GROUP} a KV head",
        "use another --tp-size or " + _OTHER_MODEL,
    ),
)


def check_model(model: ModelConfig, args: Any) -> None:
    """Refuse models that Fluxion cannot serve.

    Args:
        model: SGLang's configuration of the model.
        args: SGLang's resolving view.

    Raises:
        ConfigError: the first reason.
        CompatError: an attribute that the table reads does not exist in this SGLang.
    """
    if (found := _first(MODELS, "ModelConfig's or ServerArgs'", model, args)) is not None:
        names = ", ".join(model.hf_config.architectures or ["unknown"])
        raise ConfigError(f"--enable-fluxion cannot serve this model ({names}), because {found[0]}; {found[1]}.")


def check_stored(model: ModelConfig, config: FluxionConfig) -> None:
    """Refuse to store in 8 bits what a model in float32 attends to. Raises ConfigError."""
    if config.mxint8 and model.dtype != torch.bfloat16:
        raise ConfigError(
            f"kv_dtype mxint8 does not work with a model in {model.dtype}, because what is stored reads as bfloat16; "
            "add --dtype bfloat16 or leave kv_dtype out."
        )


LAYERS = (
    Refusal(lambda layer: layer.is_cross_attention, "attends across to an encoder"),
    Refusal(lambda layer: layer.attn_type.value != "decoder", "attends to later tokens ({0.attn_type.value})"),
    Refusal(lambda layer: layer.logit_cap < 0, "caps attention logits at {0.logit_cap}"),
    Refusal(lambda layer: layer.xai_temperature_len > 0, "scales attention logits by position"),
    Refusal(lambda layer: layer.pos_encoding_mode != "NONE", "encodes positions in attention ({0.pos_encoding_mode})"),
    Refusal(
        lambda layer: layer.v_head_dim != layer.qk_head_dim,
        "has keys of {0.qk_head_dim} elements and values of {0.v_head_dim}",
    ),
    Refusal(lambda layer: layer.qk_head_dim not in HEAD_DIMS, "has a head dimension of {0.qk_head_dim}"),
    Refusal(
        lambda layer: not _whole_groups(layer.tp_q_head_num, layer.tp_k_head_num),
        "has {0.tp_q_head_num} query heads for {0.tp_k_head_num} KV heads, no whole groups of at most "
        f"{LARGEST_GROUP}",
    ),
)


def window_of(layer: RadixAttention) -> int | None:
    """Tokens that a token attends to in a sliding-window layer, itself included; None: all up to its own."""
    size = layer.sliding_window_size
    # SGLang counts the tokens before a token's own; -1 is no window.
    return None if size is None or size < 0 else int(size) + 1


def check_recorded(config: FluxionConfig, layers: Sequence[RadixAttention], model: ModelConfig) -> None:
    """Refuse to record what a predictor is trained on where it would be measured without part of the softmax.

    Raises:
        ConfigError: one sentence.
    """
    if config.record is not None and (
        model.has_attention_sinks or any(window_of(layer) or layer.logit_cap for layer in layers)
    ):
        raise ConfigError(
            "record does not work with this model, because it has sliding windows, learned attention sinks or capped "
            "logits, and samples are measured without them; leave record out."
        )


def check_windows(draft: int | None, layers: Sequence[RadixAttention]) -> None:
    """Refuse drafts of more tokens than a layer's window. Raises ConfigError.

    Args:
        draft: tokens of a draft; None: there are none.
    """
    least = min((window for layer in layers if (window := window_of(layer)) is not None), default=None)
    if draft is not None and least is not None and draft > least:
        raise ConfigError(
            f"--speculative-num-draft-tokens is {draft}, but layers of this model have a window of {least} tokens, "
            "and a draft must fit into it; use a smaller number."
        )


def check_attention_layers(model: Any, beside_device: bool = False) -> Sequence[RadixAttention]:
    """Refuse layers that are more than the model's configuration said; return all attention layers.

    Args:
        model: torch.nn.Module with at least one RadixAttention.
        beside_device: the model runs on a device with memory of its own.

    Raises:
        ConfigError: the first reason.
        CompatError: an attribute that the table reads does not exist in this SGLang.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    if not layers:
        raise _unserved("it has no attention")
    for layer in layers:
        if (found := _first(LAYERS, "RadixAttention's", layer)) is not None:
            raise _unserved(f"its attention layer {layer.layer_id} {found[0]}, which the kernels do not support")
        if beside_device and (window_of(layer) is not None or layer.logit_cap):
            raise _unserved(
                f"its attention layer {layer.layer_id} has a sliding window or capped logits, which Fluxion serves "
                "only where the CPU is the device"
            )
    shapes = {(layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim) for layer in layers}
    if len(shapes) > 1:
        listed = ", ".join(f"{q} query and {k} KV heads of {d}" for q, k, d in sorted(shapes))
        raise _unserved(f"its attention layers differ in heads or head dimension ({listed})")
    if len({layer.layer_id for layer in layers}) < len(layers):
        raise _unserved("some of its layers share one KV cache")
    return layers


def _unserved(why: str) -> ConfigError:
    return ConfigError(f"--enable-fluxion cannot serve this model, because {why}; {_OTHER_MODEL}.")
