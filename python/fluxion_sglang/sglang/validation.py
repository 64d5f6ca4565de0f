"""What --enable-fluxion refuses, one sentence each: options, models, attention layers.

Three tables of refusals, applied where what they read is known: options before SGLang resolves anything and
once more on what it resolved, the model's configuration when it has been read, its layers when they have been
built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxion_sglang.config import ConfigError, FluxionConfig
from fluxion_sglang.executor.device import library_of
from fluxion_sglang.kv.placement import PAGE
from fluxion_sglang.sglang import capacity, compat

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.radix_attention import RadixAttention

# Limits of the kernels.
HEAD_DIMS = range(32, 257, 16)
LARGEST_GROUP = 16

_DEFAULTS = FluxionConfig()


@dataclass(frozen=True)
class OptionRefusal:
    """An option that does not go with --enable-fluxion.

    Attributes:
        field: its name in ServerArgs; one that does not exist is a CompatError, not an option that is off.
        refused: whether a value is refused.
        why: completes "..., because".
        instead: completes "; ", the legal choice. {option} stands for the option.
    """

    field: str
    refused: Callable[[Any], bool]
    why: str
    instead: str = "leave {option} out"

    @property
    def option(self) -> str:
        return "--" + self.field.replace("_", "-")

    def sentence(self, value: Any) -> str:
        shown = self.option if value is True else f"{self.option} {value}"
        instead = self.instead.format(option=self.option)
        return f"--enable-fluxion does not work with {shown}, because {self.why}; {instead}."


def _given(value: Any) -> bool:
    return bool(value)


def _other_than(*legal: Any) -> Callable[[Any], bool]:
    return lambda value: value not in legal


_OWN_HOST_CACHE = "the host pool already holds all KV and the radix tree already indexes it"
_OWN_ATTENTION = "it brings its own attention backend for prefill and decode"

OPTIONS: tuple[OptionRefusal, ...] = (
    OptionRefusal("attention_backend", _other_than(None, "fluxion"), _OWN_ATTENTION),
    OptionRefusal("prefill_attention_backend", _other_than(None, "fluxion"), _OWN_ATTENTION),
    OptionRefusal("decode_attention_backend", _other_than(None, "fluxion"), _OWN_ATTENTION),
    OptionRefusal(
        "page_size",
        _other_than(None, PAGE),
        f"host KV is kept in pages of {PAGE} tokens",
        f"use --page-size {PAGE} or leave {{option}} out",
    ),
    OptionRefusal(
        "kv_cache_dtype",
        _other_than("auto", "bf16", "bfloat16"),
        "host KV is not quantised",
        "use --kv-cache-dtype auto or bfloat16",
    ),
    OptionRefusal(
        "dtype",
        _other_than("auto", "bfloat16", "float", "float32"),
        "the kernels compute in bfloat16 and float32",
        "use --dtype bfloat16 or --dtype float32",
    ),
    OptionRefusal("speculative_algorithm", _given, "its decode steps have one token a request"),
    OptionRefusal("enable_hierarchical_cache", _given, _OWN_HOST_CACHE),
    OptionRefusal("enable_hisparse", _given, "both replace the attention and the KV pool"),
    OptionRefusal("enable_unified_memory", _given, "the KV pool is in host memory, which is not unified with weights"),
    OptionRefusal("enable_page_major_kv_layout", _given, "host KV has a layout of its own"),
    OptionRefusal("enable_lmcache", _given, _OWN_HOST_CACHE),
    OptionRefusal("enable_flexkv", _given, _OWN_HOST_CACHE),
    OptionRefusal("enable_unified_cache_external_linker", _given, _OWN_HOST_CACHE),
    OptionRefusal("radix_cache_backend", _given, "the host pool is indexed by SGLang's own radix tree"),
    OptionRefusal(
        "disaggregation_mode",
        _other_than("null"),
        "KV cannot be sent from or into the host pool yet",
        "use --disaggregation-mode null, which prefills and decodes in one server",
    ),
    OptionRefusal("disaggregation_decode_enable_offload_kvcache", _given, _OWN_HOST_CACHE),
    OptionRefusal("decoupled_spec_role", _other_than(None, "null"), "its decode steps have one token a request"),
    OptionRefusal("encoder_only", _given, "an encoder has no KV cache"),
    OptionRefusal("enable_pdmux", _given, "prefill and decode share one attention backend and one host pool"),
    OptionRefusal("dcp_size", _other_than(1), "every rank holds whole requests of its KV heads", "use --dcp-size 1"),
    OptionRefusal(
        "attn_cp_size",
        _other_than(1),
        "every rank holds whole requests of its KV heads",
        "use --attn-cp-size 1",
    ),
    OptionRefusal(
        "attn_dp_size",
        _other_than(1),
        "its padded batches name rows and pages that nobody owns",
        "use --dp-size for replicas",
    ),
    OptionRefusal("enable_prefill_cp", _given, "every rank holds whole requests of its KV heads"),
    OptionRefusal("enable_kv_cache_sharding", _given, "every rank holds whole requests of its KV heads"),
    OptionRefusal("enable_two_batch_overlap", _given, "its attention backend keeps the state of one batch at a time"),
    OptionRefusal("enable_memory_saver", _given, "host memory is not released and restored with the GPU's"),
    OptionRefusal("prefill_only_disable_kv_cache", _given, "it exists to keep a KV cache"),
    OptionRefusal("enable_deterministic_inference", _given, "its attention depends on which pages are selected"),
    OptionRefusal("enable_mis", _given, "multi-item scoring needs masks that its attention does not have"),
    OptionRefusal("dllm_algorithm", _given, "diffusion models decode many tokens a step"),
    OptionRefusal("enable_return_routed_experts", _given, "SGLang would size a device buffer by the host pool"),
    OptionRefusal("enable_return_indexer_topk", _given, "SGLang would size a device buffer by the host pool"),
    OptionRefusal("kv_canary", _other_than("none"), "it reads KV from device buffers by slot", "use --kv-canary none"),
)


def check_options(args: Any) -> None:
    """Refuse options that do not go with --enable-fluxion.

    Args:
        args: ServerArgs, or one of SGLang's views of them.

    Raises:
        ConfigError: the first refused option.
        CompatError: an option of the table does not exist in this SGLang.
    """
    for refusal in OPTIONS:
        try:
            value = getattr(args, refusal.field)
        except AttributeError:
            raise compat.missing(f"the option {refusal.option}") from None
        if refusal.refused(value):
            raise ConfigError(refusal.sentence(value))
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
    folder = None if config.predictor is None else Path(os.path.expanduser(config.predictor))
    if folder is not None and not (folder / "predictor.json").is_file():
        raise ConfigError(
            f"predictor is {config.predictor!r}, which has no predictor.json; give the folder that `fluxion train` "
            "wrote, or leave the key out."
        )
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
                shown = "--" + option.replace("_", "-")
                raise ConfigError(
                    f"{key} does not work with {shown} {count}, because one process that has every head of every layer "
                    f"writes its files; use {shown} 1 or leave {key} out."
                )


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
    library_of(device)  # raises where it is missing


def check_resolved(args: Any, config: FluxionConfig = _DEFAULTS) -> None:
    """Check what SGLang made of the options: a model or another step may have decided against ours.

    Args:
        args: SGLang's resolving view.

    Raises:
        ConfigError, CompatError: as `check_options`.
    """
    check_options(args)
    version = compat.sglang_version()
    if args.device == "cpu" and args.tp_size * args.pp_size > 1 and not compat.has_cpu_ranks(version):
        raise ConfigError(
            f"SGLang {version} cannot divide a model among processes on a CPU, because it sets up NCCL there, too; "
            "install sglang 0.5.23, or use --tp-size 1 and --pp-size 1."
        )
    from sglang.srt.arg_groups.overrides import attention_backends_of
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase

    for backend in attention_backends_of(args):
        if backend != "fluxion":
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
        legal = (
            (Backend.DISABLED, Backend.FULL) if config.cuda_graphs and phase == Phase.DECODE else (Backend.DISABLED,)
        )
        if (chosen := args.cuda_graph_config[phase].backend) not in legal:
            raise ConfigError(
                f"--enable-fluxion does not work with CUDA graphs that are {chosen}, which SGLang chose for {phase}; "
                f"add --cuda-graph-backend-{phase} disabled."
            )


@dataclass(frozen=True)
class ModelRefusal:
    """A model that Fluxion cannot serve.

    Attributes:
        refused: whether a ModelConfig (with a view of the options) is refused.
        sentence: completes "cannot serve this model, because"; may name {attributes} of the config.
    """

    refused: Callable[[ModelConfig, Any], bool]
    sentence: str


_OTHER_MODEL = "serve it without --enable-fluxion"


def _is_latent(model: ModelConfig, args: Any) -> bool:
    from sglang.srt.configs.model_config import AttentionArch

    return model.attention_arch != AttentionArch.MHA


def _is_linear(model: ModelConfig, args: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model) is not None


def _has_sparse_index(model: ModelConfig, args: Any) -> bool:
    from sglang.srt.configs.model_config import is_minimax_sparse

    return bool(is_minimax_sparse(model.hf_config))


def _has_local_layers(model: ModelConfig, args: Any) -> bool:
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    local = kinds & {"sliding_attention", "chunked_attention"}
    return bool(model.is_hybrid_swa or model.is_local_attention_model or model.attention_chunk_size or local)


def _is_half(model: ModelConfig, args: Any) -> bool:
    import torch

    return model.dtype not in (torch.bfloat16, torch.float32)


def _mixes_dtypes(model: ModelConfig, args: Any) -> bool:
    import torch

    return args.kv_cache_dtype in ("bf16", "bfloat16") and model.dtype != torch.bfloat16


def _group(model: ModelConfig, args: Any) -> float:
    """Query heads a KV head on one rank; attention data parallelism makes groups no larger than this."""
    return model.get_num_attention_heads(args.tp_size) / model.get_num_kv_heads(args.tp_size)


MODELS: tuple[ModelRefusal, ...] = (
    ModelRefusal(
        lambda model, args: bool(model.is_encoder_decoder),
        "it is an encoder-decoder, which attends across; {other}",
    ),
    ModelRefusal(
        lambda model, args: bool(model.is_multimodal or model.is_audio_model),
        "it is multimodal, and SGLang would size input buffers by the host pool; serve its language model "
        "alone with --language-model-only where SGLang supports that, or serve it without --enable-fluxion",
    ),
    ModelRefusal(_is_linear, "it has linear-attention or state-space layers, which have no KV to page; {other}"),
    ModelRefusal(
        _is_latent,
        "its attention is {attention_arch.name} and not multi-head (it stores no key per KV head); {other}",
    ),
    ModelRefusal(_has_sparse_index, "it brings a sparse index of its own; {other}"),
    ModelRefusal(
        lambda model, args: bool(model.has_attention_sinks),
        "it has learned attention sinks, a term of the softmax that belongs to no token; {other}",
    ),
    ModelRefusal(_has_local_layers, "it has sliding-window or chunked-attention layers, which read no middle; {other}"),
    ModelRefusal(
        lambda model, args: bool(getattr(model.hf_text_config, "attn_logit_softcapping", None)),
        "it caps attention logits, which the kernels do not; {other}",
    ),
    ModelRefusal(
        lambda model, args: bool(getattr(model, "use_alibi", False)),
        "it adds position biases (ALiBi) to attention logits, which the kernels do not; {other}",
    ),
    ModelRefusal(
        _is_half,
        "it would run in {dtype} and the kernels compute in bfloat16 and float32; add --dtype bfloat16 or "
        "--dtype float32",
    ),
    ModelRefusal(
        _mixes_dtypes,
        "it runs in {dtype} and --kv-cache-dtype asks for another type; use --kv-cache-dtype auto",
    ),
    ModelRefusal(
        lambda model, args: model.v_head_dim != model.head_dim,
        "its keys have {head_dim} elements and its values {v_head_dim}, and tiles hold both in one size; {other}",
    ),
    ModelRefusal(
        lambda model, args: model.head_dim not in HEAD_DIMS,
        f"its head dimension is {{head_dim}} and the kernels take multiples of {HEAD_DIMS.step} from "
        f"{HEAD_DIMS[0]} to {HEAD_DIMS[-1]}; {{other}}",
    ),
    ModelRefusal(
        lambda model, args: not _group(model, args).is_integer() or _group(model, args) > LARGEST_GROUP,
        f"its {{num_attention_heads}} query heads do not form whole groups of at most {LARGEST_GROUP} a KV "
        "head; use another --tp-size or serve it without --enable-fluxion",
    ),
)


def check_model(model: ModelConfig, server_args: Any) -> None:
    """Refuse models that Fluxion cannot serve.

    Args:
        model: SGLang's configuration of the model.
        server_args: ServerArgs, or one of SGLang's views of them.

    Raises:
        ConfigError: the first reason.
        CompatError: an attribute that the table reads does not exist in this SGLang.
    """
    args = _resolved(server_args)
    for refusal in MODELS:
        try:
            refused = refusal.refused(model, args)
        except AttributeError as error:
            raise compat.missing(f"ModelConfig's or ServerArgs' attribute {error.name!r}") from None
        if refused:
            shown = _Attributes(model, {"other": _OTHER_MODEL})
            raise ConfigError(
                "--enable-fluxion cannot serve this model "
                f"({', '.join(model.hf_config.architectures or ['unknown'])}), because "
                f"{refusal.sentence.format_map(shown)}."
            )


LAYERS: tuple[tuple[Callable[[RadixAttention], bool], str], ...] = (
    (lambda layer: layer.is_cross_attention, "attends across to an encoder"),
    (lambda layer: layer.attn_type.value != "decoder", "attends to later tokens ({attn_type.value})"),
    (lambda layer: layer.sliding_window_size > 0, "has a sliding window of {sliding_window_size} tokens"),
    (lambda layer: layer.logit_cap > 0, "caps attention logits at {logit_cap}"),
    (lambda layer: layer.xai_temperature_len > 0, "scales attention logits by position"),
    (lambda layer: layer.pos_encoding_mode != "NONE", "encodes positions in attention ({pos_encoding_mode})"),
    (
        lambda layer: layer.v_head_dim != layer.qk_head_dim,
        "has keys of {qk_head_dim} elements and values of {v_head_dim}",
    ),
    (lambda layer: layer.qk_head_dim not in HEAD_DIMS, "has a head dimension of {qk_head_dim}"),
    (
        lambda layer: (
            layer.tp_q_head_num % layer.tp_k_head_num != 0 or layer.tp_q_head_num // layer.tp_k_head_num > LARGEST_GROUP
        ),
        "has {tp_q_head_num} query heads for {tp_k_head_num} KV heads, no whole groups of at most "
        + str(LARGEST_GROUP),
    ),
)


def check_attention_layers(model: Any) -> Sequence[RadixAttention]:
    """Refuse layers that are more than the model's configuration said; return all attention layers.

    Args:
        model: torch.nn.Module with at least one RadixAttention.

    Raises:
        ConfigError: the first reason.
        CompatError: an attribute that the table reads does not exist in this SGLang.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    if not layers:
        raise ConfigError("--enable-fluxion cannot serve this model, because it has no attention; serve it without.")
    for layer in layers:
        for refused, what in LAYERS:
            try:
                problem = what.format_map(_Attributes(layer)) if refused(layer) else None
            except AttributeError as error:
                raise compat.missing(f"RadixAttention's attribute {error.name!r}") from None
            if problem is not None:
                raise ConfigError(
                    f"--enable-fluxion cannot serve this model, because its attention layer {layer.layer_id} "
                    f"{problem}, which the kernels do not support; {_OTHER_MODEL}."
                )
    shapes = {(layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim) for layer in layers}
    if len(shapes) > 1:
        raise ConfigError(
            "--enable-fluxion cannot serve this model, because its attention layers differ in heads or head "
            f"dimension ({', '.join(f'{q} query and {k} KV heads of {d}' for q, k, d in sorted(shapes))}); "
            f"{_OTHER_MODEL}."
        )
    if len({layer.layer_id for layer in layers}) < len(layers):
        raise ConfigError(
            f"--enable-fluxion cannot serve this model, because some of its layers share one KV cache; {_OTHER_MODEL}."
        )
    return layers


def check_scaling(layers: Sequence[RadixAttention]) -> None:
    """Refuse layers that scale scores differently: a device's CPU side is told once. Raises ConfigError."""
    scales = sorted({float(layer.scaling) for layer in layers})
    if len(scales) > 1:
        raise ConfigError(
            "--enable-fluxion cannot serve this model on a GPU, because its attention layers scale scores differently "
            f"({', '.join(f'{scale:g}' for scale in scales)}); serve it with --device cpu or without --enable-fluxion."
        )


class _Attributes(dict[str, Any]):
    """A mapping for str.format_map whose values are the attributes of an object."""

    def __init__(self, source: Any, more: dict[str, Any] | None = None) -> None:
        super().__init__(more or {})
        self._source = source

    def __missing__(self, key: str) -> Any:
        return getattr(self._source, key)


def _resolved(server_args: Any) -> Any:
    """Decisions over raw input, where given the record itself: its raw fields may still be None."""
    if hasattr(type(server_args), "resolve_once"):
        from sglang.srt.arg_groups.overrides import resolving_view

        return resolving_view(server_args)
    return server_args
